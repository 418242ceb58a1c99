"""`dra inventory`: this node's GPUs and partitions."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.cli.columns import aligned
from dra.cli.common_flags import Subparsers
from dra.cli.node_view import simulated_node
from dra.errors import ConfigError
from dra.values import is_dns_subdomain
from dra.values.words import counted

if TYPE_CHECKING:
    from dra.host.paths import HostPaths
    from dra.inventory.model import Inventory
    from dra.inventory.ownership import Owned
    from dra.slices.features import ServerFeatures
    from dra.slices.partitions import MigMode
    from dra.slices.pool import PoolContent

_FORMATS = ("table", "wide", "json", "yaml", "slices", "slice-template")
# Those that show what would be published.
_PUBLISHED = ("slices", "slice-template")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inventory",
        help="this node's GPUs and partitions",
        description="Show the GPUs and MIG partitions of this node, and what is wrong with them.",
        epilog="Exit code 0: all well; 1: something is wrong with some of it; 2: no GPU can be given out.",
    )
    parser.add_argument("-o", "--output", choices=_FORMATS, default="table", help="default: table")
    parser.add_argument(
        "--driver-root",
        "--container-driver-root",
        metavar="DIR",
        help="where the NVIDIA driver is (default: $DRIVER_ROOT_CTR_PATH, /driver-root in the plugin's container, "
        "$NVIDIA_DRIVER_ROOT, /)",
    )
    parser.add_argument(
        "--host-root", metavar="DIR", default="/", help="prefix of /proc and /sys (default: /)"
    )
    parser.add_argument(
        "--simulate",
        "--profile",
        metavar="PROFILE",
        help="show a simulated machine, such as dgx-h100; with --host-root the one that lives there",
    )
    parser.add_argument("--profiles", action="store_true", help="read the MIG profiles of each GPU too")
    parser.add_argument("--node-name", default=os.environ.get("NODE_NAME") or None, help="name for -o slices")
    parser.add_argument("--driver-name", default="gpu.nvidia.com", help="driver for -o slices")
    parser.add_argument(
        "--sharing",
        metavar="KIND",
        default=os.environ.get("SHARING") or os.environ.get("CONSUMABLE_SHARES") or "",
        help="for -o slices: how claims share a GPU, as the plugin's flag [SHARING, CONSUMABLE_SHARES]",
    )
    parser.add_argument(
        "--kubernetes-version", metavar="X.Y", help="shape -o slices for this server (default: the newest)"
    )
    parser.add_argument(
        "--mig-mode",
        choices=("dynamic", "static", "none"),
        default=None,
        help="for -o slices: partitions made on demand, only those that exist, or none (default: as the plugin's: "
        "$MIG_MODE, else dynamic)",
    )

    parser.add_argument(
        "--feature-gates",
        metavar="GATES",
        default=os.environ.get("FEATURE_GATES", ""),
        help="as the plugin's: PassthroughSupport=true shows what can be passed through to virtual machines "
        "[FEATURE_GATES]",
    )


def run(args: argparse.Namespace) -> int:
    """Look once and print."""
    from dra.api.gpu_settings import NO_SETTINGS, parse_sharing
    from dra.diagnose.inventory import as_json, verdict
    from dra.inventory.ownership import mark_owned
    from dra.inventory.scan import scan
    from dra.slices.pool import build_pool
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    features = _features(args.kubernetes_version)
    mig_mode = _mig_mode(args)
    _check_names(args)
    settings = parse_sharing(args.sharing)
    with _node(args) as (paths, library, default_name):
        from dra.nvml.node import session_of

        session = session_of(paths, library=library)
        try:
            # Where partitions are made on demand, the plugin publishes what could be made.
            wanted = args.profiles or (args.output in _PUBLISHED and mig_mode == "dynamic")
            look = _with_passthrough(args, paths, lambda: scan(session, paths, profiles=wanted))
            inventory = mark_owned(look(), _owned(paths, args.driver_name))
        finally:
            session.close()
    pool = build_pool(
        inventory,
        node_name=args.node_name or default_name,
        features=features,
        driver=args.driver_name,
        mig_mode=mig_mode if args.output in _PUBLISHED else "static",
        settings=settings if args.output in _PUBLISHED else NO_SETTINGS,
    )
    if args.output == "slices":
        _print_slices(pool, features.version)
    elif args.output == "slice-template":
        from dra.slices.template import as_template

        _print_slices(as_template(pool, args.node_name or "template"), features.version)
    elif args.output == "json":
        print(json.dumps(as_json(inventory), indent=2, ensure_ascii=False))
    elif args.output == "yaml":
        _print_yaml([as_json(inventory)])
    else:
        _print_table(inventory, wide=args.output == "wide")
    for problem in inventory.problems:
        _print_problem(problem.code, problem.message, problem.remedy)
    for trouble in pool.problems:
        _print_problem(trouble.code, trouble.message, trouble.remedy)
    return verdict(inventory, pool.problems).exit_code


def _with_passthrough(
    args: argparse.Namespace, paths: HostPaths, scan: Callable[[], Inventory]
) -> Callable[[], Inventory]:
    """Give the look at the hardware; with NVIDIA's gate also at what can be passed through."""
    from dra.plugin.settings import offers_passthrough, parse_gates

    if not offers_passthrough(parse_gates(args.feature_gates)):
        return scan
    from dra.host.pci_binding import PciBus
    from dra.inventory.keep import without_passed
    from dra.inventory.passthrough import scan_with_passthrough

    look = scan_with_passthrough(scan, PciBus(paths), paths)
    return lambda: without_passed(look(), in_use=())


def _mig_mode(args: argparse.Namespace) -> MigMode:
    from dra.plugin.settings import MIG_MODES, mig_mode_of

    asked = args.mig_mode or os.environ.get("MIG_MODE", "")
    if asked and asked not in MIG_MODES:
        raise ConfigError(
            "DRA-FLAG-VALUE", f"MIG_MODE cannot be {asked!r}", remedy=f"Use one of {', '.join(MIG_MODES)}."
        )
    return mig_mode_of(asked, {})


def _owned(paths: HostPaths, driver: str) -> Owned:
    """Give the partitions that the driver on this node made for claims, as far as this user may read that."""
    from dra.errors import DraError
    from dra.host.boot import boot_id
    from dra.inventory.ownership import Owned
    from dra.prepare.mig_marks import MarkDirectory

    try:
        return MarkDirectory(paths.state_dir(driver), boot_id=boot_id(paths)).read().owned
    except DraError:
        return Owned()


@contextlib.contextmanager
def _node(args: argparse.Namespace) -> Iterator[tuple[HostPaths, Callable[[], object] | None, str]]:
    """Give (paths, simulated library or None, node name). A simulated tree is gone afterwards."""
    from dra.host.paths import HostPaths

    if args.simulate is None:
        name = socket.gethostname().lower()
        if args.output == "slices" and args.node_name is None:
            _check_node_name(name, "the name of this host")
        plugins = os.environ.get("KUBELET_PLUGINS_DIRECTORY_PATH")
        more: dict[str, Any] = {"kubelet_plugins_dir": Path(plugins)} if plugins else {}
        yield HostPaths(host_root=Path(args.host_root), driver_root=_driver_root(args), **more), None, name
        return
    with contextlib.ExitStack() as made:
        # The node that `dra plugin --simulate` runs on, or one for this look only.
        node = simulated_node(args.simulate, args.host_root.removesuffix("/"), made)
        yield HostPaths(**node.paths_kwargs()), node.library, args.simulate


def _driver_root(args: argparse.Namespace) -> Path:
    """Give the driver root as this process sees it."""
    if args.driver_root:
        return Path(args.driver_root)
    if mounted := os.environ.get("DRIVER_ROOT_CTR_PATH"):
        return Path(mounted)
    if Path("/driver-root").is_dir():
        return Path("/driver-root")
    at_host = os.environ.get("NVIDIA_DRIVER_ROOT") or "/"
    return Path(args.host_root) / at_host.lstrip("/")


def _check_names(args: argparse.Namespace) -> None:
    if args.node_name is not None:
        _check_node_name(args.node_name, "--node-name")
    if not is_dns_subdomain(args.driver_name, limit=63):
        raise ConfigError(
            "DRA-CLI-DRIVER-NAME",
            f"--driver-name {args.driver_name!r} is not the name of a driver",
            remedy="A driver's name is a DNS name in lower case, at most 63 characters, such as gpu.nvidia.com.",
        )


def _check_node_name(name: str, what: str) -> None:
    if not is_dns_subdomain(name):
        raise ConfigError(
            "DRA-CLI-NODE-NAME",
            f"{what} {name[:300]!r} is not the name of a node",
            remedy="Give --node-name as kubectl get nodes shows it: a DNS name in lower case, at most 253 characters.",
        )


def _features(version: str | None) -> ServerFeatures:
    from dra.api.versions import NEWEST_KUBERNETES, OLDEST_KUBERNETES, best_version
    from dra.slices.features import NEWEST, ServerFeatures

    if version is None:
        return NEWEST
    match = re.fullmatch(r"v?(\d{1,9})\.(\d{1,9})(?:[.+-].*)?", version, re.ASCII)
    if match is None:
        raise ConfigError(
            "DRA-CLI-VERSION", f"{version!r} is no Kubernetes version", remedy="Write it as 1.36."
        )
    asked = (int(match[1]), int(match[2]))
    if best_version(asked) is None:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST_KUBERNETES, NEWEST_KUBERNETES))
        raise ConfigError(
            "DRA-CLI-VERSION",
            f"Kubernetes {version} is not supported by this driver",
            remedy=f"Give a version from {oldest} to {newest}.",
        )
    return ServerFeatures.of_version(*asked)


def _print_table(inventory: Inventory, *, wide: bool) -> None:
    from dra.diagnose.inventory import COLUMNS, WIDE_COLUMNS, rows

    cuda = "{}.{}".format(*inventory.cuda_version) if inventory.cuda_version else "-"
    print(f"Driver {inventory.driver_version or '-'}, CUDA {cuda}, {counted(len(inventory.gpus), 'GPU')}")
    body = rows(inventory, wide=wide)
    if body:
        for line in aligned([WIDE_COLUMNS if wide else COLUMNS, *body]):
            print(line)


def _print_slices(pool: PoolContent, kubernetes: tuple[int, int]) -> None:
    from dra.api.versions import VERSIONS, best_version, from_v1
    from dra.controller.shape import PoolIdentity, contents_of, slice_body, slice_name, slice_spec

    identity = PoolIdentity(pool.driver, pool.node_name, pool.pool_name)
    contents = contents_of(pool)
    version = best_version(kubernetes) or VERSIONS[0]

    def manifest(index: int, content: dict[str, Any]) -> dict[str, Any]:
        spec = slice_spec(identity, content, generation=1, count=len(contents))
        return _without_owner(slice_body(identity, slice_name(identity, index), spec))

    _print_yaml(
        from_v1(manifest(index, content), version=version, kind="ResourceSlice")
        for index, content in enumerate(contents)
    )


def _without_owner(manifest: dict[str, Any]) -> dict[str, Any]:
    """Drop the owner: only the API server knows the UID of the Node."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return {**manifest, "metadata": metadata}


def _print_yaml(documents: Iterable[dict[str, Any]]) -> None:
    import yaml

    # A node's slices have ten thousand lines: with libyaml they take a tenth of a second.
    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    yaml.dump_all(list(documents), sys.stdout, dumper, sort_keys=False, allow_unicode=True, width=120)


def _print_problem(code: str, message: str, remedy: str) -> None:
    print(f"problem: {code}: {message}", file=sys.stderr)
    if remedy:
        print(f"  {remedy}", file=sys.stderr)
