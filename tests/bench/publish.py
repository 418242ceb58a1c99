"""Publishing: a node with 16 GPUs and every MIG placement, one taint of it, and a whole fleet at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dra.controller.publisher import Publisher
from dra.controller.reconcile import PoolReconciler
from dra.controller.shape import PoolIdentity, contents_of
from dra.health.feed import HealthFeed
from dra.host.paths import HostPaths
from dra.inventory.diff import diff
from dra.inventory.model import Inventory
from dra.inventory.scan import scan
from dra.kube.client import KubeClient
from dra.kube.clock import SystemClock
from dra.kube.connection import Connection, KubeOptions
from dra.nvml.node import session_of
from dra.plugin.pool_source import PoolSource
from dra.slices.features import NEWEST
from dra.slices.pool import build_pool
from dra.slices.taints import Taint
from tests.bench.calls import BenchNode
from tests.bench.figure import Figure
from tests.process.harness import DRIVER, NODE, wait_until

SIXTEEN = "a2-megagpu-16g"
THREADS = 16


def figures() -> list[Figure]:
    """Measure one node."""
    node = BenchNode(profile=SIXTEEN)
    try:
        for slot in node.machine.profile.gpus:  # Ampere: nobody switches it on while the node runs
            node.machine.control.set_mig_mode(slot.minor, enabled=True)
        return _one_node(node)
    finally:
        node.close()


def _one_node(node: BenchNode) -> list[Figure]:
    inventory = _inventory(node)
    client = _client(node)
    pool = PoolSource(DRIVER, NODE, feed=HealthFeed(), mig_mode="dynamic")
    publisher = Publisher(client, NODE, DRIVER, on_server_version=pool.server_is)
    pool.publish_to(publisher.set_desired)
    began = time.perf_counter()
    pool.inventory_changed(inventory, diff(Inventory(), inventory))
    built = time.perf_counter() - began
    publisher.start()
    try:
        wait_until(lambda: publisher.ready, what="published")
        published = time.perf_counter() - began
        devices = publisher.status().devices
        taints = [_taint(pool, publisher, number) for number in range(5)]
    finally:
        publisher.stop()
        client.close()
    return [
        Figure(f"pool of 16 GPUs with all {devices} devices: made", built * 1000, "ms", 250, "-"),
        Figure("pool of 16 GPUs with all MIG placements: in the API", published, "s", 2, "-"),
        Figure("one taint of that pool: in the API, median", sorted(taints)[2], "ms", 500, "-"),
    ]


def _taint(pool: PoolSource, publisher: Publisher, number: int) -> float:
    time.sleep(1.0)  # two changes in a row would be published together
    before = publisher.status().writes
    began = time.perf_counter()
    taint = Taint("gpu.nvidia.com/xid", "NoSchedule", str(number))
    pool.set_taints("bench", {"gpu-3": (taint,)})
    wait_until(lambda: publisher.ready and publisher.status().writes > before, what="taint published")
    return (time.perf_counter() - began) * 1000


def fleet(nodes: int) -> list[Figure]:
    """Measure how long so many nodes take that publish at once, each for the first time; Nodes are made before."""
    node = BenchNode()
    try:
        inventory = _inventory(node)
        names = [f"fleet-{number:05}" for number in range(nodes)]
        for name in names:
            node.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        clients = [_client(node) for _ in range(THREADS)]
        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            parts = [names[index::THREADS] for index in range(THREADS)]
            written = list(
                pool.map(lambda part: _publish_all(*part), zip(clients, parts, [inventory] * THREADS))
            )
        seconds = time.perf_counter() - began
        for client in clients:
            client.close()
    finally:
        node.close()
    if sum(written) != nodes:
        raise RuntimeError(f"{sum(written)} of {nodes} slices were written")
    return [
        Figure(f"{nodes:,} nodes publish at once: all in the API", seconds, "s", nodes / 100, "-"),
        Figure(f"{nodes:,} nodes publish at once: each node's share", seconds / nodes * 1000, "ms", 10, "-"),
    ]


def _publish_all(client: KubeClient, names: list[str], inventory: Inventory) -> int:
    clock, written = SystemClock(), 0
    for name in names:
        identity = PoolIdentity(DRIVER, name, name)
        pool = build_pool(inventory, node_name=name, driver=DRIVER, features=NEWEST)
        reconciler = PoolReconciler(client, identity, clock=clock, on_write=lambda _name, _mark: None)
        written += reconciler.run(contents_of(pool)).writes
    return written


def _inventory(node: BenchNode) -> Inventory:
    paths = HostPaths(**node.machine.paths_kwargs())
    session = session_of(paths, library=node.machine.library)
    try:
        return scan(session, paths, profiles=True)
    finally:
        session.close()


def _client(node: BenchNode) -> KubeClient:
    options: Any = KubeOptions(kubeconfig=str(node.kubeconfig))
    return KubeClient(Connection(options))
