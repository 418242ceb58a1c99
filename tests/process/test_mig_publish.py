"""The daemon publishes partitions on demand to servers of several kinds, and the scheduler's allocator can use them."""

from __future__ import annotations

import pytest

from dra.cli.main import main
from dra.sim.apiserver.server import SimApiServer
from tests.process.harness import DRIVER, NODE, Node, wait_until
from tests.unit.slices.mig_machines import Scheduler
from tests.yaml_text import read_all


@pytest.fixture
def node():
    made = []

    def make(version, *, counters=True, profile="dgx-h100"):
        class Gated(Node):
            def api_server(self, version):
                return SimApiServer(version=version, features={"DRAPartitionableDevices": counters}).start()

        made.append(Gated(profile=profile, version=version))
        return made[-1]

    yield make
    for each in made:
        each.close()


def published(node, count):
    """Wait until the pool is complete and has so many devices; give its slices."""

    def complete():
        slices = node.slices()
        devices = sum(len(each["spec"].get("devices") or ()) for each in slices)
        wanted = {each["spec"]["pool"]["resourceSliceCount"] for each in slices}
        return slices if devices == count and wanted == {len(slices)} else None

    return wait_until(complete, what=f"{count} devices are published")


def versions(slices):
    """Tell one write of the slices from another."""
    return {each["metadata"]["name"]: each["metadata"]["resourceVersion"] for each in slices}


@pytest.mark.parametrize(
    ("version", "sets", "slices"), [("1.36", [8], 5), ("1.35", [8], 5), ("1.34", [1] * 8, 8)]
)
def test_partitions_are_published_in_the_shape_of_the_server_and_can_be_allocated(
    node, version, sets, slices
):
    on = node(version)
    on.daemon("--mig-mode", "dynamic")
    found = published(on, 8 * 26)
    assert len(found) == slices
    by_slice = [len(each["spec"]["sharedCounters"]) for each in found if each["spec"].get("sharedCounters")]
    assert by_slice == sets
    scheduler = Scheduler([{**each, "spec": {**each["spec"], "nodeName": "node-1"}} for each in found])
    first, device = scheduler.ask(profile="3g.40gb")
    assert device == "gpu-0-mig-3g40gb-9-4"
    assert scheduler.ask(kind="gpu")[1] == "gpu-1"
    scheduler.free(first)
    assert scheduler.ask(kind="gpu")[1] == "gpu-0"


@pytest.mark.parametrize("version", ["1.34", "1.36"])
def test_a_server_without_counters_never_sees_a_partition_beside_its_gpu(node, version):
    on = node(version, counters=False)
    on.daemon("--mig-mode", "dynamic")
    found = published(on, 8)
    assert [each["spec"]["pool"]["generation"] for each in found] == [1]


@pytest.mark.fault("F37")
def test_a_layout_changed_by_hand_makes_that_gpu_static_and_back(node):
    """Long before the next regular look."""
    on = node("1.36")
    on.daemon("--inventory-interval", "3600")
    published(on, 8 * 26)
    on.machine.control.set_mig_layout(0, [("3g.40gb", 4), ("3g.40gb", 0)])
    found = published(on, 7 * 26 + 2)
    listed = [device for each in found for device in each["spec"].get("devices") or ()]
    assert {
        device["name"] for device in listed if "uuid" in device["attributes"] and "-mig-" in device["name"]
    } == {
        "gpu-0-mig-3g40gb-9-0",
        "gpu-0-mig-3g40gb-9-4",
    }
    on.machine.control.set_mig_mode(0, enabled=False)
    assert published(on, 8 * 26)


@pytest.mark.fault("F37")
def test_a_layout_by_hand_is_published_within_seconds_where_partitions_are_not_made_on_demand(node):
    on = node("1.36", profile="dgx-a100")
    for slot in on.machine.profile.gpus:
        on.machine.control.set_mig_mode(slot.minor, enabled=True)
    on.daemon("--mig-mode=static", "--inventory-interval", "3600")
    wait_until(lambda: on.wait_published(), what="the pool is there")
    on.machine.control.set_mig_layout(3, [("1g.5gb", 0), ("3g.20gb", 4)])
    published(on, 2)
    on.machine.control.set_mig_layout(3, [("7g.40gb", 0)])
    published(on, 1)


@pytest.mark.parametrize(
    ("arguments", "count"),
    [((), 8 * 26), (("--mig-mode=static",), 8), (("--feature-gates=DynamicMIG=false",), 8)],
)
def test_partitions_are_offered_by_default_and_not_where_nobody_wants_them(node, arguments, count):
    on = node("1.36")
    on.daemon(*arguments)
    published(on, count)


@pytest.mark.parametrize(("mode_on", "count"), [(False, 8), (True, 8 * 25)])
@pytest.mark.fault("F40")
def test_an_ampere_gpu_is_offered_as_its_mig_mode_says_for_that_is_not_switched_while_the_node_runs(
    node, mode_on, count
):
    on = node("1.36", profile="dgx-a100")
    if mode_on:
        for slot in on.machine.profile.gpus:
            on.machine.control.set_mig_mode(slot.minor, enabled=True)
    on.daemon()
    found = published(on, count)
    kinds = {d["attributes"]["type"]["string"] for each in found for d in each["spec"].get("devices") or ()}
    assert kinds == {"mig" if mode_on else "gpu"}


def test_inventory_shows_what_the_plugin_publishes_also_while_partitions_are_in_use(node, capsys):
    on = node("1.37")
    on.daemon()
    kubelet = on.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    published(on, 8 * 26)
    kubelet.run_pod(on.pod("p", on.claim("c", "gpu-3-mig-1g10gb-19-6")))
    capsys.readouterr()
    words = ["--simulate", "dgx-h100", "--host-root", str(on.root), "--node-name", NODE, "-o", "slices"]
    assert main(["inventory", *words]) == 0
    shown = [manifest["spec"] for manifest in read_all(capsys.readouterr().out)]
    assert shown == [each["spec"] for each in published(on, 8 * 26)]
    # Without the marks the partition would look handmade, and its GPU be listed as it is.
    (on.state_dir / "mig" / "gpu-3-mig-1g10gb-19-6.json").unlink()
    main(["inventory", *words])
    devices = [d for spec in read_all(capsys.readouterr().out) for d in spec["spec"].get("devices", ())]
    assert len(devices) == 7 * 26 + 1


def test_a_partition_made_for_a_pod_and_destroyed_after_it_changes_nothing_that_is_published(node):
    on = node("1.36")
    daemon = on.daemon("--mig-mode", "dynamic", "--inventory-interval", "1")
    kubelet = on.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    before = versions(published(on, 8 * 26))
    gpu = on.machine.profile.gpus[3].uuid
    pod = on.pod("p", on.claim("c", "gpu-3-mig-1g10gb-19-6"))

    def looked(fields):
        return [event for event in daemon.logged("gpu_changed") if set(fields) <= set(event["fields"])]

    kubelet.run_pod(pod)
    assert [(each.profile_id, each.start) for each in on.machine.control.state.gpu(gpu).instances] == [
        (19, 6)
    ]
    wait_until(lambda: looked(["mig_devices"]), what="the partition is seen")
    kubelet.stop_pod(pod)
    wait_until(lambda: not on.machine.control.state.gpu(gpu).mig_current, what="the mode is off again")
    wait_until(lambda: len(looked(["mig_devices"])) > 1, what="its end is seen")
    assert versions(published(on, 8 * 26)) == before
