"""`dra mig plan`: MIG layouts that hold a wanted mix or the claims of manifests."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from dra.cli.cluster import add_cluster_arguments, read_cluster
from dra.cli.columns import aligned
from dra.cli.common_flags import Subparsers
from dra.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dra.diagnose.mig_plan import GpuState, Plan, Wanted

_MODEL = re.compile(r"([a-z0-9-]+?)(?:x([0-9]{1,3}))?", re.ASCII)
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser("mig", help="MIG layouts: what fits, what is in the way")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    plan: argparse.ArgumentParser = verbs.add_parser(
        "plan",
        help="which layouts hold a mix of partitions",
        description="Say which MIG layouts hold a wanted mix or the claims of manifests, what of the GPUs they strand, and "
        "which partitions would have to move. Looks at this node, a model, a cluster or dumps of one; changes nothing.",
        epilog="Exit code 0: it fits as things are; 1: only if something moves, or not at all; 2: what was written is wrong.",
    )
    plan.add_argument(
        "files", nargs="*", metavar="FILE", help="manifests whose claims and claim templates are wanted"
    )
    plan.add_argument(
        "--want",
        action="append",
        default=[],
        metavar="MIX",
        help="such as 3g.40gb=1,1g.10gb=4; gpu=1 is a whole one",
    )
    plan.add_argument(
        "--gpu", metavar="MODEL[xN]", help="on empty GPUs of a model: a100-40, h100-80, h200, b200 …"
    )
    plan.add_argument(
        "--cluster", action="store_true", help="on the GPUs of the cluster, beside what claims hold there"
    )
    plan.add_argument("--node", default="", help="with --cluster or -f: on this node only")
    plan.add_argument(
        "-f",
        "--filename",
        metavar="DUMP",
        action="append",
        default=[],
        help="as --cluster, from what kubectl get resourceslices,resourceclaims -A -o yaml wrote",
    )
    add_cluster_arguments(plan)
    plan.add_argument(
        "-o",
        "--output",
        choices=("table", "picture", "json"),
        default="table",
        help="default: table and picture",
    )
    plan.add_argument(
        "--colour", action="store_true", help="colour the picture, if the library rich is there"
    )
    from dra.cli.node_view import add_node_arguments

    add_node_arguments(plan)


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    from dra.diagnose.mig_plan import make_plan, parse_mix
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    gpus, classes = _gpus(args)
    if not gpus:
        raise ConfigError(
            "DRA-MIG-NO-GPU",
            "there is no GPU with MIG to plan on",
            remedy="Give --gpu MODEL, --simulate PROFILE, or look where such GPUs are.",
        )
    wanted: list[Wanted] = [parse_mix(text, gpus) for text in args.want]
    if args.files:
        wanted += _claims(args.files, gpus, classes)
    if not wanted:
        raise ConfigError(
            "DRA-MIG-WANT",
            "nothing is wanted",
            remedy="Give --want 3g.40gb=1,1g.10gb=4, or manifests with claims.",
        )
    plan = make_plan(gpus, wanted)
    if args.output == "json":
        from dra.diagnose.mig_plan.render import as_json

        json.dump(as_json(plan, wanted), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        _print(plan, table=args.output == "table", colour=args.colour)
    return 0 if plan.fits and not plan.moves else 1


def _gpus(args: argparse.Namespace) -> tuple[Sequence[GpuState], list[Any]]:
    """Give the GPUs, and the DeviceClasses that are known beside those that come with the driver."""
    from dra.diagnose.mig_plan import gpus_in_cluster, gpus_of_inventory

    if args.cluster or args.filename:
        cluster = read_cluster(args, "mig", args.filename)
        gpus = gpus_in_cluster(
            cluster.all("ResourceSlice"),
            cluster.all("ResourceClaim"),
            driver=args.driver_name,
            node=args.node,
        )
        return gpus, list(cluster.all("DeviceClass"))
    if args.gpu:
        return _of_model(args.gpu), []
    from dra.cli.node_view import node_view
    from dra.host.boot import boot_id
    from dra.inventory.ownership import mark_owned
    from dra.inventory.scan import scan
    from dra.nvml.node import session_of
    from dra.prepare.mig_marks import MarkDirectory

    with node_view(args) as node:
        session = session_of(node.paths, library=node.library)
        try:
            inventory = scan(session, node.paths, profiles=True)
        finally:
            session.close()
        marks = MarkDirectory(node.paths.state_dir(args.driver_name), boot_id=boot_id(node.paths)).read()
    as_if = args.simulate is not None
    return gpus_of_inventory(mark_owned(inventory, marks.owned), node=node.name, as_if_in_mig_mode=as_if), []


def _of_model(text: str) -> list[GpuState]:
    import tempfile
    from pathlib import Path

    from dra.diagnose.mig_plan import gpus_of_inventory
    from dra.diagnose.mig_plan.sources import with_count
    from dra.host.paths import HostPaths
    from dra.inventory.scan import scan
    from dra.nvml.node import session_of
    from dra.sim.node import SimulatedNode
    from dra.sim.profiles import PROFILES

    match = _MODEL.fullmatch(text.lower())
    wanted, count = (match[1], int(match[2] or 1)) if match else (text, 0)
    machines = {
        slot.model.mig_table: name
        for name, profile in reversed(PROFILES.items())
        for slot in profile.gpus
        if slot.model.mig_table
    }
    names = [table for table in machines if table is not None and table.startswith(wanted)] if wanted else []
    if not names or not count:
        raise ConfigError(
            "DRA-MIG-MODEL",
            f"{text!r} is no model with MIG that is known here",
            remedy=f"Known are {', '.join(sorted(name.removesuffix('gb') for name in machines if name))}.",
        )
    with tempfile.TemporaryDirectory(prefix="dra-mig-") as root:
        node = SimulatedNode(machines[min(names)], Path(root), real_nodes=False)
        paths = HostPaths(**node.paths_kwargs())
        session = session_of(paths, library=node.library)
        try:
            inventory = scan(session, paths, profiles=True)
        finally:
            session.close()
    return with_count(gpus_of_inventory(inventory, node="model", as_if_in_mig_mode=True), count)


def _claims(files: Sequence[str], gpus: Sequence[GpuState], classes: list[Any]) -> list[Wanted]:
    from dra.cel import compile_selector
    from dra.diagnose.explain.files import read_files
    from dra.diagnose.mig_plan import wanted_in

    found = read_files(files)
    objects = [
        {"kind": kind, **each}
        for kind in ("ResourceClaimTemplate", "ResourceClaim")
        for each in found.all(kind)
    ]
    compile_: Any = compile_selector
    return wanted_in(objects, gpus, compile_selector=compile_, classes=[*classes, *found.all("DeviceClass")])


def _print(plan: Plan, *, table: bool, colour: bool) -> None:
    from dra.diagnose.mig_plan.render import COLUMNS, picture, rows, summary

    print(summary(plan))
    if table and (body := rows(plan.layouts)):
        print()
        for line in aligned([COLUMNS, *body]):
            print(line)
    if plan.layouts:
        print()
        _draw(picture(plan.layouts), colour=colour)
        print("\n* is new, . is free, x is free and of no use any more")
    if plan.others:
        print("\nOther layouts, each worse or equal:")
        _draw([line for each in plan.others for line in picture([each])[1:]], colour=colour)


def _draw(lines: Sequence[str], *, colour: bool) -> None:
    if colour and (console := _console()) is not None:
        text_of = importlib.import_module("rich.text").Text
        for line in lines:
            text = text_of(line)
            for number, found in enumerate(re.finditer(r"\[[^\]]*\]", line)):
                text.stylize(_COLOURS[number % len(_COLOURS)], *found.span())
            console.print(text, soft_wrap=True)
        return
    for line in lines:
        print(line)


def _console() -> Any:
    """Give what prints in colour where the library is there; it is no dependency of this package."""
    try:
        return importlib.import_module("rich.console").Console(highlight=False)
    except ImportError:
        return None
