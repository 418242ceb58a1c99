"""`dra doctor`: what is broken between the hardware and a container, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dra.cli.cluster import add_cluster_arguments, cluster_client, kubeconfig_of
from dra.cli.common_flags import Subparsers
from dra.cli.node_view import add_node_arguments, node_view
from dra.errors import ConfigError, KubeError

if TYPE_CHECKING:
    from dra.diagnose.doctor.context import NodeContext
    from dra.diagnose.doctor.model import Report
    from dra.diagnose.explain.cluster import Cluster

_KINDS = ("node", "nodes", "claim", "claims", "resourceclaim", "resourceclaims", "cluster")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="which step between the hardware and a container is broken",
        description="Climb the ladder driver, NVML, device nodes, CDI, runtime, kubelet, slices, claims, and stop at the "
        "first broken rung with what to do. Without a subject: this node, or the cluster where this is no node. "
        "Reads only.",
        epilog="Exit code 0: all well; 3: warnings; 10 and more: the broken rung (docs/troubleshooting.md lists them); "
        "1: the doctor could not look; 2: wrong command line.",
    )
    parser.add_argument(
        "subject", nargs="?", default="", metavar="node/NAME|claim/NAME|cluster", help="what to look at"
    )
    parser.add_argument(
        "-n", "--namespace", default="default", help="namespace of the claim (default: default)"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.add_argument("-f", "--filename", metavar="DUMP", action="append", nargs="+", default=[],
                        help="read these dumps of kubectl get -o yaml in place of an API server")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="ask no API server")
    parser.add_argument("--feature-gates", default=os.environ.get("FEATURE_GATES", ""), metavar="GATES",
                        help="those of the node's driver; in its pod they are known [FEATURE_GATES]")  # fmt: skip
    add_cluster_arguments(parser)
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Look, print; the exit code names the broken rung."""
    from dra.diagnose.doctor.model import as_json, as_text
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    kind, name = _subject(args.subject)
    with node_context(args) as ctx:
        here = kind == "" and _is_node(args, ctx)
        if kind == "" and not here:
            kind = "cluster"
        if kind == "":
            kind, name = "node", ctx.node_name
        cluster = _cluster(args, kind, ctx)
        report = _report(args, kind, name, ctx=ctx, cluster=cluster)
    if args.output == "json":
        json.dump(as_json(report), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        print(as_text(report))
    return report.exit_code


def _report(
    args: argparse.Namespace, kind: str, name: str, *, ctx: NodeContext, cluster: Cluster | None
) -> Report:
    from dra.diagnose.doctor.claim import diagnose_claim
    from dra.diagnose.doctor.ladders import diagnose_cluster, diagnose_node, diagnose_node_from_api

    ctx.cluster = cluster
    is_node = _is_node(args, ctx)
    if kind == "claim":
        return diagnose_claim(
            name, args.namespace, cluster=cluster, ctx=ctx if is_node else None, driver=args.driver_name
        )
    if kind == "node" and name == ctx.node_name and is_node:
        return diagnose_node(ctx)
    if cluster is None:
        raise ConfigError(
            "DRA-DOCTOR-OFFLINE",
            f"{'the cluster' if kind == 'cluster' else f'node {name}'} can only be seen through the API server ({ctx.offline})",
            remedy="Give --kubeconfig, or dumps with -f; on a node: dra doctor.",
        )
    return (
        diagnose_cluster(cluster, args.driver_name)
        if kind == "cluster"
        else diagnose_node_from_api(cluster, name, args.driver_name)
    )


def _subject(text: str) -> tuple[str, str]:
    kind, slash, name = text.partition("/")
    if not text:
        return "", ""
    if kind not in _KINDS or (kind != "cluster" and not name) or (kind == "cluster" and slash):
        raise ConfigError(
            "DRA-DOCTOR-SUBJECT", f"{text[:200]!r} is nothing the doctor knows",
            remedy="Write node/NAME, claim/NAME with -n NAMESPACE, cluster, or nothing for this node.",
        )  # fmt: skip
    return (
        "node" if kind.startswith("node") else "claim" if kind.endswith(("claim", "claims")) else "cluster"
    ), name


def _is_node(args: argparse.Namespace, ctx: NodeContext) -> bool:
    """Whether this process sees a node's files: told so, or a kubelet's or an NVIDIA driver's traces are here."""
    if args.simulate or args.host_root or os.environ.get("HOST_ROOT"):
        return True
    paths = ctx.paths
    return paths.kubelet_registry_dir.is_dir() or (paths.proc / "driver/nvidia").is_dir()


@contextlib.contextmanager
def node_context(args: argparse.Namespace) -> Iterator[NodeContext]:
    """Give what a look at the node starts from."""
    from dra.diagnose.doctor.context import NodeContext
    from dra.plugin.settings import offers_passthrough, parse_gates

    passthrough = offers_passthrough(parse_gates(getattr(args, "feature_gates", "")))
    with node_view(args) as view:
        yield NodeContext(
            view.paths, view.name, driver=args.driver_name, library=view.library, passthrough=passthrough
        )


def _cluster(args: argparse.Namespace, kind: str, ctx: NodeContext) -> Cluster | None:
    """Read the API, or dumps; on a node an API server that does not answer is a rung that is not known."""
    files = [name for group in args.filename for name in group]
    if files:
        from dra.diagnose.explain.files import read_files

        return read_files(files)
    in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
    known = kubeconfig_of(args) or args.context or in_pod or (Path.home() / ".kube/config").is_file()
    if args.offline or not known:
        ctx.offline = "--offline" if args.offline else "no kubeconfig, and this is no pod"
        return None
    from dra.diagnose.doctor.live import read_cluster

    try:
        with cluster_client(args, "doctor") as client:
            return read_cluster(client, args.namespace, node_name=ctx.node_name)
    except KubeError as error:
        if kind != "node":
            raise
        ctx.offline = f"{error.code}: {error.message}"
        return None
