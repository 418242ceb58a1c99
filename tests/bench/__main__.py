"""`python -m tests.bench [--json] [--rounds N]`: the driver's real process over real sockets, simulated GPUs and API.

The budgets are for 2 cores and a local disk; figures of NVIDIA's driver are those of the same machine kind with the
same claims (its default client limit, and without it). The kubelet and the clock run in this process, the driver and
the API server each in its own. On a machine with other work the CPU times tell more than the clock does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench import decisions, explain
from tests.bench.apiserver import ApiServerProcess
from tests.bench.figure import Figure
from tests.process.harness import DRIVER, DaemonProcess, Node

GPUS = 8
MIB = 1 << 20


class BenchNode(Node):
    """A node whose API server has a process of its own."""

    def api_server(self, version: str) -> ApiServerProcess:
        """Start the API server."""
        return ApiServerProcess(version=version, folder=self.root)


def main() -> int:
    """Measure, print, and give 0 whatever came out."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=200, help="single prepares (default 200)")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="how long to watch an idle daemon")
    args = parser.parse_args()
    figures = measure(args.rounds, args.idle_seconds) + decisions.figures() + explain.figures()
    if args.json:
        json.dump([{**asdict(item), "met": item.met} for item in figures], sys.stdout, indent=1)
        print()
    else:
        print_table(figures)
    return 0


def measure(rounds: int, idle_seconds: float) -> list[Figure]:
    """Run everything on one node after the other; about a minute."""
    starts = [_start_to_slice() for _ in range(5)]
    node = BenchNode()
    try:
        daemon = node.daemon("--log-level", "info")
        kubelet = node.kubelet()
        connection = kubelet.wait_registered(DRIVER)
        node.wait_published()
        calls = Calls(node, connection)
        calls.single(20)  # the first calls load code and look for the driver's files
        before = _cpu_seconds(daemon.process.pid)
        one, gone = calls.single(rounds)
        work = (_cpu_seconds(daemon.process.pid) - before) * 1000 / rounds
        memory = _memory(daemon)
        batch = calls.batch(25)
        side = calls.concurrent(25)
        time.sleep(2)
        cpu = _idle_cpu(daemon, idle_seconds)
    finally:
        node.close()
    return [
        Figure("prepare, one GPU, p50", percentile(one, 50), "ms", 5, "197 (8-10 without its client limit)"),
        Figure("prepare, one GPU, p99", percentile(one, 99), "ms", 15, "207"),
        Figure("prepare, 8 claims in a call, p50", percentile(batch, 50), "ms", 30, "1730 (140)"),
        Figure("prepare, 8 concurrent, p50", percentile(side, 50), "ms", 30, "760-890"),
        Figure("prepare, 8 concurrent, p99", percentile(side, 99), "ms", 120, "-"),
        Figure("unprepare, p50", percentile(gone, 50), "ms", 2, "2.0-2.4"),
        Figure("unprepare, p99", percentile(gone, 99), "ms", 6, "6-20"),
        Figure("CPU of a prepare and its unprepare", work, "ms", 5, "-"),
        Figure("start of process to slice in the API, median", _median(starts, 0), "s", 0.7, "1.06-1.17"),
        Figure("CPU until then, median", _median(starts, 1), "s", 0.7, "-"),
        Figure("resident memory after 100 claims", memory["Rss"], "MiB", 75, "57-77"),
        Figure("anonymous memory after 100 claims", memory["Anonymous"], "MiB", 48, "13-19"),
        Figure("CPU while idle", cpu, "% of a core", 0.5, "-"),
    ]


class Calls:
    """Prepares and unprepares claims as the kubelet does, and says how long each call took, in ms."""

    def __init__(self, node: Node, connection: Any) -> None:
        self._node, self._connection, self._made = node, connection, 0

    def _claims(self, count: int) -> list[dict[str, Any]]:
        self._made += 1
        return [self._node.claim(f"c{self._made}-{index}", f"gpu-{index}") for index in range(count)]

    def _remove(self, claims: Iterable[dict[str, Any]]) -> None:
        for claim in claims:
            path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim['metadata']['name']}"
            self._node.api.request("DELETE", path)

    def _prepare(self, claims: list[dict[str, Any]]) -> float:
        refs = [ref_of(claim) for claim in claims]
        taken, answer = timed(lambda: self._connection.prepare(refs))
        failed = {uid: entry.error for uid, entry in answer.claims.items() if entry.error}
        if failed or len(answer.claims) != len(refs):
            raise RuntimeError(f"prepare failed: {failed}")
        return taken

    def _unprepare(self, claims: list[dict[str, Any]]) -> float:
        taken, answer = timed(lambda: self._connection.unprepare([ref_of(claim) for claim in claims]))
        if any(entry.error for entry in answer.claims.values()):
            raise RuntimeError(f"unprepare failed: {answer}")
        return taken

    def single(self, rounds: int) -> tuple[list[float], list[float]]:
        """One claim after the other."""
        prepared, unprepared = [], []
        for _ in range(rounds):
            claims = self._claims(1)
            prepared.append(self._prepare(claims))
            unprepared.append(self._unprepare(claims))
            self._remove(claims)
        return prepared, unprepared

    def batch(self, rounds: int) -> list[float]:
        """Eight claims in one call."""
        taken = []
        for _ in range(rounds):
            claims = self._claims(GPUS)
            taken.append(self._prepare(claims))
            self._unprepare(claims)
            self._remove(claims)
        return taken

    def concurrent(self, rounds: int) -> list[float]:
        """Eight calls at once; each call's own time."""
        taken: list[float] = []
        with ThreadPoolExecutor(GPUS) as pool:
            for _ in range(rounds):
                claims = self._claims(GPUS)
                taken += pool.map(lambda claim: self._prepare([claim]), claims)
                list(pool.map(lambda claim: self._unprepare([claim]), claims))
                self._remove(claims)
        return taken


def ref_of(claim: dict[str, Any]) -> Any:
    """Give what the kubelet sends for a claim."""
    from dra.api.claim import ClaimRef

    metadata = claim["metadata"]
    return ClaimRef(metadata["namespace"], metadata["name"], metadata["uid"])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Give the milliseconds a call took, and its answer."""
    start = time.perf_counter()
    answer = call()
    return (time.perf_counter() - start) * 1000, answer


def percentile(values: list[float], percent: float) -> float:
    """Give a percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent) // 100) - 1))]


def _start_to_slice() -> tuple[float, float]:
    """Give the seconds from the start of the process to its slice, and the CPU it used until then."""
    node = BenchNode()
    try:
        node.kubelet()
        start = time.perf_counter()
        daemon = node.daemon("--log-level", "info")
        while not node.slices():
            if time.perf_counter() - start > 20:
                raise RuntimeError("no slice within 20 s")
            time.sleep(0.01)
        return time.perf_counter() - start, _cpu_seconds(daemon.process.pid)
    finally:
        node.close()


def _median(pairs: list[tuple[float, float]], index: int) -> float:
    return statistics.median(pair[index] for pair in pairs)


def _memory(daemon: DaemonProcess) -> dict[str, float]:
    lines = Path(f"/proc/{daemon.process.pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {
        name: float(value.split()[0]) * 1024 / MIB
        for name, _, value in (line.partition(":") for line in lines)
    }
    return {name: fields[name] for name in ("Rss", "Anonymous")}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _idle_cpu(daemon: DaemonProcess, seconds: float) -> float:
    before = _cpu_seconds(daemon.process.pid)
    time.sleep(seconds)
    return (_cpu_seconds(daemon.process.pid) - before) / seconds * 100


def print_table(figures: list[Figure]) -> None:
    """Print for people."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    print(f"{'what':<46} {'ours':>9} {'budget':>9}  {'unit':<12} {'':<5} NVIDIA's driver")
    for item in figures:
        verdict = "ok" if item.met else "OVER"
        print(
            f"{item.what:<46} {item.value:>9.2f} {item.budget:>9g}  {item.unit:<12} {verdict:<5} {item.nvidia}"
        )
    if load > cores:
        print(
            f"The machine has other work (load {load:.1f} on {cores} cores): times are longer than they would be."
        )


if __name__ == "__main__":
    sys.exit(main())
