"""Prepares of partitions and shares, and the scrape of a node that is in use."""

from __future__ import annotations

import time
import urllib.request

from tests.bench import process
from tests.bench.calls import GPUS, BenchNode, Calls, timed
from tests.bench.figure import Figure, percentile
from tests.process.harness import DRIVER, wait_until


def figures(rounds: int) -> list[Figure]:
    """Measure on a node with partitions on demand, and on one with metrics; some seconds each."""
    return [*_partitions(rounds), *_shares_and_scrapes(rounds), *_held_shares(rounds)]


def _partitions(rounds: int) -> list[Figure]:
    node = BenchNode()
    try:
        daemon = node.daemon("--log-level", "info", "--mig-mode=dynamic")
        connection = node.kubelet().wait_registered(DRIVER, timeout_seconds=60)
        node.wait_settled()
        calls = Calls(node, connection)
        calls.single(5, "gpu-0-mig-1g10gb-19-0")
        made, gone = calls.single(rounds, "gpu-0-mig-1g10gb-19-0")
        for gpu in range(GPUS):
            calls.prepare(calls.claims(f"gpu-{gpu}-mig-1g10gb-19-{start}" for start in range(7)))
        memory = process.memory(daemon.process.pid)["Rss"]
    finally:
        node.close()
    return [
        Figure("prepare, MIG device made on demand, p50", percentile(made, 50), "ms", 60, "-"),
        Figure("unprepare, MIG device destroyed, p50", percentile(gone, 50), "ms", 60, "-"),
        Figure("resident memory with 56 MIG devices prepared", memory, "MiB", 85, "-"),
    ]


def _shares_and_scrapes(rounds: int) -> list[Figure]:
    node = BenchNode()
    try:
        daemon = node.daemon("--log-level", "info", "--http-endpoint=127.0.0.1:0", "--metrics-interval=0")
        connection = node.kubelet().wait_registered(DRIVER, timeout_seconds=60)
        node.wait_settled()
        calls = Calls(node, connection)
        first = calls.claims(["gpu-0"], shared=True)
        calls.prepare(first)  # the others share the GPU with it
        calls.single(5, shared=True)
        shared, ended = calls.single(rounds, shared=True)
        calls.unprepare(first)
        calls.prepare(calls.claims(f"gpu-{index}" for index in range(GPUS)))
        (bound,) = wait_until(lambda: daemon.logged("http_endpoint_bound"))
        url = f"http://127.0.0.1:{bound['port']}/metrics"

        def scrape() -> bytes:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bytes(answer.read())

        for _ in range(3):
            scrape()
        scrapes, size = [], 0
        for _ in range(max(10, rounds // 5)):
            taken, page = timed(scrape)
            scrapes.append(taken)
            size = len(page)
            time.sleep(0.2)  # performance samples lie at least 0.12 s apart; a scraper comes less often
    finally:
        node.close()
    return [
        Figure("prepare, a share of a GPU that others use, p50", percentile(shared, 50), "ms", 5, "-"),
        Figure("unprepare, a share of a GPU that others use, p50", percentile(ended, 50), "ms", 5, "-"),
        Figure("scrape, 8 GPUs and 8 claims, p50", percentile(scrapes, 50), "ms", 100, "-"),
        Figure("page of that scrape", size / 1024, "KiB", 256, "-"),
    ]


def _held_shares(rounds: int) -> list[Figure]:
    """Measure shares that the card's MPS daemon holds; it runs already, so that its start does not count."""
    node = BenchNode()
    try:
        node.keeper()
        node.daemon("--log-level", "info", "--sharing=100/cooperative")
        connection = node.kubelet().wait_registered(DRIVER, timeout_seconds=60)
        node.wait_settled()
        calls = Calls(node, connection)
        calls.prepare(calls.claims(["gpu-0"], shared=True, consumed={"shares": "1"}))
        calls.single(5, shared=True, consumed={"shares": "1"})
        made, gone = calls.single(rounds, shared=True, consumed={"shares": "1"})
    finally:
        node.close()
    return [
        Figure("prepare, a share held by the card's MPS daemon, p50", percentile(made, 50), "ms", 8, "-"),
        Figure("unprepare, a share held by the card's MPS daemon, p50", percentile(gone, 50), "ms", 5, "-"),
    ]
