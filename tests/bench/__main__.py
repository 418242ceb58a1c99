"""`python -m tests.bench`: the driver's real process over real sockets, simulated GPUs and API server.

Each part is measured several times; the table shows the median and the range. The budgets are for 2 cores and a local
disk; figures of NVIDIA's driver are those of the same machine kind with the same claims (its default client limit, and
without it). The kubelet and the clock run in this process, the driver and the API server each in its own; the CDI
directory is on a tmpfs, as on every node, the rest on the disk of /tmp. On a machine with other work the CPU times tell
more than the clock does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from dra.telemetry.log import configure
from tests.bench import claims, decisions, explain, process, publish
from tests.bench.calls import BenchNode, Calls
from tests.bench.figure import Figure, Summary, percentile, summarise
from tests.process.harness import DRIVER, wait_until

PARTS = ("calls", "start", "imports", "claims", "publish", "fleet", "decisions", "explain")


def main() -> int:
    """Measure, print, and give 0 whatever came out."""
    configure(level="warning", console=True)
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--runs", type=int, default=3, help="how often each part is measured (default 3)")
    parser.add_argument("--rounds", type=int, default=200, help="single prepares of a run (default 200)")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="how long to watch an idle daemon")
    parser.add_argument("--nodes", type=int, default=5000, help="nodes of the fleet (default 5000)")
    parser.add_argument(
        "--cycles", type=int, default=0, help="cycles of the memory test (10000 takes minutes)"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="measure these parts only")
    args = parser.parse_args()
    process.compile_modules()
    details: dict[str, Any] = {}
    figures = summarise(_measure(args, details))
    if args.json:
        listed = [{**asdict(item), "met": item.met} for item in figures]
        json.dump({"figures": listed, "details": details, "load": os.getloadavg()[0]}, sys.stdout, indent=1)
        print()
    else:
        print_table(figures)
        print_details(details)
    return 0


def _measure(args: argparse.Namespace, details: dict[str, Any]) -> Iterator[Figure]:
    parts: dict[str, Callable[[], list[Figure]]] = {
        "calls": lambda: _calls(args, details),
        "start": _start,
        "imports": lambda: _imports(details),
        "claims": lambda: claims.figures(max(10, args.rounds // 4)),
        "publish": publish.figures,
        "decisions": decisions.figures,
        "explain": explain.figures,
    }
    chosen = args.only or PARTS
    for _ in range(args.runs):
        for name, part in parts.items():
            if name in chosen:
                yield from part()
    if "fleet" in chosen and args.nodes:
        yield from publish.fleet(args.nodes)
    if args.cycles:
        yield from _cycles(args.cycles)


def _calls(args: argparse.Namespace, details: dict[str, Any]) -> list[Figure]:
    """Measure one daemon from its start to its rest."""
    node = BenchNode()
    try:
        daemon = node.daemon("--log-level", "info")
        connection = node.kubelet().wait_registered(DRIVER, timeout_seconds=60)
        node.wait_settled()
        pid = daemon.process.pid
        calls = Calls(node, connection)
        calls.single(20)  # the first calls load code and look for the driver's files
        before = process.cpu_seconds(pid)
        one, gone = calls.single(args.rounds)
        work = (process.cpu_seconds(pid) - before) * 1000 / args.rounds
        memory = process.memory(pid)
        details["memory by map, MiB resident, proportional, anonymous"] = process.memory_by_map(pid)
        again = calls.again(50)
        batch, batch_gone = calls.batch(25)
        side, side_gone = calls.concurrent(25)
        time.sleep(12)  # until the threads of the burst are gone
        cpu, woken = process.idle(pid, args.idle_seconds)
    finally:
        node.close()
    return [
        Figure("prepare, one GPU, p50", percentile(one, 50), "ms", 5, "197 (8-10 without its client limit)"),
        Figure("prepare, one GPU, p99", percentile(one, 99), "ms", 15, "207"),
        Figure("prepare, prepared already, p50", percentile(again, 50), "ms", 5, "200 (2.2-2.6)"),
        Figure("prepare, 8 claims in a call, p50", percentile(batch, 50), "ms", 30, "1730 (140)"),
        Figure("prepare, 8 concurrent, p50", percentile(side, 50), "ms", 30, "760-890"),
        Figure("prepare, 8 concurrent, p99", percentile(side, 99), "ms", 120, "-"),
        Figure("unprepare, p50", percentile(gone, 50), "ms", 2, "2.0-2.4"),
        Figure("unprepare, p99", percentile(gone, 99), "ms", 6, "6-20"),
        Figure("unprepare, 8 claims in a call, p50", percentile(batch_gone, 50), "ms", 16, "-"),
        Figure("unprepare, 8 concurrent, p50", percentile(side_gone, 50), "ms", 16, "-"),
        Figure("CPU of a prepare and its unprepare", work, "ms", 5, "8.7-9.3 (6.2-8.3)"),
        Figure("resident memory after 100 claims", memory["Rss"], "MiB", 75, "57-77"),
        Figure("proportional memory after 100 claims", memory["Pss"], "MiB", 75, "-"),
        Figure("anonymous memory after 100 claims", memory["Anonymous"], "MiB", 48, "13-19"),
        Figure("CPU while idle", cpu, "% of a core", 0.5, "-"),
        # gRPC's servers look for signals every 200 ms, its timers and threads have periods of their own: some 30 of them.
        Figure("wake-ups while idle", woken, "a second", 50, "-"),
    ]


def _start() -> list[Figure]:
    """Measure from the start of the process to registration, and to its slice in the API."""
    node = BenchNode()
    try:
        kubelet = node.kubelet()
        start = time.perf_counter()
        daemon = node.daemon("--log-level", "info")
        registered = 0.0
        while not node.slices():
            if time.perf_counter() - start > 30:
                raise RuntimeError("no slice within 30 s")
            if not registered and kubelet.registry.connections(DRIVER):
                registered = time.perf_counter() - start
            time.sleep(0.005)
        published = time.perf_counter() - start
        cpu = process.cpu_seconds(daemon.process.pid)
        if not registered:
            kubelet.wait_registered(DRIVER, timeout_seconds=60)
            registered = time.perf_counter() - start
    finally:
        node.close()
    return [
        Figure("start of process to registered", registered, "s", 0.7, "0.06-0.11 (until it answers)"),
        Figure("start of process to slice in the API", published, "s", 0.7, "1.06-1.17"),
        Figure("CPU until then", cpu, "s", 0.7, "-"),
    ]


def _imports(details: dict[str, Any]) -> list[Figure]:
    modules = process.import_seconds("dra.plugin.daemon")
    for title, parts in (("package", process.by_package(modules)), ("module", modules)):
        details[f"imports of the daemon, ms by {title}"] = {
            name: round(part * 1000, 1) for name, part in parts.items() if part >= 0.001
        }
    return [Figure("imports of the daemon", sum(modules.values()), "s", 0.5, "-")]


def _cycles(cycles: int) -> list[Figure]:
    """Measure the memory after so many prepares and unprepares beside that after 100."""
    node = BenchNode()
    try:
        daemon = node.daemon("--log-level", "info")
        connection = node.kubelet().wait_registered(DRIVER, timeout_seconds=60)
        node.wait_settled()
        calls = Calls(node, connection)
        calls.single(100)
        first = process.memory(daemon.process.pid)["Rss"]
        descriptors = wait_until(lambda: len(os.listdir(f"/proc/{daemon.process.pid}/fd")))
        early, _ = calls.single(min(1000, cycles))
        late: list[float] = []
        for _ in range(0, cycles, 1000):
            late, _ = calls.single(1000)
        last = process.memory(daemon.process.pid)["Rss"]
        more = len(os.listdir(f"/proc/{daemon.process.pid}/fd")) - descriptors
    finally:
        node.close()
    return [
        Figure(f"resident memory after {cycles:,} cycles, above that after 100", (last / first - 1) * 100, "%", 3, "-"),
        Figure(f"descriptors after {cycles:,} cycles, above those after 100", more, "", 3, "-"),
        Figure(
            "p99 of the last 1,000 prepares beside the first 1,000",
            percentile(late, 99) / percentile(early, 99), "times", 1.2, "-",
        ),
    ]  # fmt: skip


def print_table(figures: list[Summary]) -> None:
    """Print for people."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"{'what':<62} {'ours':>9} {'range':>19} {'budget':>8}  {'unit':<12} {'':<5} NVIDIA's driver")
    for item in figures:
        verdict = "ok" if item.met else "OVER"
        spread = f"{item.low:.2f}-{item.high:.2f}" if item.runs > 1 else "-"
        print(
            f"{item.what:<62} {item.value:>9.2f} {spread:>19} {item.budget:>8g}  {item.unit:<12} {verdict:<5} {item.nvidia}"
        )
    if load > cores:
        print(
            f"The machine has other work (load {load:.1f} on {cores} cores): times are longer than they would be."
        )


def print_details(details: dict[str, Any]) -> None:
    """Print what stands behind some figures, the largest parts first."""
    for title, parts in details.items():
        print(f"\n{title}")
        for name, value in list(parts.items())[:15]:
            text = " ".join(f"{part:>8.1f}" for part in (value if isinstance(value, tuple) else (value,)))
            print(f"  {name:<44} {text}")


if __name__ == "__main__":
    sys.exit(main())
