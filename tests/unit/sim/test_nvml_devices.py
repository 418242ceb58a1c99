"""pynvml against the simulated library: what devices say about themselves."""

from __future__ import annotations

import ctypes
import inspect
import os
import uuid

import pynvml
import pytest

from dra.sim.nvml.functions import FUNCTIONS
from dra.sim.profiles import PROFILES


def handles():
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]


def handle_of(slot):
    return pynvml.nvmlDeviceGetHandleByUUID(slot.uuid)


def raises(code):
    return pytest.raises(pynvml.nvmlExceptionClass(code))


def test_nothing_works_before_initialisation_and_everything_stops_after_shutdown(node):
    made = node(initialise=False)
    with raises(pynvml.NVML_ERROR_UNINITIALIZED):
        pynvml.nvmlDeviceGetCount()
    pynvml.nvmlInit()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 8
    pynvml.nvmlShutdown()
    handle = handle_of(made.profile.gpus[0])
    pynvml.nvmlShutdown()
    with raises(pynvml.NVML_ERROR_UNINITIALIZED):
        pynvml.nvmlDeviceGetUUID(handle)


def test_a_handle_is_valid_again_in_the_next_session(node):
    made = node()
    handle = handle_of(made.profile.gpus[0])
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetUUID(handle) == made.profile.gpus[0].uuid


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_machine_says_through_pynvml_what_its_profile_says(node, name):
    profile = node(name).profile
    assert pynvml.nvmlSystemGetDriverVersion() == profile.driver_version
    assert pynvml.nvmlSystemGetNVMLVersion() == profile.nvml_version
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == profile.cuda_version
    assert pynvml.nvmlDeviceGetCount() == len(profile.gpus)
    for index, slot in enumerate(sorted(profile.gpus, key=lambda gpu: gpu.pci_address)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        assert pynvml.nvmlDeviceGetName(handle) == slot.model.name
        assert pynvml.nvmlDeviceGetUUID(handle) == slot.uuid
        assert pynvml.nvmlDeviceGetMinorNumber(handle) == slot.minor
        assert pynvml.nvmlDeviceGetIndex(handle) == index
        assert pynvml.nvmlDeviceGetBrand(handle) == slot.model.brand
        assert pynvml.nvmlDeviceGetArchitecture(handle) == slot.model.architecture
        assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == slot.model.compute_capability
        assert pynvml.nvmlDeviceGetSerial(handle) == slot.serial


def test_the_three_ways_to_a_device_lead_to_the_same_handle(node):
    slot = node("a100-l4").profile.gpus[2]
    found = [
        pynvml.nvmlDeviceGetHandleByIndex(2),
        pynvml.nvmlDeviceGetHandleByUUID(slot.uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId(str(slot.pci_address)),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:B1:00.0"),
        pynvml.nvmlDeviceGetHandleBySerial(slot.serial),
        pynvml.nvmlDeviceGetHandleByUUIDV(slot.uuid.encode(), pynvml.NVML_UUID_TYPE_ASCII),
        pynvml.nvmlDeviceGetHandleByUUIDV(
            uuid.UUID(slot.uuid.removeprefix("GPU-")).bytes, pynvml.NVML_UUID_TYPE_BINARY
        ),
    ]
    assert len({ctypes.cast(handle, ctypes.c_void_p).value for handle in found}) == 1


def test_look_ups_of_what_is_not_there_are_refused(node):
    node("t4-x1")
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlDeviceGetHandleByIndex(1)
    with raises(pynvml.NVML_ERROR_NOT_FOUND):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")
    with raises(pynvml.NVML_ERROR_NOT_FOUND):
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:ff:00.0")
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlDeviceGetHandleByPciBusId("not an address")


def test_the_bus_address_is_spelled_as_nvml_spells_it(node):
    node("gb200")
    info = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(2))
    assert (info.busId, info.domain, info.bus) == ("00000018:01:00.0", 0x18, 1)
    assert info.pciDeviceId == 0x294110DE
    extended = pynvml.nvmlPciInfoExt_v1_t()
    extended.version = pynvml.nvmlPciInfoExt_v1
    pynvml.nvmlDeviceGetPciInfoExt(pynvml.nvmlDeviceGetHandleByIndex(2), ctypes.byref(extended))
    assert (extended.busId, extended.baseClass) == ("00000018:01:00.0", 3)


def test_memory_adds_up_in_both_versions_of_the_call(node):
    made = node("dgx-a100")
    made.control.add_process(0, 4711, memory_bytes=3 << 30)
    handle = handles()[0]
    old = pynvml.nvmlDeviceGetMemoryInfo(handle)
    new = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert old.total == new.total == 40960 << 20
    assert new.used == 3 << 30
    assert old.used == new.used + new.reserved
    assert new.total == new.free + new.used + new.reserved


def test_a_wrong_structure_version_is_refused(node):
    node()
    with raises(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
        pynvml.nvmlDeviceGetMemoryInfo(handles()[0], version=7)


def test_integrated_memory_is_not_reported(node):
    node("dgx-spark")
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetMemoryInfo(handles()[0])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gb200", pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS),
        ("dgx-h100", pynvml.NVML_DEVICE_ADDRESSING_MODE_HMM),
    ],
)
def test_the_addressing_mode_is_the_machines(node, name, mode):
    node(name)
    assert pynvml.nvmlDeviceGetAddressingMode(handles()[0]) == mode


def test_an_old_driver_does_not_export_newer_functions(node):
    node("t4-x1")
    with raises(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        pynvml.nvmlDeviceGetAddressingMode(handles()[0])


def test_what_is_not_simulated_is_a_missing_function(node):
    node()
    with raises(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        pynvml.nvmlUnitGetCount()


def test_error_texts_come_from_the_library(node):
    node()
    assert str(pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)) == "In use by another client"


def test_modes_that_are_set_are_read_back(node):
    node()
    handle = handles()[3]
    pynvml.nvmlDeviceSetComputeMode(handle, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert pynvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert pynvml.nvmlDeviceGetComputeMode(handles()[0]) == pynvml.NVML_COMPUTEMODE_DEFAULT
    pynvml.nvmlDeviceSetPersistenceMode(handle, 0)
    assert pynvml.nvmlDeviceGetPersistenceMode(handle) == 0
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceSetComputeMode(handle, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlDeviceSetComputeMode(handle, 17)


def test_telemetry_says_what_was_set(node):
    made = node()
    made.control.set_gpu(
        1, temperature=71, power_mw=512_000, energy_mj=99, utilization_gpu=88, utilization_memory=40,
        graphics_mhz=1755, pcie_replays=3, clock_reasons=4,
    )  # fmt: skip
    handle = handles()[1]
    assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 71
    assert pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU) == 71
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 512_000
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 99
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    assert (rates.gpu, rates.memory) == (88, 40)
    assert pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 1755
    assert pynvml.nvmlDeviceGetPcieReplayCounter(handle) == 3
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 4
    assert pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN) == 92


def test_memory_errors_are_told_by_kind_and_age(node):
    made = node()
    made.control.set_gpu(0, ecc_uncorrected=2, ecc_uncorrected_total=5, ecc_corrected=7, remap_pending=1)
    handle = handles()[0]
    uncorrected, corrected = 1, 0
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, pynvml.NVML_VOLATILE_ECC) == 2
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, pynvml.NVML_AGGREGATE_ECC) == 7
    assert pynvml.nvmlDeviceGetTotalEccErrors(handle, corrected, pynvml.NVML_VOLATILE_ECC) == 7
    assert pynvml.nvmlDeviceGetRemappedRows(handle) == (0, 0, 1, 0)
    assert pynvml.nvmlDeviceGetEccMode(handle) == [1, 1]


def test_turing_retires_pages_and_ampere_remaps_rows(node):
    made = node("t4-x1")
    made.control.set_gpu(0, retired_double=[0x1000, 0x2000], retired_pending=1)
    handle = handles()[0]
    cause = pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
    assert pynvml.nvmlDeviceGetRetiredPages(handle, cause) == [0x1000, 0x2000]
    assert [page["address"] for page in pynvml.nvmlDeviceGetRetiredPages_v2(handle, cause)] == [
        0x1000,
        0x2000,
    ]
    assert pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle) == 1
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetRemappedRows(handle)


def test_field_values_each_have_a_status_of_their_own(node):
    made = node()
    made.control.set_gpu(0, recovery_action=pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, remap_failed=1)
    wanted = [
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
        pynvml.NVML_FI_DEV_RETIRED_DBE, 100_000,
    ]  # fmt: skip
    values = pynvml.nvmlDeviceGetFieldValues(handles()[0], wanted)
    assert [value.nvmlReturn for value in values] == [
        pynvml.NVML_SUCCESS, pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ]  # fmt: skip
    assert values[0].value.uiVal == pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    assert values[1].value.uiVal == 1


def test_processes_are_listed_by_kind(node):
    made = node()
    made.control.add_process(0, 100, memory_bytes=1 << 30)
    made.control.add_process(0, 101, kind="graphics")
    made.control.add_process(0, 102, kind="mps")
    handle = handles()[0]
    assert [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)] == [100, 102]
    assert [p.pid for p in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)] == [101]
    assert [p.pid for p in pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)] == [102]
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle)[0].usedGpuMemory == 1 << 30
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handles()[1]) == []
    made.control.remove_process(100)
    assert [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)] == [102]


def test_the_name_of_a_process_is_the_simulated_one_or_that_of_a_real_process(node):
    made = node()
    made.control.add_process(0, 4_000_001, name="trainer")
    assert pynvml.nvmlSystemGetProcessName(4_000_001) == "trainer"
    assert pynvml.nvmlSystemGetProcessName(os.getpid())
    with raises(pynvml.NVML_ERROR_NOT_FOUND):
        pynvml.nvmlSystemGetProcessName(4_000_002)


def test_links_of_an_nvswitch_machine_lead_to_switches_and_may_be_down(node):
    made = node()
    made.control.set_gpu(0, nvlinks_down=[17])
    handle = handles()[0]
    assert pynvml.nvmlDeviceGetNvLinkState(handle, 0) == 1
    assert pynvml.nvmlDeviceGetNvLinkState(handle, 17) == 0
    assert pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, 0) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlDeviceGetNvLinkState(handle, 18)


def test_a_board_without_links_says_so(node):
    node("l40s-x4")
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetNvLinkState(handles()[0], 0)


def test_the_fabric_of_a_gb200_tray_has_a_cluster_and_a_clique(node):
    profile = node("gb200").profile
    info = pynvml.c_nvmlGpuFabricInfo_v3_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handles()[0], ctypes.byref(info))
    assert str(uuid.UUID(bytes=bytes(info.clusterUuid))) == profile.fabric_cluster
    assert (info.cliqueId, info.state) == (profile.fabric_clique, pynvml.NVML_GPU_FABRIC_STATE_COMPLETED)
    assert info.healthSummary == pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY


def test_a_structure_in_place_of_its_address_is_no_argument(node):
    """A compiled library would take its first words for an address, and the process would end there and then."""
    node("gb200")
    with pytest.raises(TypeError, match=r"by value; use byref\(\)"):
        pynvml.nvmlDeviceGetGpuFabricInfoV(handles()[0], pynvml.c_nvmlGpuFabricInfo_v3_t())


def test_topology_follows_the_pci_tree(node):
    node("dgx-a100")
    gpus = handles()
    assert pynvml.nvmlDeviceGetTopologyCommonAncestor(gpus[0], gpus[1]) == pynvml.NVML_TOPOLOGY_SINGLE
    assert pynvml.nvmlDeviceGetTopologyCommonAncestor(gpus[0], gpus[2]) == pynvml.NVML_TOPOLOGY_SYSTEM


def test_each_simulated_function_takes_the_arguments_pynvml_passes():
    """Every entry has a body that takes a library, a subject, and as many arguments as the C prototype."""
    source = inspect.getsource(pynvml)
    for name, function in FUNCTIONS.items():
        parameters = list(inspect.signature(function.body).parameters)
        assert len(parameters) >= 2, name
        if name in ("nvmlInit_v2", "nvmlEventSetWait", "nvmlDeviceGetAttributes"):
            continue  # exported by the library, not used by this pynvml
        assert f'"{name}"' in source, name
