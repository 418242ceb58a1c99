"""`dra top`: GPUs and partitions, who holds them, and what they do."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dra.cli.cluster import add_cluster_arguments, read_cluster
from dra.cli.columns import aligned
from dra.cli.common_flags import Subparsers
from dra.cli.doctor import node_context
from dra.cli.node_view import add_node_arguments
from dra.values.words import counted

if TYPE_CHECKING:
    from dra.diagnose.cluster_top import DeviceRow
    from dra.diagnose.doctor.context import NodeContext
    from dra.diagnose.top import Row, Top
    from dra.inventory.model import Inventory
    from dra.prepare.allocations import Allocation

_COLUMNS = (
    "DEVICE",
    "PRODUCT",
    "STATE",
    "LOAD",
    "MEMORY",
    "POWER",
    "TEMP",
    "PROCS",
    "CLAIM",
    "POD",
    "SINCE",
    "NOTE",
)
_GIB = 1 << 30
# Home, and clear to the end of the screen.
_CLEAR = "\x1b[H\x1b[J"
# Two readings of one look: loads cover about a second each.
_ONCE_SECONDS = 2.0


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "top",
        help="GPUs, who holds them, and what they do",
        description="Show this node's GPUs and MIG devices with the claims that hold them and what they do, and what "
        "deserves a look: allocations that do nothing, processes without a claim, fragmented MIG. Reads only.",
        epilog="A load of ? is not known: a MIG device before Hopper, or a GPU that does not answer; such a one is never "
        "called idle. Exit code 0: all devices were read or left asleep; 1: some could not be read, or none of the node.",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--once", action="store_true", help="look once and end (for JSON always)")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default: 2)"
    )
    parser.add_argument(
        "--idle-after", type=float, default=10.0, metavar="MINUTES",
        help="an allocation that does nothing is called idle when it is that old (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true",
        help="the GPUs of all nodes and who holds them, once, from the API server or from dumps; without loads",
    )  # fmt: skip
    parser.add_argument(
        "-f", "--filename", metavar="DUMP", action="append", nargs="+", default=[],
        help="with --all: read these files or folders (- is standard input) in place of a cluster",
    )  # fmt: skip
    add_node_arguments(parser)
    add_cluster_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Look and print until told to stop."""
    from dra.errors import ConfigError
    from dra.telemetry.log import configure

    if args.all:
        configure(level="error", console=True)
        return _all_nodes(args)
    if args.filename:
        raise ConfigError("DRA-CLI-TOP-FILES", "-f has a meaning with --all only", remedy="Add --all.")

    if not 0.1 <= args.interval <= 3600 or not args.idle_after >= 0:
        raise ConfigError(
            "DRA-CLI-RANGE",
            "--interval or --idle-after is out of range",
            remedy="Use 0.1 to 3600 seconds and no negative number of minutes.",
        )
    configure(level="error", console=True)
    with node_context(args) as ctx, _Looker(ctx, idle_after_seconds=args.idle_after * 60) as looker:
        if args.once or args.output == "json":
            looker.look()
            time.sleep(_ONCE_SECONDS)
            top = looker.look()
            if args.output == "json":
                from dra.diagnose.top import as_json

                print(json.dumps(as_json(top), indent=2, ensure_ascii=False))
            else:
                print_table(top)
            return int(not top.complete)
        while True:
            top = looker.look()
            if sys.stdout.isatty():
                print(_CLEAR, end="")
            print_table(top)
            sys.stdout.flush()
            time.sleep(args.interval)


def _all_nodes(args: argparse.Namespace) -> int:
    from dra.diagnose.cluster_top import cluster_rows, rows_json
    from dra.diagnose.explain.cluster import CLAIM, POD, SLICE

    files = [name for group in args.filename for name in group]
    cluster = read_cluster(args, "top", files)
    rows = cluster_rows(cluster, driver=args.driver_name)
    if args.output == "json":
        print(json.dumps(rows_json(rows, cluster), indent=2, ensure_ascii=False))
    else:
        _print_rows(rows)
        for kind in (SLICE, CLAIM, POD):
            if not cluster.knows(kind):
                print(f"not known: {kind}s {cluster.unread[kind]}")
    return int(not cluster.knows(SLICE) or not cluster.knows(CLAIM))


def _print_rows(rows: Sequence[DeviceRow]) -> None:
    lines = [("NODE", "DEVICE", "PRODUCT", "MEMORY", "STATE", "HELD BY", "TAINTS")]
    for row in rows:
        used = ", ".join(f"{name} {amount}" for name, amount in row.used.items())
        lines.append(
            (
                row.node, row.device, row.product or "-", row.memory or "-", f"{row.state} ({used})" if used else row.state,
                "; ".join(map(str, row.holders)) or "-", ", ".join(row.taints) or "-",
            )
        )  # fmt: skip
    for line in aligned(lines, gap=2):
        print(line)
    free = sum(row.state == "free" and not row.taints for row in rows)
    nodes = len({row.node for row in rows})
    tainted = sum(bool(row.taints) for row in rows)
    print(f"{counted(len(rows), 'device')} on {counted(nodes, 'node')}, {free} free, {tainted} tainted")


class _Looker:
    """Looks at the node again and again through one NVML session."""

    def __init__(self, ctx: NodeContext, *, idle_after_seconds: float) -> None:
        from dra.diagnose.top import Watch
        from dra.host.boot import boot_id
        from dra.inventory.sampling import Sampler
        from dra.inventory.scan import Scanner
        from dra.nvml.node import session_of

        self._ctx = ctx
        self._idle_after_seconds = idle_after_seconds
        self._boot_id = boot_id(ctx.paths)
        self._watch = Watch()
        self._session = session_of(ctx.paths, library=ctx.library)
        self._scanner = Scanner(self._session, ctx.paths)
        self._inventory: Inventory | None = None
        self._held: tuple[Allocation, ...] = ()
        self._sampler = Sampler(
            self._session,
            self._scan,
            held=lambda: [each.device for each in self._held],
            min_interval_seconds=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def _scan(self) -> Inventory:
        assert self._inventory is not None
        return self._inventory

    def look(self) -> Top:
        """Give the table of this moment."""
        from dra.diagnose.doctor.published_rungs import records_on_disk
        from dra.diagnose.top import look
        from dra.host.cgroups import command_of, place_of
        from dra.prepare.allocations import allocations

        self._inventory = self._scanner.scan()
        records = [each.record for each in records_on_disk(self._ctx) if each.record is not None]
        self._held = allocations(
            records, self._inventory, boot_id=self._boot_id, prepared_at=self._prepared_at
        )
        paths = self._ctx.paths
        return look(
            self._sampler.sample(),
            self._held,
            self._watch,
            place_of=functools.cache(functools.partial(place_of, paths)),
            command_of=functools.cache(functools.partial(command_of, paths)),
            now=time.time(),
            idle_after_seconds=self._idle_after_seconds,
        )

    def _prepared_at(self, uid: str) -> float | None:
        path: Path = self._ctx.paths.state_dir(self._ctx.driver) / "claims" / f"{uid}.json"
        try:
            return path.stat().st_mtime
        except OSError:
            return None


def print_table(top: Top) -> None:
    """Print for people."""
    held = sum(bool(row.holders) for row in top.rows)
    moment = time.strftime("%H:%M:%S", time.localtime(top.taken))
    print(f"{moment}  driver {top.driver_version or '-'}  {counted(len(top.rows), 'device')}, {held} held")
    lines = [_COLUMNS, *(line for row in top.rows for line in _lines(row))]
    for line in aligned(lines, gap=2):
        print(line)
    for problem in top.problems:
        print(f"problem: {problem}")


def _lines(row: Row) -> list[Sequence[str]]:
    """Give the lines of a device: one for each holder."""
    from dra.diagnose.top import duration

    notes = "; ".join(flag.text for flag in row.flags)
    name = row.profile or row.product.removeprefix("NVIDIA ")
    first = (
        f"  {row.device}" if row.profile else row.device, name, row.state, _percent(row.load),
        _memory(row.memory_used, row.memory_total),
        "-" if row.power_watts is None else f"{row.power_watts:.0f} W",
        "-" if row.temperature is None else f"{row.temperature} C",
        "-" if row.processes is None else str(row.processes),
    )  # fmt: skip
    holders = [
        (
            str(each),
            ", ".join(each.pods) or "-",
            "-" if each.seconds is None else duration(each.seconds),
            each.load,
        )
        for each in row.holders
    ] or [("-", "-", "-", None)]
    lines: list[Sequence[str]] = []
    for index, (claim, pods, since, load) in enumerate(holders):
        own = first if index == 0 else ("", "", "", "", "", "", "", "")
        share = f" ({_percent(load)})" if len(row.holders) > 1 else ""
        lines.append((*own, claim + share, pods, since, notes if index == 0 else ""))
    return lines


def _percent(load: float | None) -> str:
    return "?" if load is None else f"{load:.0%}"


def _memory(used: int | None, total: int | None) -> str:
    if used is None or total is None:
        return "-"
    return f"{used / _GIB:.1f}/{total / _GIB:.0f} GiB"
