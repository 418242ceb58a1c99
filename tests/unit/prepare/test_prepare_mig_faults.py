"""What goes wrong while a partition is made or destroyed: NVML refuses, the process dies, somebody uses it."""

from __future__ import annotations

import pytest
from mig_node import MigNode
from prepare_fakes import Killed, result

from dra.errors import DraError
from dra.prepare import steps

# Every function that making a partition on a GPU without MIG mode calls, and destroying the last one. The tests
# below say so if this list is not complete any more.
CREATE_CALLS = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetUUID",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlDeviceSetMigMode",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    "nvmlGpuInstanceGetInfo",
)
DESTROY_CALLS = (
    "nvmlComputeInstanceDestroy",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetUUID",
    "nvmlDeviceSetMigMode",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlGpuInstanceGetInfo",
)


@pytest.fixture
def node(tmp_path):
    made = MigNode(tmp_path, profile="gh200")
    yield made
    made.close()


@pytest.fixture
def device(node):
    return node.name(0, "2g.24gb", 2)


def is_clean(node) -> bool:
    return node.partitions() == [] and node.mode(0) == 0 and node.files() == []


def kill(node, step, call, ref) -> None:
    node.kill_at = step
    with pytest.raises(Killed):
        call(ref)
    node.restart()
    node.steps.clear()


def of_gpu_changes(counts) -> set[str]:
    """The calls about partitions; the rest reads what cannot change, or was asked for before."""
    once = {"nvmlDeviceGetArchitecture", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlErrorString"}
    return {name for name in counts if not name.startswith(("nvmlInit", "nvmlShutdown", "nvmlSystem"))} - once


def test_the_calls_that_are_made_to_fail_are_those_that_happen(node, device):
    ref = node.claim(1, device)
    node.sim.reset_calls()
    node.prepared(ref)
    assert of_gpu_changes(node.sim.count_calls()) == set(CREATE_CALLS)
    node.sim.reset_calls()
    assert node.unprepare(ref) is None
    assert of_gpu_changes(node.sim.count_calls()) == set(DESTROY_CALLS)


@pytest.mark.parametrize("error", ["UNKNOWN", "IN_USE", "INSUFFICIENT_RESOURCES"])
@pytest.mark.parametrize("function", CREATE_CALLS)
def test_a_failure_at_any_call_of_creating_leaves_nothing_and_the_retry_succeeds(
    node, device, function, error
):
    ref = node.claim(1, device)
    node.sim.set_fault(function, gpu=0, error=error, times=1)
    outcome = node.prepare(ref)
    if isinstance(outcome, DraError):
        assert is_clean(node)
    node.prepared(ref)
    assert node.partitions() == [device]
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("function", CREATE_CALLS)
def test_a_failure_that_stays_leaves_nothing_once_it_is_over(node, device, function):
    """Also taking back what was made may fail then: the record says what is left."""
    ref = node.claim(1, device)
    fault = node.sim.set_fault(function, gpu=0, error="UNKNOWN")
    node.refused(ref)
    node.sim.clear(fault)
    assert node.unprepare(ref) is None
    assert is_clean(node)
    node.prepared(ref)
    assert node.partitions() == [device]


@pytest.mark.parametrize("function", CREATE_CALLS)
def test_a_failure_at_any_call_after_which_the_claim_is_deleted_leaves_nothing(node, device, function):
    ref = node.claim(1, device)
    node.sim.set_fault(function, gpu=0, error="UNKNOWN", times=1)
    node.sim.set_fault("nvmlGpuInstanceDestroy", gpu=0, error="IN_USE", times=2)
    node.prepare(ref)
    node.sim.clear()
    node.api.delete(ref)
    node.janitor().sweep()
    assert is_clean(node)


@pytest.mark.parametrize("error", ["UNKNOWN", "IN_USE"])
@pytest.mark.parametrize("function", DESTROY_CALLS)
def test_a_failure_at_any_call_of_destroying_loses_nothing_and_the_retry_succeeds(
    node, device, function, error
):
    ref = node.claim(1, device)
    node.prepared(ref)
    node.sim.set_fault(function, gpu=0, error=error, times=1)
    problem = node.unprepare(ref)
    if problem is not None:
        assert node.record(ref)["state"] == "unpreparing"
        assert not node.cdi_file(ref).exists()
        assert node.unprepare(ref) is None
    assert is_clean(node)
    node.prepared(ref)


@pytest.mark.fault("F49")
@pytest.mark.parametrize("function", CREATE_CALLS)
def test_a_driver_that_forbids_it_is_an_error_for_good_that_says_so_and_leaves_nothing(
    node, device, function
):
    ref = node.claim(1, device)
    node.sim.set_fault(function, gpu=0, error="NO_PERMISSION")
    error = node.refused(ref)
    assert (error.code, error.retryable) == ("DRA-NVML-NO-PERMISSION", False)
    assert error.remedy
    node.sim.clear()
    assert node.unprepare(ref) is None
    assert is_clean(node)
    node.prepared(ref)


@pytest.mark.parametrize("function", DESTROY_CALLS)
def test_a_half_unprepared_claim_can_be_prepared_again(node, device, function):
    ref = node.claim(1, device)
    first = node.prepared(ref)
    node.sim.set_fault(function, gpu=0, error="UNKNOWN", times=1)
    node.unprepare(ref)
    assert node.prepared(ref) == first
    assert node.partitions() == [device]
    assert node.unprepare(ref) is None
    assert is_clean(node)


def in_use(node, ref, pid=4711) -> None:
    outcome = node.effects(ref)[1]["outcome"]
    node.sim.add_process(0, pid, gi=outcome["gi"], ci=outcome["ci"])


@pytest.mark.fault("F39")
def test_a_partition_in_use_is_destroyed_later_and_nobody_else_gets_its_place(node, device):
    """The claim stays unpreparing; the kubelet hears an error and calls again."""
    ref = node.claim(1, device, name="busy")
    node.prepared(ref)
    in_use(node, ref)
    error = node.unprepare(ref)
    assert error.code == "DRA-MIG-IN-USE"
    assert error.retryable
    assert node.record(ref)["state"] == "unpreparing"
    assert node.partitions() == [device]
    rival = node.refused(node.claim(2, device))
    assert rival.code == "DRA-DEVICE-HELD"
    assert "default/busy" in str(rival)
    node.sim.remove_process(4711)
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.fault("F39")
def test_what_the_kubelet_does_not_finish_is_finished_with_growing_pauses_and_told_once(node, device):
    ref = node.claim(1, device)
    node.prepared(ref)
    in_use(node, ref)
    assert node.unprepare(ref) is not None
    node.restart()
    janitor = node.janitor()
    tries = []
    for _ in range(60):
        node.sim.reset_calls()
        janitor.retry_unprepares()
        if node.sim.count_calls().get("nvmlComputeInstanceDestroy"):
            tries.append(node.now)
        node.now += 5
    pauses = [after - before for before, after in zip(tries, tries[1:], strict=False)]
    assert pauses[:4] == [10, 20, 40, 80]
    assert [notice.reason for notice in node.notices] == ["UnprepareWaiting"]
    assert "in use" in node.notices[0].message
    assert node.notices[0].ref == ref
    node.sim.remove_process(4711)
    node.now += 300
    assert janitor.retry_unprepares() == [ref.uid]
    assert is_clean(node)
    assert node.notices[-1].reason == "UnprepareFinished"


def test_a_mode_that_cannot_be_switched_off_holds_no_device_and_goes_with_the_next_claim(node, device):
    one, two = node.claim(1, device), node.claim(2, node.name(0, "3g.48gb", 0))
    node.prepared(one)
    fault = node.sim.set_fault("nvmlDeviceSetMigMode", gpu=0, error="IN_USE")
    assert node.unprepare(one).code == "DRA-MIG-IN-USE"
    assert node.partitions() == []
    node.prepared(two)
    # The first claim has nothing left to do: the mode is the second's now.
    assert node.unprepare(one) is None
    node.sim.clear(fault)
    assert node.mode(0) == 1
    assert node.unprepare(two) is None
    assert is_clean(node)


# -- the process dies

EFFECTS = 3


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_prepare_killed_anywhere_is_finished_by_the_next(node, device, step):
    ref = node.claim(1, device)
    kill(node, step, node.prepare, ref)
    node.janitor().sweep()
    devices = node.prepared(ref)
    assert node.prepared(ref) == devices
    assert node.partitions() == [device]
    outcome = node.effects(ref)[1]["outcome"]
    assert node.nodes(ref)[device][-2:] == node.capabilities(0, outcome["gi"], outcome["ci"])
    node.check_invariants()
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_prepare_killed_anywhere_is_cleaned_up_by_unprepare_without_the_api(node, device, step):
    ref = node.claim(1, device)
    kill(node, step, node.prepare, ref)
    node.api.hang()
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_prepare_killed_anywhere_whose_claim_is_then_deleted_is_swept(node, device, step):
    ref = node.claim(1, device)
    kill(node, step, node.prepare, ref)
    node.api.delete(ref)
    node.janitor().sweep()
    assert is_clean(node)
    node.prepared(node.claim(2, "gpu-0"))


@pytest.mark.parametrize("step", steps.unprepare_steps(effects=EFFECTS))
def test_an_unprepare_killed_anywhere_is_finished_by_the_next(node, device, step):
    ref = node.claim(1, device)
    node.prepared(ref)
    kill(node, step, node.unprepare, ref)
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.unprepare_steps(effects=EFFECTS))
def test_an_unprepare_killed_anywhere_is_finished_by_the_janitor_alone(node, device, step):
    ref = node.claim(1, device)
    node.prepared(ref)
    kill(node, step, node.unprepare, ref)
    node.api.delete(ref)
    node.janitor().sweep()
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.unprepare_steps(effects=EFFECTS))
def test_an_unprepare_killed_anywhere_does_not_keep_the_claim_from_being_prepared_again(node, device, step):
    ref = node.claim(1, device)
    first = node.prepared(ref)
    kill(node, step, node.unprepare, ref)
    assert node.prepared(ref) == first
    assert node.partitions() == [device]
    assert node.record(ref)["state"] == "prepared"
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.rollback_steps(effects=EFFECTS))
def test_a_rollback_killed_anywhere_leaves_what_unprepare_can_finish(node, device, step):
    ref = node.claim(1, device)
    node.cdi_root.mkdir(exist_ok=True)
    fault = node.sim.set_fault("nvmlGpuInstanceCreateComputeInstance", gpu=0, error="UNKNOWN")
    kill(node, step, node.prepare, ref)
    node.sim.clear(fault)
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_reboot_after_a_kill_is_no_different(node, device, step):
    ref = node.claim(1, device)
    kill(node, step, node.prepare, ref)
    node.reboot(keep_cdi=True)
    node.janitor().sweep()
    node.prepared(ref)
    assert node.partitions() == [device]
    node.check_invariants()
    assert node.unprepare(ref) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_kill_in_the_second_boot_does_not_lose_the_partition_of_the_second_boot(node, device, step):
    """What the record tells of the first boot's partition must not be taken for the second's."""
    ref, other = node.claim(1, device), node.claim(2, node.name(0, "2g.24gb", 0))
    # The first of a profile gets its lowest id: in the second boot that is another one, and so is the UUID.
    node.prepared(other)
    node.prepared(ref)
    node.reboot()
    kill(node, step, node.prepare, ref)
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.unprepare(other) is None
    assert is_clean(node)


@pytest.mark.parametrize("step", ["prepare:effect-applying:1", "prepare:effect-applied:1"])
def test_a_repair_killed_on_the_way_loses_no_partition(node, device, step):
    ref = node.claim(1, device)
    first = node.prepared(ref)
    node.sim.destroy_mig(node.effects(ref)[1]["outcome"]["uuid"])
    # Another takes the ids that the lost one had.
    other = node.sim.create_mig(0, "2g.24gb", 0)
    kill(node, step, node.prepare, ref)
    assert node.prepared(ref) == first
    node.look()
    mine = next(mig for mig in node.inventory.gpus[0].mig_devices if mig.start == 2)
    assert node.effects(ref)[1]["outcome"]["uuid"] == mine.uuid
    assert node.unprepare(ref) is None
    assert node.partitions() == [node.name(0, "2g.24gb", 0)]
    node.sim.destroy_mig(other)


@pytest.mark.parametrize("step", steps.prepare_steps(effects=EFFECTS))
def test_a_second_share_that_dies_anywhere_does_not_take_the_partition_from_the_first(node, device, step):
    one, two = (
        node.claim(n, result(device, shareID=f"{n}" * 8 + "-1111-4111-8111-111111111111")) for n in (1, 2)
    )
    node.prepared(one)
    kill(node, step, node.prepare, two)
    assert node.unprepare(two) is None
    assert node.partitions() == [device]
    node.prepared(one)
    assert node.unprepare(one) is None
    assert is_clean(node)


def test_half_a_partition_that_a_dying_process_left_is_taken_away_by_unprepare(node, device):
    """The process died between the GPU instance and its compute instance."""
    ref = node.claim(1, device)
    kill(node, "prepare:effect-applied:1", node.prepare, ref)
    node.sim._change(lambda state: [i.computes.clear() for gpu in state.gpus for i in gpu.instances])
    record = node.record(ref)
    assert node.partitions() == [f"{device}?"]
    assert record["state"] == "preparing"
    assert node.unprepare(ref) is None
    assert is_clean(node)
