"""GPUs that can be passed through, published by the real daemon; and that nothing else changes where they may not."""

from __future__ import annotations

import pytest

from dra.api.limits import MAX_COUNTER_SETS
from dra.sim.apiserver.server import SimApiServer
from tests.process.conftest import call
from tests.process.harness import DRIVER, Node, probe, wait_until
from tests.unit.slices.mig_machines import Scheduler

GATE = "--feature-gates=PassthroughSupport=true"


@pytest.fixture
def node():
    made = []

    def make(*, version="1.36", counters=True, profile="h100-nvl-x2"):
        class Gated(Node):
            def api_server(self, version):
                return SimApiServer(version=version, features={"DRAPartitionableDevices": counters}).start()

        made.append(Gated(profile=profile, version=version))
        return made[-1]

    yield make
    for each in made:
        each.close()


def listed(on):
    """Give the devices of a complete pool but for partitions, None while it is not complete."""
    slices = on.slices()
    wanted = {each["spec"]["pool"]["resourceSliceCount"] for each in slices}
    if wanted != {len(slices)}:
        return None
    return {
        device["name"]: device
        for each in slices
        for device in each["spec"].get("devices") or ()
        if "-mig-" not in device["name"]
    }


def wait_listed(on, *names):
    """Wait until exactly these whole GPUs are published, in this order."""
    wait_until(
        lambda: list(listed(on) or ()) == list(names), what=f"{names}, not {on.slices() and listed(on)}"
    )
    return listed(on)


def wait_ready(daemon):
    """Wait until the API has what a daemon that was given a port wants to publish."""
    port = wait_until(lambda: daemon.logged("plugin_started"))[0]["probe_port"]
    wait_until(lambda: "pool" not in probe(port, "readiness")[1], what="the pool is as wanted")


def spec_of(on):
    """Give what is published, without what differs between two pools that are the same."""
    return [{key: value for key, value in each["spec"].items() if key != "pool"} for each in on.slices()]


BOTH = ("gpu-vfio-0", "gpu-0", "gpu-vfio-1", "gpu-1")


def test_without_the_gate_nothing_is_offered_and_with_it_the_rest_stays_as_it_is(node):
    on = node()
    first = on.daemon()
    wait_listed(on, "gpu-0", "gpu-1")
    before = spec_of(on)
    assert first.terminate(within_seconds=45) == 0
    second = on.daemon("--feature-gates=PassthroughSupport=false", "--healthcheck-port=0")
    wait_ready(second)
    assert spec_of(on) == before
    assert second.terminate(within_seconds=45) == 0
    on.daemon(GATE)
    wait_listed(on, *BOTH)
    without = [
        {**spec, "devices": [each for each in spec["devices"] if "vfio" not in each["name"]]}
        if "devices" in spec
        else spec
        for spec in spec_of(on)
    ]
    assert without == before


def test_the_scheduler_gives_a_gpu_out_as_itself_or_passed_through_never_as_both(node):
    on = node()
    on.daemon(GATE)
    wait_listed(on, *BOTH)
    slices = [{**each, "spec": {**each["spec"], "nodeName": "node-1"}} for each in on.slices()]
    assert all(len(each["spec"].get("sharedCounters") or ()) <= MAX_COUNTER_SETS for each in slices)
    scheduler = Scheduler(slices)
    passed, device = scheduler.ask(kind="vfio")
    assert device == "gpu-vfio-0"
    assert scheduler.ask(kind="gpu")[1] == "gpu-1"
    assert scheduler.ask(kind="vfio") is None
    assert scheduler.ask(kind="gpu") is None
    assert scheduler.ask(kind="mig") is None
    scheduler.free(passed)
    assert scheduler.ask(kind="mig")[1].startswith("gpu-0-mig-")
    assert scheduler.ask(kind="vfio") is None


def test_without_counters_a_gpu_in_use_is_not_offered_to_virtual_machines_also_after_a_restart(node):
    """NVIDIA's driver offers both again once it was restarted."""
    on = node(counters=False)
    kubelet = on.kubelet()
    first = on.daemon(GATE)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    wait_listed(on, *BOTH)
    claim = on.claim("c", "gpu-1")
    (prepared,) = call(before.prepare, (claim,))
    assert prepared.error == ""
    wait_listed(on, "gpu-vfio-0", "gpu-0", "gpu-1")
    first.kill()
    second = on.daemon(GATE, "--healthcheck-port=0")
    wait_ready(second)
    assert list(listed(on)) == ["gpu-vfio-0", "gpu-0", "gpu-1"]
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    call(connection.unprepare, (claim,))
    wait_listed(on, *BOTH)


@pytest.mark.parametrize("counters", [True, False])
def test_a_gpu_that_a_claim_has_passed_through_is_offered_as_nothing_else_until_it_is_back(node, counters):
    on = node(counters=counters)
    kubelet = on.kubelet()
    first = on.daemon(GATE, "--inventory-interval", "3600")
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    wait_listed(on, *BOTH)
    claim = on.claim("c", "gpu-vfio-0")
    (prepared,) = call(before.prepare, (claim,))
    assert prepared.error == ""
    assert on.machine.pci.driver_of(0) == "vfio-pci"
    found = wait_listed(on, "gpu-vfio-0", "gpu-vfio-1", "gpu-1")
    assert "taints" not in found["gpu-vfio-0"]
    first.kill()
    second = on.daemon(GATE, "--healthcheck-port=0", "--inventory-interval", "3600")
    wait_ready(second)
    assert list(listed(on)) == ["gpu-vfio-0", "gpu-vfio-1", "gpu-1"]
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    (ended,) = call(connection.unprepare, (claim,))
    assert ended.error == ""
    found = wait_listed(on, *BOTH)
    assert not any("taints" in device for device in found.values())
    for daemon in (first, second):
        assert not daemon.logged("health_condition_set")
        assert not daemon.logged("inventory_problem_found")


def test_a_gpu_that_was_given_away_before_is_offered_as_that_alone_and_is_not_ill(node):
    on = node()
    on.machine.pci.bind(0, "vfio-pci")
    daemon = on.daemon(GATE)
    found = wait_listed(on, "gpu-vfio-0", "gpu-vfio-1", "gpu-1")
    assert found["gpu-vfio-0"]["attributes"]["productName"] == {"string": "GH100 [H100L 94GB]"}
    assert "taints" not in found["gpu-vfio-0"]
    assert not daemon.logged("health_condition_set")


def test_a_gpu_that_somebody_gives_away_and_takes_back_is_followed_and_not_called_lost(node):
    """Long before the next regular look."""
    on = node()
    daemon = on.daemon(GATE, "--inventory-interval", "3600")
    wait_listed(on, *BOTH)
    on.machine.pci.bind(1, "vfio-pci")
    wait_listed(on, "gpu-vfio-0", "gpu-0", "gpu-vfio-1")
    on.machine.pci.bind(1, "nvidia")
    found = wait_listed(on, *BOTH)
    assert not any("taints" in device for device in found.values())
    assert not daemon.logged("health_condition_set")
    assert [entry["driver"] for entry in daemon.logged("gpu_passed_through")] == ["vfio-pci"]


def test_a_node_without_an_iommu_publishes_its_gpus_and_says_why_it_passes_none_through(node):
    on = node()
    on.machine.pci.set_iommu(False)
    daemon = on.daemon(GATE)
    wait_listed(on, "gpu-0", "gpu-1")
    (told,) = daemon.logged("inventory_problem_found")
    assert told["error_code"] == "DRA-VFIO-NO-IOMMU"
    assert daemon.process.poll() is None


def test_sixteen_gpus_have_sixteen_counter_sets_in_valid_slices(node):
    on = node(profile="a2-megagpu-16g")
    on.daemon(GATE)
    wait_until(lambda: len(listed(on) or ()) == 32, what="16 GPUs, each twice")
    sets = [len(each["spec"].get("sharedCounters") or ()) for each in on.slices()]
    assert sum(sets) == 16
    assert max(sets) <= MAX_COUNTER_SETS
