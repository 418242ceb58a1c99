"""Time-slicing and MPS by the real daemon, a real keeper process, and stand-ins of the driver's programs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from dra.host.processes import start_ticks
from dra.sim.kubelet import PrepareError, UnprepareError
from tests.process.harness import DRIVER, wait_until

EXCLUSIVE = 3


def config(strategy, **blocks):
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy, **blocks},
    }


LONG = config("TimeSlicing", timeSlicingConfig={"interval": "Long"})
HALF = config(
    "MPS", mpsConfig={"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}
)


def gpu(node, minor=0):
    return node.machine.control.state.gpus[minor]


def mps_log(node):
    file = node.root / "sim/mps.log"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def commands(node):
    return [entry["command"] for entry in mps_log(node) if entry["what"] == "command"]


def daemon_pid(node):
    (row,) = node.mps.daemons()
    return row.pid


def is_clean(node):
    """Nothing of sharing is left: no process, no folder, no mode."""
    started = [entry["pid"] for entry in mps_log(node) if entry["what"] == "start"]
    folders = [path for path in (node.state_dir / "mps").glob("*") if path.is_dir()]
    modes = [(each.compute_mode, each.timeslice) for each in node.machine.control.state.gpus]
    return (
        all(start_ticks(pid) is None for pid in started)
        and folders == []
        and set(modes) == {(0, 0)}
        and (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
    )


def reasons(node, claim):
    return {event["reason"]: event["message"] for event in node.told_events(claim)}


def start(node, *arguments, keeper=True, **more):
    kubelet = node.kubelet()
    if keeper:
        node.keeper()
    daemon = node.daemon(*arguments, **more)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    return kubelet, daemon, before


def test_time_slice_and_mps_reach_the_gpu_and_the_container_and_are_given_back(node):
    kubelet, _, _ = start(node)
    slow = node.pod("slow", node.claim("ts", "gpu-0", pods=("slow",), configs=(LONG,)))
    kubelet.run_pod(slow)
    assert (gpu(node).timeslice, gpu(node).compute_mode) == (3, 0)
    claim = node.claim("mps", "gpu-1", configs=(HALF,))
    pod = node.pod("p", claim)
    view = kubelet.run_pod(pod).views["main"]
    assert gpu(node, 1).compute_mode == EXCLUSIVE
    # The fake MPS daemon has exactly the limits.
    uuid = gpu(node, 1).uuid
    assert commands(node) == [
        "set_default_active_thread_percentage 50",
        f"set_default_device_pinned_mem_limit {uuid} 10240M",
    ]
    assert view.env["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    pipe, shm = view.mounts["/tmp/nvidia-mps"], view.mounts["/dev/shm"]
    assert pipe.source.startswith(f"/var/lib/kubelet/plugins/{DRIVER}/mps/{claim['metadata']['uid']}-")
    assert {"control", "nvidia-cuda-mps-control.pid"} <= {
        path.name for path in (node.root / pipe.source.lstrip("/")).iterdir()
    }
    assert (node.root / shm.source.lstrip("/")).is_dir()
    kubelet.stop_pod(pod)
    kubelet.stop_pod(slow)
    assert is_clean(node)


def test_a_daemon_that_is_killed_comes_back_and_the_claims_owner_reads_it(node):
    kubelet, _, _ = start(node)
    claim = node.claim("mps", "gpu-0", configs=(HALF,))
    pod = node.pod("p", claim)
    kubelet.run_pod(pod)
    pid = daemon_pid(node)
    os.kill(pid, signal.SIGKILL)
    told = wait_until(lambda: reasons(node, claim).get("MpsDaemonRestarted"), what="the Event is there")
    assert gpu(node).uuid in told and "restart containers" in told
    assert daemon_pid(node) != pid
    assert commands(node)[2:] == commands(node)[:2]
    kubelet.stop_pod(pod)
    assert is_clean(node)


def test_a_plugin_that_is_killed_or_upgraded_finds_the_daemon_again(node):
    kubelet, daemon, before = start(node)
    claim = node.claim("mps", "gpu-0", pods=("p", "q"), configs=(HALF,))
    kubelet.run_pod(node.pod("p", claim))
    pid = daemon_pid(node)
    daemon.kill()
    assert start_ticks(pid) is not None
    daemon = node.daemon()
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    # Another pod of the claim: prepared again, by the new process, on the same daemon.
    kubelet.run_pod(node.pod("q", claim))
    assert daemon_pid(node) == pid
    # An upgrade: the new one is there before the old one ends.
    newer = node.daemon(pod_uid="00000000-0000-4000-8000-000000000001")
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    daemon.terminate(within_seconds=60)
    assert daemon_pid(node) == pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "MpsDaemonRestarted" in reasons(node, claim), what="the new process hears the keeper")
    kubelet.stop_pod(node.pod("p", claim))
    assert gpu(node).compute_mode == EXCLUSIVE  # q still runs
    kubelet.stop_pod(node.pod("q", claim))
    assert is_clean(node)
    assert newer.process.poll() is None


def test_a_keeper_that_is_killed_takes_no_client_along(node):
    kubelet, _, _ = start(node)
    claim = node.claim("mps", "gpu-0", configs=(HALF,))
    pod = node.pod("p", claim)
    kubelet.run_pod(pod)
    pid = daemon_pid(node)
    node.mps.stop(kill=True)
    assert start_ticks(pid) is not None
    # Without it the daemon cannot be ended, and the claim stays as it is until it is back.
    with pytest.raises(UnprepareError, match="DRA-MPS-KEEPER-ABSENT"):
        kubelet.stop_pod(pod)
    node.keeper()
    assert daemon_pid(node) == pid
    kubelet.stop_pod(pod)
    assert is_clean(node)


def test_without_a_keeper_the_pod_waits_and_is_told_why(node):
    kubelet, _, _ = start(node, keeper=False)
    claim = node.claim("mps", "gpu-0", configs=(HALF,))
    pod = node.pod("p", claim)
    with pytest.raises(PrepareError, match="DRA-MPS-KEEPER-ABSENT"):
        kubelet.run_pod(pod)
    told = wait_until(lambda: reasons(node, claim).get("PrepareFailed"), what="the Event is there")
    assert "deploy/manifests/mps-keeper.yaml" in told
    # Others are not held up.
    kubelet.run_pod(node.pod("other", node.claim("other", "gpu-1", pods=("other",))))
    node.keeper()
    kubelet.run_pod(pod)
    kubelet.stop_pod(pod)
    kubelet.stop_pod(node.pod("other", node.claim_of("other")))
    assert is_clean(node)


def test_a_share_is_never_without_its_limits_when_keeper_and_plugin_restart_together(node):
    """What one process published as held by the keeper, the next one does not give out unheld while it is away."""

    def enforced():
        return {
            device["attributes"]["gpudra.dev/enforcement"]["string"]
            for each in node.slices()
            for device in each["spec"].get("devices", ())
        }

    kubelet, daemon, before = start(node, "--sharing=4")
    wait_until(lambda: enforced() == {"per-process"}, what="the shares are published as held")
    node.mps.stop(kill=True)
    daemon.kill()
    node.daemon("--sharing=4")
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    share = {"share": "00000000-0000-4000-8000-000000000001", "consumed": {"shares": "1"}}
    pod = node.pod("p", node.claim("share", "gpu-0", **share))
    with pytest.raises(PrepareError, match="DRA-MPS-KEEPER-ABSENT"):
        kubelet.run_pod(pod)
    assert enforced() == {"per-process"}
    node.keeper()
    view = kubelet.run_pod(pod).views["main"]
    assert view.env["GPUDRA_SHARE_ENFORCEMENT"] == "per-process"
    assert f"set_default_device_pinned_mem_limit {gpu(node).uuid} {view.env['GPUDRA_SHARE_MEMORY_MIB']}M" in (
        commands(node)
    )
    kubelet.stop_pod(pod)
    assert is_clean(node)


@pytest.mark.parametrize(
    "step",
    [
        "prepare:record-written",
        "prepare:effect-applied:0",
        "prepare:effect-applying:1",
        "prepare:effect-applied:1",
    ],
)
@pytest.mark.fault("F6")
def test_killed_while_mps_is_set_up_nothing_leaks(node, step):
    kubelet, doomed, before = start(node, crash_at=step)
    claim = node.claim("mps", "gpu-0", configs=(HALF,))
    pod = node.pod("p", claim)
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert is_clean(node)


@pytest.mark.fault("F7")
def test_killed_while_mps_is_taken_down_nothing_leaks(node):
    kubelet, doomed, before = start(node, crash_at="unprepare:effect-undone:1")
    pod = node.pod("p", node.claim("mps", "gpu-0", configs=(HALF,)))
    kubelet.run_pod(pod)
    with pytest.raises(UnprepareError):
        kubelet.stop_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert is_clean(node)


def test_mps_on_a_mig_device_made_for_the_claim(node):
    kubelet, _, _ = start(node, "--mig-mode=dynamic")
    parameters = {**HALF, "kind": "MigDeviceConfig"}
    claim = node.claim("mig", "gpu-2-mig-2g20gb-14-2", configs=(parameters,))
    pod = node.pod("p", claim)
    view = kubelet.run_pod(pod).views["main"]
    (row,) = node.mps.daemons()
    (device,) = row.spec.devices
    assert device.startswith("MIG-")
    assert commands(node)[1] == f"set_default_device_pinned_mem_limit {device} 10240M"
    assert view.env["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert gpu(node, 2).compute_mode == 0
    kubelet.stop_pod(pod)
    assert is_clean(node)
    assert not any(each.instances or each.mig_current for each in node.machine.control.state.gpus)


@pytest.mark.fault("F12")
def test_daemons_of_nobody_are_ended(node):
    """A record that went without its daemon: the disk lost it, or somebody removed it."""
    kubelet, daemon, _ = start(node)
    claim, other = (
        node.claim("a", "gpu-0", configs=(HALF,)),
        node.claim("b", "gpu-1", pods=("q",), configs=(HALF,)),
    )
    kubelet.run_pod(node.pod("p", claim))
    kubelet.run_pod(node.pod("q", other))
    assert len(node.mps.daemons()) == 2
    daemon.kill()
    uid = claim["metadata"]["uid"]
    node.record_file(uid).unlink()
    node.cdi_file(uid).unlink()
    node.daemon()
    wait_until(lambda: len(node.mps.daemons()) == 1, what="the daemon of nobody is ended")
    (left,) = node.mps.daemons()
    assert left.spec.id.startswith(other["metadata"]["uid"])
