"""What a node is to the API server, over hours and at each change: thousands of nodes do the same at the same time."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dra.controller.policy_watch import PolicyWatch
from dra.controller.publisher import Publisher
from dra.errors import KubeError
from dra.kube.client import connect
from dra.kube.connection import KubeOptions
from dra.kube.resources import NODES
from dra.sim.apiserver import SimApiServer
from tests.unit.controller.pools import DRIVER, NODE, gpu, pools
from tests.unit.kube.fake_clock import FakeClock

HOUR = 3600.0
TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
# A pool that nobody touches is read again every nine to ten minutes, and every second time its Node.
READS_AN_HOUR = 11
# A cluster without policies is asked for them; with all nodes of a large one that is some twenty requests a second.
ASKS_AN_HOUR = 20


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the expected state did not come"
        time.sleep(0.005)


@pytest.fixture
def server():
    with SimApiServer() as running:
        yield running


@pytest.fixture
def publishing(server, tmp_path: Path):
    """Start a publisher of three slices on a cluster that has another node's too."""
    client = connect(KubeOptions(kubeconfig=str(server.write_kubeconfig(tmp_path / "kubeconfig"))))
    client.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})
    made: list[Publisher] = []

    def start(**options: object) -> Publisher:
        server.requests.clear()
        publisher = Publisher(client, NODE, DRIVER, rng=random.Random(3), **options)
        made.append(publisher)
        publisher.set_desired(wanted())
        publisher.start()
        until(lambda: publisher.ready)
        return publisher

    yield start
    for publisher in made:
        assert publisher.stop(timeout_seconds=30)
    client.close()


def wanted(taints: list | None = None):
    return pools([gpu("gpu-0")], [gpu("gpu-1", taints=taints or [])], [gpu("gpu-2")])


def requests_of(server: SimApiServer) -> Counter[str]:
    return Counter("WATCH" if each.watch else each.method for each in server.requests.all())


def test_a_first_publication_is_one_write_a_slice_and_asks_for_this_node_only(server, publishing):
    publishing()
    asked = server.requests.all()
    until(lambda: server.requests.count("GET", watch=True))
    assert Counter(each.method for each in asked)["POST"] == 3
    assert not {each.method for each in asked} - {"GET", "POST"}
    collections = [each for each in asked if each.method == "GET" and each.path.endswith("/resourceslices")]
    assert 1 <= len(collections) <= 4
    assert all(f"spec.nodeName%3D{NODE}" in each.target for each in collections)
    nodes = [each.path for each in asked if "/nodes" in each.path]
    assert 1 <= len(nodes) <= 2
    assert set(nodes) == {f"/api/v1/nodes/{NODE}"}


def test_a_taint_is_one_write_and_one_list(server, publishing):
    publisher = publishing()
    until(lambda: server.requests.count("GET", watch=True))
    before = publisher.status().writes
    server.requests.clear()
    publisher.set_desired(wanted([TAINT]))
    until(lambda: publisher.ready and publisher.status().writes > before)
    assert publisher.status().writes == before + 1
    asked = requests_of(server)
    assert (asked["PUT"], asked["POST"], asked["DELETE"], asked["PATCH"]) == (1, 0, 0, 0)
    assert asked["GET"] <= 2


def test_hours_of_rest_are_no_write_and_few_reads(server, publishing):
    clock = FakeClock()
    publisher = publishing(clock=clock)
    until(lambda: server.requests.count("GET", watch=True))
    began = clock.now()
    server.requests.clear()
    until(lambda: clock.now() > began + 10 * HOUR)
    # Its own clock ran on while this was read.
    asked, hours = requests_of(server), (clock.now() - began) / HOUR
    assert publisher.ready
    assert set(asked) <= {"GET", "WATCH"}
    assert 4 * hours <= asked["GET"] <= READS_AN_HOUR * hours + 2


class _Hours:
    """A stop that comes after so long, at once."""

    def __init__(self, hours: float) -> None:
        self._left = hours * HOUR

    def is_set(self) -> bool:
        return self._left <= 0

    def wait(self, seconds: float) -> bool:
        self._left -= seconds
        return self.is_set()


class _Without:
    """A server that has no definition of policies."""

    asked = 0

    def list(self, *_args: object, **_options: object) -> None:
        self.asked += 1
        raise KubeError("DRA-API-NOT-FOUND", "there is no such kind", remedy="")


def test_a_cluster_without_policies_is_asked_for_them_ever_less_often():
    client, told = _Without(), []
    watch = PolicyWatch(client, NODE, policies=told.append, node=told.append, rng=random.Random(5))
    watch._stop = _Hours(1 / 30)
    watch._run()
    # Who installs the definition soon after the driver does not wait long.
    assert 3 <= client.asked <= 6
    watch._stop = _Hours(10)
    watch._run()
    assert 10 * 10 <= client.asked <= 10 * ASKS_AN_HOUR
