"""Faults and events, switched on from here while other threads and processes are in NVML."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pynvml
import pytest

from dra.host.kernel_log import parse_record
from dra.sim.node import SimulatedNode
from dra.sim.nvml.control import DriverInUseError, SimControl


def raises(code):
    return pytest.raises(pynvml.nvmlExceptionClass(code))


class Caller(threading.Thread):
    """Runs one call in a thread and keeps what became of it."""

    def __init__(self, call, *arguments):
        super().__init__(daemon=True)
        self.call, self.arguments = call, arguments
        self.result = self.error = None
        self.start()

    def run(self):
        try:
            self.result = self.call(*self.arguments)
        except pynvml.NVMLError as error:
            self.error = error.value

    def finish(self):
        self.join(10)
        assert not self.is_alive()
        return self


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_one_gpu_fails_and_the_other_seven_answer(node):
    made = node()
    made.control.set_fault("nvmlDeviceGetHandleByIndex_v2", gpu=3, error="GPU_IS_LOST")
    answers = []
    for index in range(8):
        try:
            pynvml.nvmlDeviceGetHandleByIndex(index)
            answers.append("ok")
        except pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_GPU_IS_LOST):
            answers.append("lost")
    assert answers == ["ok"] * 3 + ["lost"] + ["ok"] * 4
    made.control.clear()
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(3)) == made.profile.gpus[3].uuid


@pytest.mark.parametrize(
    "error", ["UNKNOWN", "IN_USE", "NOT_SUPPORTED", "INSUFFICIENT_RESOURCES", "NO_PERMISSION", "TIMEOUT"]
)
def test_any_status_can_be_asked_for_by_name(node, error):
    made = node()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    made.control.set_fault("nvmlDeviceGetName", error=error)
    with raises(getattr(pynvml, f"NVML_ERROR_{error}")):
        pynvml.nvmlDeviceGetName(handle)


def test_a_fault_may_last_for_some_calls_only(node):
    made = node()
    made.control.set_fault("nvmlDeviceGetCount_v2", error="UNKNOWN", times=2)
    for _ in range(2):
        with raises(pynvml.NVML_ERROR_UNKNOWN):
            pynvml.nvmlDeviceGetCount()
    assert pynvml.nvmlDeviceGetCount() == 8


def test_a_pattern_covers_many_functions_and_a_uuid_names_one_gpu(node):
    made = node()
    slot = made.profile.gpus[5]
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(8)]
    made.control.set_fault("nvmlDeviceGet*", gpu=slot.uuid, error="UNKNOWN")
    with raises(pynvml.NVML_ERROR_UNKNOWN):
        pynvml.nvmlDeviceGetMemoryInfo(handles[5])
    with raises(pynvml.NVML_ERROR_UNKNOWN):
        pynvml.nvmlDeviceGetHandleByPciBusId(str(slot.pci_address))
    assert pynvml.nvmlDeviceGetMemoryInfo(handles[4]).total
    assert pynvml.nvmlDeviceGetCount() == 8


def test_a_fault_about_a_mig_device_is_a_fault_of_its_gpu(node):
    made = node("dgx-a100")
    made.control.set_mig_layout(1, [("1g.5gb", 0)])
    device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(pynvml.nvmlDeviceGetHandleByIndex(1), 0)
    made.control.set_fault("nvmlDeviceGetUUID", gpu=1, error="UNKNOWN")
    with raises(pynvml.NVML_ERROR_UNKNOWN):
        pynvml.nvmlDeviceGetUUID(device)


def test_a_senseless_fault_is_refused(node):
    made = node()
    with pytest.raises(ValueError, match="NO_SUCH"):
        made.control.set_fault("nvmlInit*", error="NO_SUCH")
    with pytest.raises(ValueError, match="needs"):
        made.control.set_fault("nvmlInit*")
    with pytest.raises(ValueError, match="no GPU 42"):
        made.control.set_fault("nvmlInit*", gpu=42, error="UNKNOWN")


def test_a_hanging_call_holds_up_nobody_else_and_goes_on_when_released(node):
    made = node()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
    fault = made.control.set_fault("nvmlDeviceGetName", gpu=0, hang=True)
    stuck = Caller(pynvml.nvmlDeviceGetName, handles[0])
    wait_until(lambda: made.control.count_calls().get("nvmlDeviceGetName") == 1)
    assert pynvml.nvmlDeviceGetName(handles[1]) == "NVIDIA H100 80GB HBM3"
    made.control.set_gpu(1, temperature=50)
    assert pynvml.nvmlDeviceGetTemperature(handles[1], 0) == 50
    assert stuck.is_alive()
    made.control.clear(fault)
    assert stuck.finish().result == "NVIDIA H100 80GB HBM3"


def test_a_hang_for_one_call_only_lets_the_next_one_through(node):
    made = node()
    fault = made.control.set_fault("nvmlDeviceGetCount_v2", hang=True, error="UNKNOWN", times=1)
    stuck = Caller(pynvml.nvmlDeviceGetCount)
    wait_until(lambda: made.control.state.faults[0].times == 0)
    assert pynvml.nvmlDeviceGetCount() == 8
    assert stuck.is_alive()
    made.control.clear(fault)
    assert stuck.finish().error == pynvml.NVML_ERROR_UNKNOWN


def test_a_slow_call_takes_its_time(node):
    made = node()
    made.control.set_fault("nvmlDeviceGetCount_v2", delay_seconds=0.2)
    began = time.monotonic()
    assert pynvml.nvmlDeviceGetCount() == 8
    assert time.monotonic() - began >= 0.19


def test_another_process_can_switch_a_fault_on(node):
    made = node()
    script = (
        "import sys, pathlib; from dra.sim.nvml.control import SimControl;"
        "SimControl(pathlib.Path(sys.argv[1])).set_fault('nvmlDeviceGetCount_v2', error='UNKNOWN')"
    )
    subprocess.run([sys.executable, "-c", script, made.root], check=True)
    with raises(pynvml.NVML_ERROR_UNKNOWN):
        pynvml.nvmlDeviceGetCount()


def test_calls_of_a_killed_process_are_counted_and_its_session_is_not(node):
    made = node(initialise=False)
    script = (
        "import os, sys, pathlib, pynvml; from dra.sim.node import SimulatedNode;"
        "pynvml.nvmlLib = SimulatedNode('dgx-h100', pathlib.Path(sys.argv[1])).library();"
        "pynvml.nvmlInit(); pynvml.nvmlDeviceGetCount(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, made.root], check=False).returncode == -9
    assert made.control.count_calls() == {"nvmlInitWithFlags": 1, "nvmlDeviceGetCount_v2": 1}
    assert made.control.open_sessions() == 0


def test_counting_starts_again_where_it_is_told(node):
    made = node()
    pynvml.nvmlDeviceGetCount()
    made.control.reset_calls()
    pynvml.nvmlDeviceGetCount()
    assert made.control.count_calls() == {"nvmlDeviceGetCount_v2": 1}


def test_no_module_means_no_initialisation_until_it_is_loaded(node):
    made = node(initialise=False)
    made.control.unload_driver()
    with raises(pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        pynvml.nvmlInit()
    made.control.load_driver()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8


def test_the_module_cannot_be_unloaded_under_an_open_session(node):
    made = node()
    with pytest.raises(DriverInUseError):
        made.control.unload_driver()
    pynvml.nvmlShutdown()
    made.control.unload_driver()


def test_new_files_beside_an_old_module_are_a_version_mismatch(node, use_library):
    made = node()
    made.control.upgrade_driver("590.44.01", module=False)
    assert pynvml.nvmlDeviceGetCount() == 8  # the old library is still mapped
    use_library(made.library())
    with raises(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
        pynvml.nvmlInit()


def test_a_library_that_was_loaded_before_the_upgrade_no_longer_fits(node, use_library):
    made = node()
    made.control.upgrade_driver("590.44.01")
    with raises(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
        pynvml.nvmlDeviceGetCount()
    use_library(made.library())
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetDriverVersion() == "590.44.01"
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13010


def test_a_missing_library_cannot_be_loaded_and_comes_back_as_another_object(node):
    made = node(initialise=False)
    before = made.library()
    assert made.library() is before
    made.control.remove_library()
    with pytest.raises(OSError, match=r"libnvidia-ml\.so\.1"):
        made.library()
    assert not (made.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").exists()
    made.control.install_library("590.44.01")
    assert made.library() is not before
    assert (made.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").exists()


def test_a_lost_gpu_answers_nothing_until_it_is_recovered(node):
    made = node()
    handle = pynvml.nvmlDeviceGetHandleByIndex(2)
    made.control.lose_gpu(2)
    for call in (pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetMemoryInfo):
        with raises(pynvml.NVML_ERROR_GPU_IS_LOST):
            call(handle)
    with raises(pynvml.NVML_ERROR_GPU_IS_LOST):
        pynvml.nvmlDeviceGetHandleByIndex(2)
    assert pynvml.nvmlDeviceGetCount() == 8
    made.control.recover_gpu(2)
    assert pynvml.nvmlDeviceGetUUID(handle) == made.profile.gpus[2].uuid


def test_hot_plug_is_seen_at_the_next_initialisation(node):
    made = node()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    made.control.remove_gpu(0)
    assert pynvml.nvmlDeviceGetCount() == 8
    with raises(pynvml.NVML_ERROR_GPU_IS_LOST):
        pynvml.nvmlDeviceGetUUID(handle)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 7
    first = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMinorNumber(first) == 1
    assert pynvml.nvmlDeviceGetIndex(first) == 0
    made.control.add_gpu(0)
    assert pynvml.nvmlDeviceGetCount() == 7


def test_a_node_without_gpus_initialises_only_when_told_that_this_is_fine(node):
    made = node("t4-x1", initialise=False)
    made.control.remove_gpu(0)
    with raises(pynvml.NVML_ERROR_NOT_FOUND):
        pynvml.nvmlInit()
    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    assert pynvml.nvmlDeviceGetCount() == 0


def test_the_first_handle_of_a_sleeping_gpu_wakes_it(node):
    made = node()
    for minor in range(8):
        made.control.set_gpu(minor, persistence=False)
    made.control.add_process(6, 77)  # in use: awake
    pynvml.nvmlDeviceGetCount()
    assert made.control.count_wake_ups() == 0
    pynvml.nvmlDeviceGetHandleByPciBusId(str(made.profile.gpus[4].pci_address))
    pynvml.nvmlDeviceGetHandleByPciBusId(str(made.profile.gpus[4].pci_address))
    pynvml.nvmlDeviceGetHandleByPciBusId(str(made.profile.gpus[6].pci_address))
    assert made.control.count_wake_ups() == 1
    # By UUID the GPUs before it are asked as well.
    pynvml.nvmlDeviceGetHandleByUUID(made.profile.gpus[2].uuid)
    assert made.control.count_wake_ups() == 4


# Events


def event_set(*indexes, mask=pynvml.nvmlEventTypeXidCriticalError):
    events = pynvml.nvmlEventSetCreate()
    for index in indexes:
        pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(index), mask, events)
    return events


def test_an_xid_names_the_gpu_and_the_number_and_is_told_once(node):
    made = node()
    events = event_set(0, 1)
    made.control.push_xid(1, 48)
    told = pynvml.nvmlEventSetWait_v2(events, 1000)
    assert (told.eventType, told.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 48)
    assert pynvml.nvmlDeviceGetUUID(told.device) == made.profile.gpus[1].uuid
    assert told.gpuInstanceId == 0xFFFFFFFF
    with raises(pynvml.NVML_ERROR_TIMEOUT):
        pynvml.nvmlEventSetWait_v2(events, 1)


def test_an_xid_of_a_mig_device_carries_its_ids(node):
    made = node()
    events = event_set(0)
    made.control.push_xid(0, 13, gi=7, ci=0)
    told = pynvml.nvmlEventSetWait_v2(events, 1000)
    assert (told.gpuInstanceId, told.computeInstanceId) == (7, 0)


def test_events_keep_their_order_and_those_before_registration_are_not_told(node):
    made = node()
    made.control.push_xid(0, 1)
    events = event_set(0)
    for xid in (31, 43, 79):
        made.control.push_xid(0, xid)
    assert [pynvml.nvmlEventSetWait_v2(events, 100).eventData for _ in range(3)] == [31, 43, 79]


def test_every_event_set_is_told(node):
    made = node()
    sets = [event_set(0), event_set(0)]
    made.control.push_xid(0, 63)
    assert [pynvml.nvmlEventSetWait_v2(events, 100).eventData for events in sets] == [63, 63]


def test_events_of_other_gpus_and_types_are_not_told(node):
    made = node()
    events = event_set(0)
    made.control.push_xid(1, 63)
    made.control.push_event(0, pynvml.nvmlEventTypeSingleBitEccError, 1)
    with raises(pynvml.NVML_ERROR_TIMEOUT):
        pynvml.nvmlEventSetWait_v2(events, 1)


def test_a_waiting_thread_wakes_at_once(node):
    made = node()
    events = event_set(0)
    waiting = Caller(pynvml.nvmlEventSetWait_v2, events, 60_000)
    wait_until(lambda: made.control.count_calls().get("nvmlEventSetWait_v2") == 1)
    began = time.monotonic()
    SimControl(made.root).push_xid(0, 94)
    assert waiting.finish().result.eventData == 94
    assert time.monotonic() - began < 30


def test_a_wait_burns_no_processor_time(node):
    node()
    events = event_set(0)
    before = time.thread_time()
    with raises(pynvml.NVML_ERROR_TIMEOUT):
        pynvml.nvmlEventSetWait_v2(events, 300)
    assert time.thread_time() - before < 0.5


def test_the_timeout_is_honoured(node):
    node()
    events = event_set(0)
    began = time.monotonic()
    with raises(pynvml.NVML_ERROR_TIMEOUT):
        pynvml.nvmlEventSetWait_v2(events, 150)
    assert 0.14 <= time.monotonic() - began < 30


def test_a_gpu_that_is_lost_ends_the_wait_after_its_xid(node):
    made = node()
    events = event_set(0, 1)
    made.control.lose_gpu(1)
    assert pynvml.nvmlEventSetWait_v2(events, 1000).eventData == 79
    with raises(pynvml.NVML_ERROR_GPU_IS_LOST):
        pynvml.nvmlEventSetWait_v2(events, 1000)


def test_shutting_down_ends_a_wait(node):
    made = node()
    events = event_set(0)
    waiting = Caller(pynvml.nvmlEventSetWait_v2, events, 60_000)
    wait_until(lambda: made.control.count_calls().get("nvmlEventSetWait_v2") == 1)
    pynvml.nvmlShutdown()
    assert waiting.finish().error == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_freed_set_is_no_set(node):
    node()
    events = event_set(0)
    pynvml.nvmlEventSetFree(events)
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlEventSetWait_v2(events, 1)


def test_types_the_gpu_does_not_have_are_refused(node):
    node()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        event_set(0, mask=1 << 40)


# Health


def test_an_xid_is_an_event_a_line_in_the_kernel_log_and_a_recovery_action(tmp_path):
    made = SimulatedNode("dgx-h100", tmp_path / "health", real_nodes=False)
    control, slot = made.control, made.profile.gpus[3]
    log = made.root / "dev/kmsg"
    assert log.read_text() == ""
    control.push_xid(slot.minor, 119)
    control.push_xid(slot.minor, 31, gi=3, ci=0, times=2, sources=("kernel log",))
    found = [parse_record(line) for line in log.read_text().splitlines()]
    assert [(each.address, each.xid, each.gi, each.ci) for each in found] == [
        (slot.pci_address, 119, None, None), *[(slot.pci_address, 31, 3, 0)] * 2,
    ]  # fmt: skip
    assert [event.data for event in control.state.events] == [119]
    assert control.state.gpu(slot.uuid).recovery_action == 1
    control.recover_gpu(slot.minor)
    assert control.state.gpu(slot.uuid).recovery_action == 0


def test_a_reset_clears_what_waits_for_it_and_keeps_what_is_for_ever(tmp_path):
    made = SimulatedNode("dgx-h100", tmp_path / "reset", real_nodes=False)
    control, uuid = made.control, made.profile.gpus[0].uuid
    control.add_ecc_errors(0, 3)
    control.set_mig_layout(0, [("1g.10gb", 0)])
    gpu = control.state.gpu(uuid)
    assert (gpu.ecc_uncorrected, gpu.remap_pending, gpu.recovery_action) == (3, 1, 4)
    control.recover_gpu(0)
    gpu = control.state.gpu(uuid)
    assert (gpu.ecc_uncorrected, gpu.ecc_uncorrected_total, gpu.remap_pending, gpu.recovery_action) == (
        0,
        3,
        0,
        0,
    )
    assert (gpu.instances, gpu.mig_current) == ([], 1)
