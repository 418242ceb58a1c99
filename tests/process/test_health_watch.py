"""How the driver listens: while NVML is let go of, for long, with each kubelet, and with a damaged state file."""

from __future__ import annotations

import signal
import time

import pytest

from tests.process.harness import DRIVER, wait_until
from tests.process.health_node import (
    LOST,
    XID,
    ill,
    started,
    streamed,
    taints,
    threads,
    wait_taints,
    wait_watched,
    wait_well,
)


def test_a_driver_unload_while_health_is_watched(node):
    """The session is let go of within 5 s, XIDs go on coming from the kernel log, and the session comes back."""
    daemon, kubelet = started(node)
    control = node.machine.control
    assert control.open_sessions() == 1
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: daemon.logged("nvml_released"), what="the session is let go of")
    assert time.monotonic() - began < 20  # 1 s on a machine that is not busy; 5 s are promised
    assert daemon.logged("nvml_released")[0]["complete"] is True
    assert control.open_sessions() == 0
    control.unload_driver()  # refused while a session is open
    # The module prints on while it goes; what an XID means is then told by the list.
    control.push_xid(4, 79, sources=("kernel log",))
    wait_until(
        lambda: taints(node).get("gpu-4", {}).get(XID) == ("79", "NoSchedule"), what="the XID is heard"
    )
    wait_until(lambda: "XID 79" in ill(node, kubelet).get("gpu-4", ""), what="the kubelet is told")
    assert {event["source"] for event in daemon.logged("xid_received")} == {"kernel log"}
    assert control.open_sessions() == 0
    control.load_driver()
    control.recover_gpu(4)
    daemon.process.send_signal(signal.SIGUSR1)
    wait_watched(daemon, times=2)
    wait_well(node)
    assert control.open_sessions() == 1
    control.push_xid(5, 95)
    wait_until(lambda: taints(node).get("gpu-5") == {XID: ("95", "NoSchedule")}, what="events come again")


def test_without_a_held_session_xids_come_from_the_kernel_log(node):
    daemon = node.daemon("--nvml-hold=never", "--mig-mode=static", "--inventory-interval=3600")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    wait_until(lambda: not node.machine.control.open_sessions(), what="no session is held")
    node.machine.control.push_xid(2, 119)
    wait_taints(node, {"gpu-2": {XID: ("119", "NoSchedule")}})
    assert {event["source"] for event in daemon.logged("xid_received")} == {"kernel log"}
    wait_until(lambda: not node.machine.control.open_sessions(), what="no session is held")


@pytest.mark.fault("F32")
def test_a_gpu_that_is_lost_at_the_start_is_tainted_alone(node):
    node.machine.control.lose_gpu(7)
    _, kubelet = started(node)
    wait_until(lambda: LOST in taints(node).get("gpu-7", {}), what="the lost one")
    wait_until(lambda: list(ill(node, kubelet)) == ["gpu-7"], what="no other is ill")
    assert len(node.slices()[0]["spec"]["devices"]) == 8
    node.machine.control.push_xid(0, 95)
    wait_until(lambda: XID in taints(node).get("gpu-0", {}), what="the others are watched")


def test_a_stream_that_is_open_for_long(node):
    """No gap in which the kubelet would show Unknown, one stream, and no thread more than at the beginning.

    A resend every 10 ms in place of 10 s: 200 of them are what half an hour has. With a kubelet of 1.36 and of 1.37.
    """
    daemon, kubelet = started(node, **{"dra.plugin.health_service:HealthService.resend_seconds": 0.01})
    follow_stream(node, daemon, kubelet, version="v1alpha1.DRAResourceHealth")
    kubelet.stop()
    kubelet = node.kubelet(minor=37)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    follow_stream(node, daemon, kubelet, version="v1.DRAResourceHealth")
    node.machine.control.push_xid(0, 95)
    wait_until(lambda: "XID 95" in ill(node, kubelet).get("gpu-0", ""), what="news come through")


def follow_stream(node, daemon, kubelet, *, version):
    connection = kubelet.connection(DRIVER)
    assert connection.health_version == version
    wait_until(lambda: connection.health_messages > 5, what="the stream runs")
    before, opened = threads(daemon.process.pid), len(daemon.logged("health_stream_opened"))
    times, count = [time.monotonic()], connection.health_messages
    goal = count + 200
    while connection.health_messages < goal:
        assert time.monotonic() - times[0] < 90
        if connection.health_messages > count:
            count = connection.health_messages
            times.append(time.monotonic())
            assert len(streamed(kubelet)) == 8
            assert {state for state, _ in streamed(kubelet).values()} == {"Healthy"}
        time.sleep(0.005)
    # In the daemon's own time this is under 30 s: nothing is ever shown as unknown.
    assert max(later - earlier for earlier, later in zip(times, times[1:], strict=False)) < 25
    assert len(daemon.logged("health_stream_opened")) == opened
    # Checks and calls come and go; a leak of one a message would be hundreds.
    assert threads(daemon.process.pid) < before + 25


def test_a_damaged_state_file_does_not_stop_the_driver(node):
    node.state_dir.mkdir(parents=True)
    (node.state_dir / "health.json").write_text('{"boot_id":1,"conditions":[{}]}')
    node.machine.control.push_xid(3, 95)
    daemon, _ = started(node)
    # NVML still says what is wrong, although nobody remembers which XID it was.
    wait_until(lambda: taints(node).get("gpu-3") == {XID: ("gpu-reset", "NoSchedule")}, what="NVML's word")
    assert daemon.logged("health_state_corrupt")
    node.machine.control.recover_gpu(3)
    wait_taints(node, {})
