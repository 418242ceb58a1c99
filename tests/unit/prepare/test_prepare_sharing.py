"""Claims that share: what the hardware gets, what containers get, and that all of it is given back."""

from __future__ import annotations

import pytest
from prepare_fakes import Killed, result
from sharing_node import (
    SharingNode,
    gpu_config,
    interval,
    mig_config,
    mps,
    opaque,
    share,
    unsupported,
)

from dra.errors import DeviceError
from dra.prepare import steps

EXCLUSIVE = 3


@pytest.fixture
def shared(tmp_path):
    made = SharingNode(tmp_path)
    yield made
    made.api.release()
    made.close()


@pytest.fixture
def mig(tmp_path):
    made = SharingNode(tmp_path, profile="dgx-h100")
    yield made
    made.close()


# -- time-slicing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "number"), [("Default", 0), ("Short", 1), ("Medium", 2), ("Long", 3)])
def test_a_time_slice_is_set_and_put_back(shared, name, number):
    ref = shared.claim(1, "gpu-0", configs=[opaque(interval(name))])
    shared.prepared(ref)
    assert shared.slices.calls == [(shared.uuid(0), number)]
    assert (shared.time_slice(0), shared.time_slice(1)) == (number, 0)
    # As with NVIDIA's driver a container notices nothing of it.
    assert "env" not in shared.device_edits(ref)["gpu-0"]
    assert "mounts" not in shared.device_edits(ref)["gpu-0"]
    assert shared.unprepare(ref) is None
    shared.clean()


@pytest.mark.parametrize(
    "block",
    [{}, {"timeSlicingConfig": None}, {"timeSlicingConfig": {}}, {"timeSlicingConfig": {"interval": None}}],
)
def test_a_block_that_says_nothing_is_the_default(shared, block):
    """With NVIDIA's driver some of these end the process."""
    shared.prepared(shared.claim(1, "gpu-0", configs=[opaque(gpu_config("TimeSlicing", **block))]))
    assert shared.slices.calls == [(shared.uuid(0), 0)]


def test_a_claim_without_sharing_touches_nothing(shared):
    shared.prepared(shared.claim(1, "gpu-0", configs=[opaque({**gpu_config(""), "sharing": None})]))
    shared.prepared(shared.claim(2, "gpu-1"))
    assert shared.slices.calls == []
    assert shared.sim.count_calls().get("nvmlDeviceSetComputeMode", 0) == 0


def test_a_time_slice_that_somebody_changed_is_set_again_by_the_next_prepare(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(interval("Long"))])
    shared.prepared(ref)
    shared.sim.set_gpu(0, timeslice=0, compute_mode=2)
    shared.prepared(ref)
    assert (shared.time_slice(0), shared.compute_mode(0)) == (3, 0)


def test_each_gpu_of_a_claim_gets_it(shared):
    configs = [opaque(interval("Long"))]
    ref = shared.claim(1, result("gpu-0", request="a"), result("gpu-1", request="b"), configs=configs)
    shared.prepared(ref)
    assert [shared.time_slice(n) for n in range(3)] == [3, 3, 0]
    shared.unprepare(ref)
    shared.clean()


def test_a_gpu_without_time_slices_is_told_of_where_the_default_was_asked_for(shared):
    shared.slices.error = unsupported()
    ref = shared.claim(1, "gpu-0", configs=[opaque(gpu_config("TimeSlicing"))])
    shared.prepared(ref)
    (notice,) = shared.notices
    assert (notice.ref, notice.reason) == (ref, "TimeSliceNotSupported")
    assert shared.uuid(0) in notice.message
    assert shared.unprepare(ref) is None
    assert shared.files() == []


def test_a_gpu_without_time_slices_is_an_error_where_another_was_asked_for(shared):
    shared.slices.error = unsupported()
    error = shared.refused(shared.claim(1, "gpu-0", configs=[opaque(interval("Short"))]))
    assert error.code == "DRA-TIME-SLICE-UNSUPPORTED"
    assert error.remedy
    assert not error.retryable
    shared.slices.error = None
    shared.clean()


def test_nothing_that_is_gone_keeps_a_pod_from_ending(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(interval("Short"))])
    shared.prepared(ref)
    shared.slices.error = DeviceError("DRA-TIME-SLICE-GONE", "no driver")
    shared.sim.lose_gpu(0)
    assert shared.unprepare(ref) is None
    assert shared.files() == []


def test_shares_of_a_gpu_have_one_time_slice_and_the_last_puts_it_back(shared):
    one = shared.claim(1, share("gpu-0", "a"), configs=[opaque(interval("Long"))])
    two = shared.claim(2, share("gpu-0", "b"), configs=[opaque(interval("Long"))])
    shared.prepared(one)
    shared.prepared(two)
    shared.unprepare(one)
    assert shared.time_slice(0) == 3
    shared.unprepare(two)
    shared.clean()


def test_shares_of_a_gpu_that_want_different_time_slices_are_refused_by_name(shared):
    one = shared.claim(1, share("gpu-0", "a"), configs=[opaque(interval("Long"))])
    two = shared.claim(2, share("gpu-0", "b"), configs=[opaque(interval("Short"))])
    shared.prepared(one)
    error = shared.refused(two)
    assert error.code == "DRA-SHARING-CONFLICT"
    assert error.retryable
    assert str(one) in error.message and "Long" in error.message
    assert shared.time_slice(0) == 3
    shared.unprepare(one)
    shared.prepared(two)
    assert shared.time_slice(0) == 1


def test_a_claim_that_contradicts_itself_is_refused(shared):
    error = shared.refused(
        shared.claim(
            1,
            share("gpu-0", "a", request="x"),
            share("gpu-0", "b", request="y"),
            configs=[opaque(interval("Long"), requests=["x"]), opaque(interval("Short"), requests=["y"])],
        )
    )
    assert error.code == "DRA-SHARING-CONFLICT"
    shared.clean()


def test_monitoring_changes_nothing(shared):
    holder = shared.claim(1, "gpu-0", configs=[opaque(interval("Long"))])
    watcher = shared.claim(2, result("gpu-0", adminAccess=True), configs=[opaque(mps())])
    shared.prepared(holder)
    shared.prepared(watcher)
    shared.unprepare(watcher)
    assert (shared.time_slice(0), shared.compute_mode(0)) == (3, 0)
    assert shared.keeper.daemons == {}


def test_a_strategy_that_is_switched_off_is_refused_with_its_gate(tmp_path):
    node = SharingNode(tmp_path, gates={"MPSSupport": False})
    try:
        error = node.refused(node.claim(1, "gpu-0", configs=[opaque(mps())]))
        assert error.code == "DRA-CONFIG-GATE-OFF"
        assert "MPSSupport=false" in error.message
        node.prepared(node.claim(2, "gpu-0", configs=[opaque(interval("Long"))]))
    finally:
        node.close()


def test_a_mig_device_has_no_time_slice_of_its_own(mig):
    mig.sim.set_mig_layout(0, [("1g.10gb", 0)])
    mig.look()
    ref = mig.claim(1, mig.name(0, "1g.10gb", 0), configs=[opaque(mig_config("TimeSlicing"))])
    mig.prepared(ref)
    assert mig.slices.calls == []


# -- MPS ----------------------------------------------------------------------------------------------------


def test_mps_gives_a_daemon_its_limits_and_containers_the_way_to_it(shared):
    config = mps(defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="10Gi")
    ref = shared.claim(1, "gpu-0", configs=[opaque(config)])
    shared.prepared(ref)
    daemon = shared.daemon()
    assert daemon.devices == (shared.uuid(0),)
    assert daemon.active_thread_percentage == 50
    assert daemon.pinned_memory_mib == {shared.uuid(0): 10240}
    assert not daemon.multi_user
    assert daemon.claim == str(ref)
    assert daemon.id.startswith(f"{ref.uid}-") and len(daemon.id) == len(ref.uid) + 6
    assert shared.compute_mode(0) == EXCLUSIVE
    edits = shared.device_edits(ref)["gpu-0"]
    assert edits["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]
    home = f"{shared.state_dir}/mps/{daemon.id}"
    options = ["rw", "nosuid", "nodev", "bind"]
    assert edits["mounts"] == [
        {"hostPath": f"{home}/shm", "containerPath": "/dev/shm", "options": options},
        {"hostPath": f"{home}/pipe", "containerPath": "/tmp/nvidia-mps", "options": options},
    ]
    assert shared.unprepare(ref) is None
    shared.clean()


def test_a_claims_daemon_has_the_name_that_nvidias_driver_gives(shared):
    """Source: sha256 over the sorted UUIDs with commas, five digits."""
    import hashlib

    ref = shared.claim(1, "gpu-1", "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    uuids = ",".join(sorted((shared.uuid(0), shared.uuid(1))))
    assert shared.daemon().id == f"{ref.uid}-{hashlib.sha256(uuids.encode()).hexdigest()[:5]}"


def test_two_configurations_are_two_groups(shared):
    """gpu-test5 of NVIDIA's quickstart."""
    long, half = (
        interval("Long"),
        mps(defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="10Gi"),
    )
    ref = shared.claim(
        1,
        result("gpu-0", request="ts-gpu"),
        result("gpu-1", request="mps-gpu"),
        configs=[opaque(long, requests=["ts-gpu"]), opaque(half, requests=["mps-gpu"])],
    )
    shared.prepared(ref)
    assert (shared.time_slice(0), shared.compute_mode(0)) == (3, 0)
    assert (shared.time_slice(1), shared.compute_mode(1)) == (0, EXCLUSIVE)
    edits = shared.device_edits(ref)
    assert "env" not in edits["gpu-0"]
    assert edits["gpu-1"]["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]
    shared.unprepare(ref)
    shared.clean()


def test_the_compute_mode_that_an_administrator_had_set_is_given_back(shared):
    shared.sim.set_gpu(0, compute_mode=2)
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    assert shared.compute_mode(0) == EXCLUSIVE
    shared.restart()
    shared.prepared(ref)
    shared.unprepare(ref)
    assert shared.compute_mode(0) == 2


def test_a_gpu_without_compute_modes_is_told_of_and_shared_all_the_same(shared):
    shared.sim.set_fault("nvmlDeviceSetComputeMode", error="NOT_SUPPORTED")
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    assert [notice.reason for notice in shared.notices] == ["ComputeModeNotSupported"]
    shared.prepared(ref)
    assert shared.unprepare(ref) is None
    shared.clean()


def test_a_dead_daemon_is_brought_back_by_the_next_prepare(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    shared.keeper.dead.add(shared.daemon().id)
    shared.sim.set_gpu(0, compute_mode=0)
    shared.prepared(ref)
    assert len(shared.keeper.ensured) == 2
    assert shared.compute_mode(0) == EXCLUSIVE


def test_a_second_pod_of_the_claim_starts_nothing(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    shared.prepared(ref)
    assert len(shared.keeper.ensured) == 1


def test_without_a_keeper_nothing_is_left_and_the_call_is_tried_again(shared):
    shared.keeper.absent = True
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    error = shared.refused(ref)
    assert error.code == "DRA-MPS-KEEPER-ABSENT"
    assert error.retryable
    # The keeper cannot say that there is no daemon either: the record waits for it.
    assert shared.record(ref)["effects"]
    shared.keeper.absent = False
    shared.prepared(ref)
    shared.unprepare(ref)
    shared.clean()


def test_a_daemon_that_cannot_be_started_leaves_nothing(shared):
    shared.keeper.fail = DeviceError("DRA-MPS-DAEMON-FAILED", "it ended", retryable=True)
    error = shared.refused(shared.claim(1, "gpu-0", configs=[opaque(mps())]))
    assert error.code == "DRA-MPS-DAEMON-FAILED"
    shared.clean()


def test_after_a_reboot_the_daemon_and_the_mode_are_there_again(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    shared.keeper.daemons.clear()
    shared.reboot()
    assert shared.compute_mode(0) == 0
    shared.prepared(ref)
    assert shared.compute_mode(0) == EXCLUSIVE
    assert len(shared.keeper.daemons) == 1
    shared.unprepare(ref)
    shared.clean()


def test_after_a_reboot_an_unprepare_removes_the_daemons_folder(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    shared.keeper.daemons.clear()
    shared.reboot()
    assert shared.unprepare(ref) is None
    shared.clean()


def test_mps_on_a_mig_device_that_was_there(mig):
    (uuid,) = mig.sim.set_mig_layout(0, [("1g.10gb", 0)])
    mig.look()
    device = mig.name(0, "1g.10gb", 0)
    config = mig_config("MPS", mpsConfig={"defaultPinnedDeviceMemoryLimit": "2Gi", "multiUser": True})
    ref = mig.claim(1, device, configs=[opaque(config)])
    mig.prepared(ref)
    assert mig.daemon().devices == (uuid,)
    assert mig.daemon().pinned_memory_mib == {uuid: 2048}
    assert mig.daemon().multi_user
    # The mode of the GPU is not touched: it has other partitions.
    assert mig.compute_mode(0) == 0
    assert mig.device_edits(ref)[device]["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]
    assert mig.unprepare(ref) is None
    mig.clean()


def test_mps_on_a_mig_device_that_is_made_for_the_claim(tmp_path):
    node = SharingNode(tmp_path, profile="dgx-h100", dynamic=True)
    try:
        device = node.name(0, "1g.10gb", 0)
        config = mig_config("MPS", mpsConfig={"defaultPerDevicePinnedMemoryLimit": {"0": "1Gi"}})
        ref = node.claim(1, device, configs=[opaque(config)])
        node.prepared(ref)
        (uuid,) = node.daemon().devices
        assert uuid.startswith("MIG-")
        assert node.daemon().pinned_memory_mib == {uuid: 1024}
        node.prepared(ref)
        assert len(node.keeper.ensured) == 1
        assert node.unprepare(ref) is None
        assert node.partitions() == []
        node.clean()
    finally:
        node.close()


def test_several_users_need_a_gpu_that_can_keep_them_apart(shared):
    from dataclasses import replace

    gpus = tuple(replace(gpu, compute_capability=(6, 1)) for gpu in shared.inventory.gpus)
    shared.inventory = replace(shared.inventory, gpus=gpus)
    error = shared.refused(shared.claim(1, "gpu-0", configs=[opaque(mps(multiUser=True))]))
    assert error.code == "DRA-CONFIG-MULTI-USER"
    assert "6.1" in error.message
    shared.clean()


# -- failures at every step ---------------------------------------------------------------------------------

EFFECTS = 3  # compute mode, daemon, spec


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_prepare_killed_anywhere_leaks_nothing(shared, step):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps(defaultActiveThreadPercentage=10))])
    shared.kill_at = step
    with pytest.raises(Killed):
        shared.prepare(ref)
    shared.restart()
    shared.api.hang()
    assert shared.unprepare(ref) is None
    shared.clean()


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_prepare_killed_anywhere_is_finished_by_the_next_and_undone(shared, step):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps(defaultActiveThreadPercentage=10))])
    shared.kill_at = step
    with pytest.raises(Killed):
        shared.prepare(ref)
    shared.restart()
    shared.prepared(ref)
    assert shared.compute_mode(0) == EXCLUSIVE
    assert shared.daemon().active_thread_percentage == 10
    shared.unprepare(ref)
    shared.clean()


@pytest.mark.parametrize("step", steps.unprepare_steps(effects=EFFECTS))
def test_an_unprepare_killed_anywhere_is_finished_by_the_next(shared, step):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    shared.kill_at = step
    with pytest.raises(Killed):
        shared.unprepare(ref)
    shared.restart()
    assert shared.unprepare(ref) is None
    shared.clean()


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"])
def test_hardware_that_refuses_leaves_nothing(shared, function):
    fault = shared.sim.set_fault(function, error="UNKNOWN", gpu=0)
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.refused(ref)
    shared.sim.clear(fault)
    assert shared.unprepare(ref) is None
    shared.clean()


def test_hardware_that_refuses_to_take_the_mode_back_is_tried_again(shared):
    ref = shared.claim(1, "gpu-0", configs=[opaque(mps())])
    shared.prepared(ref)
    fault = shared.sim.set_fault("nvmlDeviceSetComputeMode", error="UNKNOWN")
    assert shared.unprepare(ref).code == "DRA-NVML-UNKNOWN"
    # The daemon has gone, and the record says what is left.
    assert shared.keeper.daemons == {}
    assert [entry["kind"] for entry in shared.record(ref)["effects"]] == ["compute-mode"]
    shared.sim.clear(fault)
    assert shared.unprepare(ref) is None
    shared.clean()


def test_a_failed_spec_takes_everything_back(shared):
    shared.cdi_root.mkdir(exist_ok=True)
    shared.cdi_root.rmdir()
    shared.cdi_root.write_text("in the way")
    shared.refused(shared.claim(1, "gpu-0", configs=[opaque(mps())]))
    shared.cdi_root.unlink()
    shared.clean()
