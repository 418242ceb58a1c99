"""`dra policy`: what a change of GpuNodePolicies would do, and how far the fleet is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dra.cli.cluster import add_cluster_arguments, cluster_client
from dra.cli.columns import aligned
from dra.cli.common_flags import Subparsers
from dra.errors import ConfigError, KubeError

if TYPE_CHECKING:
    from dra.diagnose.policy import FleetStatus, PolicyDiff
    from dra.kube.client import KubeClient
    from dra.kube.resources import Resource

EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2
_NOT_THERE = frozenset({"DRA-API-NOT-SERVED", "DRA-API-NOT-FOUND", "DRA-API-OTHER-NOT-FOUND"})


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "policy",
        help="what GpuNodePolicies would change, and how far the nodes are",
        description="GpuNodePolicies say how the GPUs of some nodes are shared, cut, held back and published.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="diff|status|from-mig-parted")
    diff = verbs.add_parser(
        "diff",
        help="what would change on which nodes, were these files applied",
        description="Say what would change, when, and which claims it would wait for. Changes nothing.",
        epilog="Exit code 0: nothing would change; 1: something would; 2: it could not be said.",
    )
    diff.add_argument("files", nargs="*", metavar="FILE", help="GpuNodePolicies; - is standard input")
    diff.add_argument(
        "--delete", metavar="NAME", action="append", default=[], help="were this policy deleted"
    )
    status = verbs.add_parser(
        "status", help="how far the nodes are",
        epilog="Exit code 0: everything is as the policies say; 1: something waits or is refused; 2: it could not be read.",
    )  # fmt: skip
    for each in (diff, status):
        each.add_argument("-o", "--output", choices=("table", "json"), default="table")
        each.add_argument("--driver-name", default="gpu.nvidia.com", help="whose GPUs")
        add_cluster_arguments(each)
    parted = verbs.add_parser(
        "from-mig-parted",
        help="turn a configuration of NVIDIA's mig-parted (MIG manager) into GpuNodePolicies",
    )
    parted.add_argument("file", metavar="FILE", help="its config.yaml; - is standard input")
    parted.add_argument("name", nargs="?", default="", metavar="CONFIG", help="only this of its mig-configs")


def run(args: argparse.Namespace) -> int:
    """Read, compare, print."""
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    from dra.cli.main import print_error

    try:
        if args.verb == "from-mig-parted":
            return _from_mig_parted(args)
        with cluster_client(args, "policy") as client:
            return _diff(client, args) if args.verb == "diff" else _status(client, args)
    except KubeError as error:
        print_error(error)
    except ExceptionGroup as all_wrong:
        wrong, others = all_wrong.split(ConfigError)
        if wrong is None or others is not None:
            raise
        for each in wrong.exceptions:
            assert isinstance(each, ConfigError)
            print_error(each)
    return EXIT_TROUBLE


def _diff(client: KubeClient, args: argparse.Namespace) -> int:
    from dra.api.policy import read_policy
    from dra.diagnose.policy import diff_policies, fleet_gpus, with_files
    from dra.kube.resources import GPU_NODE_POLICIES, NODES, RESOURCE_CLAIMS, RESOURCE_SLICES

    if not args.files and not args.delete:
        raise ConfigError(
            "DRA-FLAG-FILES", "there is nothing to compare", remedy="Give a file, or --delete NAME."
        )
    written = _policies_in(args.files)
    current = _list(client, GPU_NODE_POLICIES)
    after = with_files(current, written, args.delete)
    before = [read_policy(body) for body in current]
    gpus = fleet_gpus(_list(client, RESOURCE_SLICES), _list(client, RESOURCE_CLAIMS), driver=args.driver_name)
    labels = {
        str(node["metadata"]["name"]): node["metadata"].get("labels") or {} for node in _list(client, NODES)
    }
    found = diff_policies(before, after, labels=labels, gpus=gpus)
    if args.output == "json":
        json.dump(dataclasses.asdict(found), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        _print_diff(found)
    return EXIT_DIFFERENT if found.changes else 0


def _print_diff(found: PolicyDiff) -> None:
    if not found.changes:
        print("nothing would change")
    rows = [
        (each.node, each.device, each.block, each.before, each.after, _when(each.when, each.waits_for))
        for each in found.changes
    ]
    _table(("NODE", "GPU", "WHAT", "FROM", "TO", "WHEN"), rows)
    for each in found.changes:
        if each.doubt:
            print(f"{each.node} may refuse it: {each.doubt}")
    for conflict in found.conflicts:
        print(f"conflict: {conflict}")
    for held in found.held:
        print(held)


def _when(when: str, claims: tuple[str, ...]) -> str:
    return f"{when}, after {', '.join(claims)}" if claims else when


def _status(client: KubeClient, args: argparse.Namespace) -> int:
    from dra.diagnose.policy import fleet_status
    from dra.kube.resources import GPU_NODE_POLICIES, GPU_NODES, RESOURCE_SLICES

    with_slices = {
        str(each["spec"]["nodeName"])
        for each in _list(client, RESOURCE_SLICES)
        if each["spec"].get("driver") == args.driver_name and each["spec"].get("nodeName")
    }
    found = fleet_status(
        _list(client, GPU_NODE_POLICIES), _list(client, GPU_NODES), nodes_with_slices=with_slices
    )
    if args.output == "json":
        json.dump(found.as_json(), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        _print_status(found)
    return 0 if found.settled else EXIT_DIFFERENT


def _print_status(found: FleetStatus) -> None:
    if not found.policies:
        print("there are no GpuNodePolicies")
        return
    _table(
        ("POLICY", "WEIGHT", "NODES", "APPLIED", "WAITING", "REFUSED"),
        [
            (
                row.name,
                str(row.weight),
                str(row.matching),
                str(row.applied),
                str(row.waiting),
                str(row.refused),
            )
            for row in found.policies
        ],
    )
    for row in found.policies:
        if row.problem:
            print(row.problem)
    if found.gpus:
        print()
        _table(
            ("NODE", "GPU", "STATE", "MESSAGE"),
            [(row.node, row.device, row.state, row.message) for row in found.gpus],
        )
    if found.silent:
        print(f"no word of policies from: {', '.join(found.silent)}")


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if not rows:
        return
    for line in aligned((heads, *rows)):
        print(line)


def _policies_in(files: list[str]) -> list[dict[str, Any]]:
    from dra.diagnose.validate_source import read_manifests

    manifests, findings, _ = read_manifests(files)
    if findings:
        raise ExceptionGroup(
            "files that cannot be read",
            [ConfigError("DRA-POLICY-FILE", each.told(), remedy="Mend the file.") for each in findings],
        )
    found = [manifest.value for manifest in manifests if manifest.value.get("kind") == "GpuNodePolicy"]
    if files and not found:
        raise ConfigError(
            "DRA-POLICY-FILE", "the files hold no GpuNodePolicy", remedy="Give a file with one."
        )
    return found


def _from_mig_parted(args: argparse.Namespace) -> int:
    import yaml

    from dra.diagnose.mig_parted import mig_parted
    from dra.diagnose.validate_source import read_manifests

    manifests, findings, _ = read_manifests([args.file])
    if findings:
        raise ExceptionGroup(
            "files that cannot be read",
            [ConfigError("DRA-MIG-PARTED", each.told(), remedy="Mend the file.") for each in findings],
        )
    for manifest in manifests:
        for body in mig_parted(manifest.value, args.name):
            print("---")
            print(yaml.safe_dump(body, sort_keys=False), end="")
    return 0


def _list(client: KubeClient, resource: Resource) -> tuple[dict[str, Any], ...]:
    try:
        return client.list(resource).items
    except KubeError as error:
        if resource.group == "gpudra.dev" and error.code in _NOT_THERE:
            # The definition is not installed.
            return ()
        raise
