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


def test_an_xid_while_no_driver_runs_is_heard_by_the_next(node):
    daemon, _ = started(node)
    node.machine.control.push_xid(1, 95)
    wait_taints(node, {"gpu-1": {XID: ("95", "NoSchedule")}})
    assert daemon.terminate(within_seconds=15) == 0
    # NVML forgets events that nobody waits for, and does not ask for anything.
    node.machine.control.push_xid(6, 31)
    daemon = node.daemon("--mig-mode=static")
    wait_until(lambda: taints(node).get("gpu-6") == {XID: ("31", "None")}, what="the XID of the meantime")
    wait_until(lambda: XID in taints(node).get("gpu-1", {}), what="and the one from before")
    assert [event["xid"] for event in daemon.logged("xid_received")] == [31]


def test_a_gpu_that_is_lost_at_the_start_is_tainted_alone(node):
    node.machine.control.lose_gpu(7)
    _, kubelet = started(node)
    wait_until(lambda: LOST in taints(node).get("gpu-7", {}), what="the lost one")
    wait_until(lambda: list(ill(node, kubelet)) == ["gpu-7"], what="no other is ill")
    assert len(node.slices()[0]["spec"]["devices"]) == 8
    node.machine.control.push_xid(0, 95)
    wait_until(lambda: XID in taints(node).get("gpu-0", {}), what="the others are watched")


@pytest.mark.parametrize("minor", [36, 37])
def test_a_stream_that_is_open_for_long(node, minor):
    """No gap in which the kubelet would show Unknown, one stream, and no thread more than at the beginning.

    A resend every 10 ms in place of 10 s: 200 of them are what half an hour has.
    """
    daemon, kubelet = started(
        node, minor=minor, **{"dra.plugin.health_service:HealthService.resend_seconds": 0.01}
    )
    connection = kubelet.connection(DRIVER)
    assert connection.health_version == (
        "v1.DRAResourceHealth" if minor >= 37 else "v1alpha1.DRAResourceHealth"
    )
    wait_until(lambda: connection.health_messages > 5, what="the stream runs")
    before = threads(daemon.process.pid)
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
    assert len(daemon.logged("health_stream_opened")) == 1
    assert not daemon.logged("health_stream_closed")
    # Checks and calls come and go; a leak of one a message would be hundreds.
    assert threads(daemon.process.pid) < before + 25
    node.machine.control.push_xid(0, 95)
    wait_until(lambda: "XID 95" in ill(node, kubelet).get("gpu-0", ""), what="news come through")


@pytest.mark.parametrize("content", [b"", b'{"boot_id":1,"conditions":[{}]}'], ids=["empty", "wrong"])
def test_a_damaged_state_file_does_not_stop_the_driver(node, content):
    node.state_dir.mkdir(parents=True)
    (node.state_dir / "health.json").write_bytes(content)
    node.machine.control.push_xid(3, 95)
    daemon, _ = started(node)
    # NVML still says what is wrong, although nobody remembers which XID it was.
    wait_until(lambda: taints(node).get("gpu-3") == {XID: ("gpu-reset", "NoSchedule")}, what="NVML's word")
    assert bool(daemon.logged("health_state_corrupt")) == bool(content)
    node.machine.control.recover_gpu(3)
    wait_taints(node, {})
