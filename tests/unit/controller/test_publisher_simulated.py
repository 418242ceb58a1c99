"""The publisher against the simulated API server: releases 1.32 to 1.37, their gates and rules, and its faults.

The same behaviour is tested against a real server where one is at hand (tests/contract).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra.controller.dropped import DroppedFields
from dra.controller.publisher import Publisher
from dra.kube.client import KubeClient, connect
from dra.kube.connection import KubeOptions
from dra.kube.resources import NODES, RESOURCE_SLICES
from dra.sim.apiserver.server import SimApiServer
from tests.unit.controller.pools import DRIVER, NODE, Part, Pool, gpu, pool, pools, visible

TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}


def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "the expected state did not come"
        time.sleep(0.005)
    return time.monotonic() - began


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., tuple[SimApiServer, KubeClient, Publisher]]]:
    """Start a server of a release, make the node, and start a publisher of a pool."""
    ending: list[Callable[[], object]] = []

    def start(desired: Pool, *, server: dict | None = None, **options: object):
        running = SimApiServer(**(server or {})).start()
        ending.append(running.stop)
        path = running.write_kubeconfig(tmp_path / "kubeconfig")
        client = connect(KubeOptions(kubeconfig=str(path)))
        client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
        publisher = Publisher(client, NODE, DRIVER, **options)
        publisher.set_desired(desired)
        publisher.start()
        ending.insert(0, publisher.stop)
        return running, client, publisher

    yield start
    for end in ending:
        end()


def slices(client: KubeClient) -> list[dict]:
    return list(client.list(RESOURCE_SLICES).items)


def counted_gpus(taints: list | None = None) -> list[dict]:
    return [
        gpu(
            f"gpu-{n}", taints=taints or [],
            consumesCounters=[{"counterSet": f"c-{n}", "counters": {"memory": {"value": "80Gi"}}}],
        )
        for n in range(2)
    ]  # fmt: skip


COUNTERS = [{"name": f"c-{n}", "counters": {"memory": {"value": "80Gi"}}} for n in range(2)]


@pytest.mark.parametrize(
    ("release", "version"),
    [("1.32", "v1beta1"), ("1.33", "v1beta2"), ("1.34", "v1"), ("1.35", "v1"), ("1.37", "v1")],
)
def test_whole_gpus_are_published_on_every_release_without_a_second_write(stage, release, version) -> None:
    server, client, publisher = stage(pool("gpu-0", "gpu-1"), server={"version": release})
    until(lambda: publisher.ready)
    assert client.served_version(RESOURCE_SLICES) == version
    assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])
    until(lambda: server.requests.count("GET", "resourceslices", watch=True) >= 1)
    time.sleep(0.4)
    assert server.requests.count("POST", "resourceslices") == 1
    assert server.requests.count("PUT", "resourceslices") == 0
    assert publisher.status().dropped.fields == ()


def test_on_a_release_whose_gates_are_off_the_pool_is_shaped_anew_and_the_gates_are_named(stage) -> None:
    told: list[DroppedFields] = []
    holder: list[Publisher] = []

    def without(dropped: DroppedFields) -> None:
        told.append(dropped)
        holder[0].set_desired(pool("gpu-0", "gpu-1"))

    desired = Pool((Part(shared_counters=COUNTERS), Part(counted_gpus([TAINT]))))
    off = {"DRAPartitionableDevices": False, "DRADeviceTaints": False}
    server, client, publisher = stage(
        pool("gpu-9"), server={"version": "1.36", "features": off}, on_dropped=without
    )
    holder.append(publisher)
    publisher.set_desired(desired)
    until(lambda: publisher.ready and told)
    until(lambda: publisher.ready and (visible(slices(client)) or (0, []))[1] == ["gpu-0", "gpu-1"])
    assert told[-1].gates == ("DRADeviceTaints", "DRAPartitionableDevices")
    assert len(slices(client)) == 1
    assert (
        server.requests.count("PUT", "resourceslices") + server.requests.count("POST", "resourceslices") <= 4
    )


def test_a_node_that_is_deleted_takes_its_slices_along_and_gets_new_ones_when_it_is_back(stage) -> None:
    _, client, publisher = stage(pool("gpu-0"))
    until(lambda: publisher.ready)
    client.delete(NODES, NODE)
    until(lambda: not slices(client))
    until(lambda: publisher.status().last_error is not None)
    assert publisher.status().last_error.code == "DRA-NODE-NOT-FOUND"
    uid = client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})["metadata"][
        "uid"
    ]
    until(lambda: publisher.ready)
    assert slices(client)[0]["metadata"]["ownerReferences"][0]["uid"] == uid


def test_a_kubelet_wipe_and_a_compacted_history_at_the_same_time_lose_nothing(stage) -> None:
    server, client, publisher = stage(pools([gpu("gpu-0")], [gpu("gpu-1")]))
    until(lambda: publisher.ready)
    client.delete_collection(RESOURCE_SLICES, field_selector=f"spec.nodeName={NODE}")
    server.expire_watches()
    took = until(lambda: visible(slices(client)) == (1, ["gpu-0", "gpu-1"]))
    assert took < 25


def test_a_watch_that_is_refused_with_410_again_and_again_does_not_become_a_hot_loop(stage) -> None:
    server, client, publisher = stage(pool("gpu-0"))
    until(lambda: publisher.ready)
    server.faults.set("gone", path="resourceslices")
    server.expire_watches()
    before, began = server.requests.count("GET", "resourceslices"), time.monotonic()
    time.sleep(1.5)
    asked = server.requests.count("GET", "resourceslices") - before
    assert asked <= (time.monotonic() - began) + 6
    server.faults.clear()
    client.delete_collection(RESOURCE_SLICES, field_selector=f"spec.nodeName={NODE}")
    until(lambda: slices(client))


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "error", "code": 500, "times": 2},
        {"kind": "error", "code": 429, "retry_after": 1, "times": 1},
        {"kind": "error", "code": 409, "reason": "Conflict", "times": 2},
        {"kind": "close", "times": 1},
        {"kind": "drop", "after_bytes": 40, "times": 3},
        {"kind": "delay", "seconds": 0.3, "times": 2},
    ],
    ids=lambda fault: f"{fault['kind']}{fault.get('code', '')}",
)
def test_writes_that_fail_are_made_in_the_end_and_only_once(stage, fault) -> None:
    server, client, publisher = stage(pool("gpu-0"))
    until(lambda: publisher.ready)
    server.faults.set(**fault, path="/resourceslices", method="PUT")
    publisher.set_desired(pool("gpu-0", "gpu-1"))
    until(lambda: publisher.ready)
    assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])
    assert publisher.status().failures == 0


def test_an_attribute_that_breaks_the_rules_is_left_out_and_told(stage) -> None:
    bad = gpu("gpu-1", attributes={"type": {"string": "gpu"}, "driverVersion": {"version": "580.65.06"}})
    _, client, publisher = stage(pools([gpu("gpu-0"), bad]))
    until(lambda: publisher.ready)
    first, second = slices(client)[0]["spec"]["devices"]
    assert first["name"] == "gpu-0"
    assert second["attributes"] == {"type": {"string": "gpu"}}
    assert [(r.device, r.name) for r in publisher.status().refused] == [("gpu-1", "driverVersion")]


def test_a_server_that_restarts_finds_the_publisher_again(stage) -> None:
    server, client, publisher = stage(pool("gpu-0"))
    until(lambda: publisher.ready)
    server.stop()
    publisher.set_desired(pool("gpu-0", "gpu-1"))
    until(lambda: publisher.status().failures >= 2)
    server.start()
    assert until(lambda: publisher.ready) < 25
    assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])
