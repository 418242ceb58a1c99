"""GPUs fall ill and recover: the real daemon, its slices, its stream and its Events."""

from __future__ import annotations

import json
import time

import pytest

from dra.pb.grpc_health_pb2 import HealthCheckResponse
from tests.process.conftest import call
from tests.process.harness import DRIVER, NODE, Node, wait_until
from tests.process.health_node import (
    ECC,
    LOST,
    SOON,
    XID,
    added,
    device_status,
    ill,
    published,
    reasons,
    started,
    streamed,
    taints,
    wait_taints,
    wait_well,
)
from tests.process.invariants import Vitals

LOST_TAINTS = {XID: ("79", "NoSchedule"), LOST: ("", "NoSchedule")}


@pytest.mark.fault("F32", "F35")
def test_xid_79_on_one_gpu_of_eight(node):
    """Tainted, streamed and told; kept over a restart with its time; cleared after the reset; no other GPU touched."""
    daemon, kubelet = started(node)
    control = node.machine.control
    claim = node.claim("c", "gpu-3", pods=("trainer",))
    (entry,) = call(kubelet.connection(DRIVER).prepare, [claim])
    assert entry.devices, entry.error
    generation = node.slices()[0]["spec"]["pool"]["generation"]
    began = time.monotonic()
    control.lose_gpu(3)
    wait_until(lambda: "gpu-3" in taints(node), what="gpu-3 is tainted")
    assert time.monotonic() - began < 20  # 0.6 s on a machine that is not busy; 2 s are promised
    wait_taints(node, {"gpu-3": LOST_TAINTS})
    assert node.slices()[0]["spec"]["pool"]["generation"] == generation
    # The others are given out as before.
    others = [node.claim(f"other-{number}", f"gpu-{number}") for number in (2, 4)]
    connection = kubelet.connection(DRIVER)
    assert [entry.error for entry in call(connection.prepare, others)] == ["", ""]
    assert [entry.error for entry in call(connection.unprepare, others)] == ["", ""]
    wait_until(lambda: list(ill(node, kubelet)) == ["gpu-3"], what="the kubelet is told")
    wait_until(lambda: "XID 79" in ill(node, kubelet).get("gpu-3", ""), what="with the reason")
    assert len(streamed(kubelet)) == 8
    for name in ("c", "trainer", NODE):
        wait_until(lambda name=name: reasons(node, name)["DeviceUnhealthy"], what=f"an Event on {name}")
    times = {key: added(node, "gpu-3", key) for key in LOST_TAINTS}
    wait_until(
        lambda: device_status(node, "c").get("Healthy") == ("False", "Xid79"), what="the claim says so"
    )
    assert device_status(node, "c")["Ready"] == ("True", "Prepared")

    assert daemon.terminate(within_seconds=45) == 0
    # While no driver runs: NVML tells it to nobody, and asks for nothing afterwards.
    control.push_xid(6, 31)
    daemon = node.daemon("--mig-mode=static", periods=SOON)
    wait_until(lambda: daemon.logged("pool_published"), what="the next instance has published")
    wait_until(lambda: daemon.logged("nvml_events_watched"), what="and watches")
    missed = {"gpu-6": {XID: ("31", "None")}}
    wait_taints(node, {"gpu-3": LOST_TAINTS, **missed})
    assert [event["xid"] for event in daemon.logged("xid_received")] == [31]
    assert {key: added(node, "gpu-3", key) for key in LOST_TAINTS} == times
    wait_until(lambda: list(ill(node, kubelet)) == ["gpu-3"], what="the kubelet is told again")

    began = time.monotonic()
    control.recover_gpu(3)
    wait_taints(node, missed)
    assert time.monotonic() - began < 60  # 4 to 7 s with the daemon's own periods; 10 s are promised
    wait_until(lambda: not ill(node, kubelet), what="the kubelet hears that it is well")
    wait_until(lambda: reasons(node, "trainer")["DeviceRecovered"], what="an Event about it")
    wait_until(lambda: device_status(node, "c")["Healthy"] == ("True", "Healthy"), what="the claim says so")
    conditions = json.loads((node.state_dir / "health.json").read_text())["conditions"]
    assert [each["value"] for each in conditions] == ["31"]
    assert node.slices()[0]["spec"]["pool"]["generation"] == generation


@pytest.fixture(scope="module")
def watched():
    """A node whose daemon watches; the tests take GPUs of their own and leave them well."""
    node = Node()
    daemon, kubelet = started(
        node,
        "--inventory-interval=1",
        "--health-effects",
        "gpu-lost=NoExecute",
        "--healthcheck-port=0",
        "--additional-xids-to-ignore=48",
    )
    yield node, daemon, kubelet
    assert daemon.terminate(within_seconds=45) == 0
    node.close()


@pytest.fixture
def well(watched):
    """The same, well before and after."""
    node, daemon, kubelet = watched
    wait_well(node)
    yield node, daemon, kubelet
    assert daemon.process.poll() is None
    node.machine.control.clear()
    for gpu in range(8):
        node.machine.control.recover_gpu(gpu)
        node.machine.control.set_gpu(
            gpu, temperature=34, fabric_state=3, fabric_status=0, pcie_width=16, remap_failed=0
        )
    wait_well(node)


def test_an_xid_of_a_mig_device_taints_that_device_alone_until_nvml_says_it_is_well(well):
    node, _, kubelet = well
    control = node.machine.control
    first, second = control.set_mig_layout(1, [("1g.10gb", 0), ("1g.10gb", 1)])
    names = [f"gpu-1-mig-1g10gb-19-{start}" for start in (0, 1)]
    try:
        wait_until(lambda: set(names) <= published(node), what="the MIG devices are published")
        gi, ci = control.mig_instances(1, second)
        control.push_xid(1, 95, gi=gi, ci=ci)
        wait_until(
            lambda: taints(node).get(names[1]) == {XID: ("95", "NoSchedule")},
            what="the MIG device is tainted",
        )
        assert names[0] not in taints(node)
        wait_until(lambda: list(ill(node, kubelet)) == [names[1]], what="the kubelet is told")
        assert streamed(kubelet)[names[0]] == ("Healthy", "")
        control.set_gpu(1, recovery_action=0)
        wait_well(node)
        assert first != second
    finally:
        control.set_mig_mode(1, enabled=False)
        wait_until(lambda: "gpu-1" in published(node), what="the GPU is whole again")


@pytest.mark.fault("F37")
def test_a_gpu_that_disappears_and_comes_back(well):
    node, daemon, kubelet = well
    control = node.machine.control
    claim = node.claim("gone", "gpu-2", pods=("holder",))
    (entry,) = call(kubelet.connection(DRIVER).prepare, [claim])
    # A GPU that is published without a taint is given out; if it is not, the log says what the last looks saw.
    assert entry.devices, (entry.error, taints(node), daemon.events[-30:])
    control.remove_gpu(2)
    wait_until(lambda: LOST in taints(node).get("gpu-2", {}), what="the GPU that a claim holds is tainted")
    wait_until(lambda: list(ill(node, kubelet)) == ["gpu-2"], what="the kubelet is told")
    wait_until(lambda: reasons(node, "holder")["DeviceUnhealthy"], what="the claim's pod is told")
    # Without a holder it leaves the slices, and the others stay as they are.
    call(kubelet.connection(DRIVER).unprepare, [claim])
    control.remove_gpu(4)
    wait_until(lambda: "gpu-4" not in published(node), what="a GPU that nobody holds is gone")
    control.add_gpu(2)
    control.add_gpu(4)
    wait_until(lambda: {"gpu-2", "gpu-4"} <= published(node), what="both are back")
    wait_well(node)
    wait_until(lambda: not ill(node, kubelet), what="and well")


@pytest.mark.fault("F29", "F30")
def test_a_gpu_that_hangs_is_unhealthy_and_others_are_prepared(well):
    """A call that is slow, or never comes back, costs its GPU only."""
    node, daemon, kubelet = well
    control, connection = node.machine.control, kubelet.connection(DRIVER)
    control.set_fault("nvmlDevice*", gpu=5, hang=True)
    wait_until(lambda: "gpu-5" in taints(node), what="the GPU that hangs is tainted", seconds=60)
    assert taints(node)["gpu-5"][LOST] == ("hung", "NoExecute")  # as this node's option has it
    # A restart would not bring the GPU back: the pod is left alone.
    assert daemon.probe("liveness") == (HealthCheckResponse.SERVING, "")
    claim = node.claim("others", "gpu-6")
    began = time.monotonic()
    (entry,) = call(connection.prepare, [claim])
    assert entry.devices, entry.error
    assert time.monotonic() - began < 15  # what is called hung after 15 s is not waited for
    # News of others come on time.
    control.push_xid(6, 95)
    wait_until(lambda: taints(node).get("gpu-6") == {XID: ("95", "NoSchedule")}, what="another GPU's XID")
    call(connection.unprepare, [claim])
    control.clear()
    control.recover_gpu(6)
    wait_well(node)
    # Slow is not hung.
    control.set_fault("nvmlDeviceGetTemperature", gpu=5, delay_seconds=1.0)
    claim = node.claim("slow", "gpu-7")
    began = time.monotonic()
    (entry,) = call(connection.prepare, [claim])
    assert entry.devices, entry.error
    assert time.monotonic() - began < 15  # what is called hung after 15 s is not waited for
    call(connection.unprepare, [claim])


@pytest.mark.fault("F33")
def test_application_errors_are_remarks_and_keep_nobody_away(well):
    node, daemon, kubelet = well
    for xid in (13, 31, 43, 45, 68, 109):
        before = len(daemon.logged("xid_received"))
        node.machine.control.push_xid(0, xid)
        wait_until(lambda xid=xid: taints(node).get("gpu-0") == {XID: (str(xid), "None")}, what=f"XID {xid}")
        # NVML and the kernel log tell it; it is counted once.
        told = daemon.logged("xid_received")[before:]
        assert [(each["xid"], each["count"]) for each in told] == [(xid, 1)]
    # One that is to be ignored, for as long as NVML asks for nothing.
    node.machine.control.push_xid(0, 48, action=0)
    wait_until(lambda: taints(node).get("gpu-0") == {XID: ("48", "None")}, what="XID 48")
    assert not ill(node, kubelet)


@pytest.mark.fault("F34")
def test_a_storm_of_xids_is_few_writes_and_the_last_state_is_right(well):
    """A thousand in a second."""
    node, daemon, _ = well
    before, held = len(daemon.logged("pool_published")), Vitals.of(daemon.process.pid)
    began = time.monotonic()
    for number in range(40):
        node.machine.control.push_xid(3 * (number % 2), 31 if number % 3 else 43, times=25)
    node.machine.control.push_xid(3, 119)
    wait_until(lambda: taints(node).get("gpu-3") == {XID: ("119", "NoSchedule")}, what="the last state")
    wait_until(
        lambda: sum(each["count"] for each in daemon.logged("xid_received")) >= 1001, what="all are counted"
    )
    writes = len(daemon.logged("pool_published")) - before
    assert writes <= 2 * (time.monotonic() - began) + 2
    after = Vitals.of(daemon.process.pid)
    assert after.resident_bytes - held.resident_bytes < 4 << 20
    assert after.descriptors <= held.descriptors + 2


@pytest.mark.fault("F36")
def test_memory_errors_and_rows_that_cannot_be_remapped(well):
    node, _, kubelet = well
    control = node.machine.control
    control.add_ecc_errors(4, 3)
    row = "gpu.nvidia.com/row-remap"
    wait_until(
        lambda: (
            taints(node).get("gpu-4", {}).keys() >= {ECC, row}
            and taints(node)["gpu-4"][row] == ("pending", "NoSchedule")
        ),
        what="errors and the row that waits",
    )
    assert taints(node)["gpu-4"][ECC] == ("uncorrected", "NoSchedule")
    wait_until(
        lambda: "3 uncorrected memory errors" in ill(node, kubelet).get("gpu-4", ""), what="the message"
    )
    control.set_gpu(5, remap_failed=1)
    wait_until(lambda: taints(node).get("gpu-5") == {row: ("failed", "NoSchedule")}, what="a row that failed")
    assert set(ill(node, kubelet)) <= {"gpu-4", "gpu-5"}


def test_heat_lanes_and_the_fabric(well):
    node, _, kubelet = well
    control = node.machine.control
    control.set_gpu(5, temperature=91)
    control.set_gpu(6, pcie_width=8)
    control.set_gpu(7, fabric_state=1)
    for device, key, taint in (
        ("gpu-5", "thermal", ("slowdown", "NoSchedule")),
        ("gpu-6", "pcie", ("x8", "None")),
        ("gpu-7", "fabric", ("not-started", "NoSchedule")),
    ):
        wait_until(
            lambda device=device, key=key, taint=taint: (
                taints(node).get(device, {}).get(f"gpu.nvidia.com/{key}") == taint
            ),
            what=f"{device}: {key}",
        )
    wait_until(lambda: set(ill(node, kubelet)) == {"gpu-5", "gpu-7"}, what="the kubelet is told")
    assert "nvidia-fabricmanager" in ill(node, kubelet)["gpu-7"]


def versions(node):
    """The driver versions that the published devices tell."""
    devices = [device for each in node.slices() for device in each["spec"].get("devices") or ()]
    return {device["attributes"]["driverVersion"]["version"] for device in devices}


@pytest.mark.fault("F31")
def test_a_driver_that_is_upgraded_under_us_is_found_and_taken_up(well):
    node, daemon, kubelet = well
    control = node.machine.control
    before = control.state.library_version
    # The module first: the libraries that are loaded do not fit any more.
    control.unload_driver(force=True)
    wait_until(
        lambda: (
            sum(any(effect != "None" for _, effect in each.values()) for each in taints(node).values()) == 8
        ),
        what="no GPU is given out without a driver",
    )
    assert daemon.process.poll() is None
    control.upgrade_driver("580.105.08")
    control.load_driver()
    wait_well(node)
    wait_until(lambda: not ill(node, kubelet), what="all are well")
    control.push_xid(3, 95)
    wait_until(lambda: taints(node).get("gpu-3") == {XID: ("95", "NoSchedule")}, what="events come again")
    control.upgrade_driver(before)
    # Until the hardware was looked at again a prepare says that the libraries are of another version, and is retried.
    wait_until(lambda: versions(node) == {before}, what="the driver of before is published")
