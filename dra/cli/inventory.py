"""`dra inventory`: this node's GPUs and partitions."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dra.errors import ConfigError

_FORMATS = ("table", "wide", "json", "yaml", "slices")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
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
    parser.add_argument("--simulate", metavar="PROFILE", help="show a simulated machine, such as dgx-h100")
    parser.add_argument("--profiles", action="store_true", help="read the MIG profiles of each GPU too")
    parser.add_argument("--node-name", default=os.environ.get("NODE_NAME"), help="name for -o slices")
    parser.add_argument("--driver-name", default="gpu.nvidia.com", help="driver for -o slices")
    parser.add_argument(
        "--kubernetes-version", metavar="X.Y", help="shape -o slices for this server (default: the newest)"
    )


def run(args: argparse.Namespace) -> int:
    """Look once and print."""
    from dra.diagnose.inventory import as_json, verdict
    from dra.inventory.scan import scan
    from dra.slices.pool import build_pool
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    features = _features(args.kubernetes_version)
    with _node(args) as (paths, library, default_name):
        from dra.nvml.node import session_of

        session = session_of(paths, library=library)
        try:
            inventory = scan(session, paths, profiles=args.profiles)
        finally:
            session.close()
    pool = build_pool(
        inventory, node_name=args.node_name or default_name, features=features, driver=args.driver_name
    )
    if args.output == "slices":
        _print_slices(pool)
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


@contextlib.contextmanager
def _node(args: argparse.Namespace) -> Iterator[tuple[Any, Callable[[], object] | None, str]]:
    """Give (paths, simulated library or None, node name). A simulated tree is gone afterwards."""
    from dra.host.paths import HostPaths

    if not args.simulate:
        yield (
            HostPaths(host_root=Path(args.host_root), driver_root=_driver_root(args)),
            None,
            socket.gethostname().lower(),
        )
        return
    from dra.sim.node import SimulatedNode

    with tempfile.TemporaryDirectory(prefix="dra-inventory-") as root:
        try:
            node = SimulatedNode(args.simulate, Path(root))
        except KeyError as error:
            from dra.sim.profiles import PROFILES

            raise ConfigError(
                "DRA-CLI-PROFILE",
                f"there is no machine profile {args.simulate!r}",
                remedy=f"Choose one of {', '.join(sorted(PROFILES))}.",
            ) from error
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


def _features(version: str | None) -> Any:
    from dra.slices.features import NEWEST, ServerFeatures

    if version is None:
        return NEWEST
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\..*)?", version)
    if match is None:
        raise ConfigError(
            "DRA-CLI-VERSION", f"{version!r} is no Kubernetes version", remedy="Write it as 1.36."
        )
    return ServerFeatures.of_version(int(match[1]), int(match[2]))


def _print_table(inventory: Any, *, wide: bool) -> None:
    from dra.diagnose.inventory import COLUMNS, WIDE_COLUMNS, rows

    cuda = "{}.{}".format(*inventory.cuda_version) if inventory.cuda_version else "-"
    print(f"Driver {inventory.driver_version or '-'}, CUDA {cuda}, {len(inventory.gpus)} GPUs")
    body = rows(inventory, wide=wide)
    if body:
        _print_columns([WIDE_COLUMNS if wide else COLUMNS, *body])


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_slices(pool: Any) -> None:
    from dra.controller.shape import PoolIdentity, contents_of, slice_body, slice_name, slice_spec

    identity = PoolIdentity(pool.driver, pool.node_name, pool.pool_name)
    contents = contents_of(pool)
    _print_yaml(
        _without_owner(
            slice_body(
                identity,
                slice_name(identity, index),
                slice_spec(identity, content, generation=1, count=len(contents)),
            )
        )
        for index, content in enumerate(contents)
    )


def _without_owner(manifest: dict[str, Any]) -> dict[str, Any]:
    """Drop the owner: only the API server knows the UID of the Node."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return {**manifest, "metadata": metadata}


def _print_yaml(documents: Iterable[Any]) -> None:
    import yaml

    yaml.safe_dump_all(list(documents), sys.stdout, sort_keys=False, allow_unicode=True, width=120)


def _print_problem(code: str, message: str, remedy: str) -> None:
    print(f"problem: {code}: {message}", file=sys.stderr)
    if remedy:
        print(f"  {remedy}", file=sys.stderr)
