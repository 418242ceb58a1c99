"""MIG on the simulated library: tables, enumeration, creation, destruction."""

from __future__ import annotations

import ctypes
import itertools

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.sim.nvml.mig_tables import MIG_TABLES, compute_profiles, mig_table, overlaps

MIB = 1 << 20


def raises(code):
    return pytest.raises(pynvml.nvmlExceptionClass(code))


def placements(handle, profile_id):
    count = ctypes.c_uint(16)
    array = (pynvml.c_nvmlGpuInstancePlacement_t * 16)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, array, ctypes.byref(count))
    return [(array[i].start, array[i].size) for i in range(count.value)]


def place(start, size):
    placement = pynvml.c_nvmlGpuInstancePlacement_t()
    placement.start, placement.size = start, size
    return ctypes.byref(placement)


def create(handle, profile_id, start, size, *, compute=0):
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile_id, place(start, size))
    return instance, pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute)


def mig_devices(handle):
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_NOT_FOUND):
            continue
    return found


@pytest.fixture
def a100(node):
    made = node("dgx-a100")
    made.control.set_mig_mode(0, enabled=True)
    return made, pynvml.nvmlDeviceGetHandleByIndex(0)


def test_the_profiles_of_an_a100_are_those_published_for_driver_580(a100):
    _, handle = a100
    found = {}
    for kind in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind)
        except pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_NOT_SUPPORTED):
            continue
        found[info.name] = (info.id, info.memorySizeMB, info.multiprocessorCount, placements(handle, info.id))
    eighth, quarter = [(s, 1) for s in range(7)], [(s, 2) for s in (0, 2, 4, 6)]
    assert found == {
        "MIG 1g.5gb": (19, 4864, 14, eighth),
        "MIG 1g.5gb+me": (20, 4864, 14, eighth),
        "MIG 1g.10gb": (15, 9984, 14, quarter),
        "MIG 2g.10gb": (14, 9984, 28, quarter[:3]),
        "MIG 3g.20gb": (9, 20096, 42, [(0, 4), (4, 4)]),
        "MIG 4g.20gb": (5, 20096, 56, [(0, 4)]),
        "MIG 7g.40gb": (0, 40320, 98, [(0, 8)]),
    }
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)


def test_an_older_driver_reports_the_memory_of_the_mig_guide():
    assert mig_table("a100-40gb", "535.104.05").by_name("7g.40gb").memory_mib == 40192
    assert mig_table("a100-40gb", "580.95.05").by_name("7g.40gb").memory_mib == 40320


def test_a_gpu_without_mig_says_that_it_is_not_supported(node):
    node("l40s-x4")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetMigMode(handle)
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 0


def test_devices_made_by_hand_are_enumerated_with_all_they_are(node):
    made = node("dgx-a100")
    uuids = made.control.set_mig_layout(0, [("1g.5gb", 0), ("1g.5gb", 1), ("3g.20gb", 4)])
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    devices = mig_devices(handle)
    assert [pynvml.nvmlDeviceGetUUID(device) for device in devices] == uuids
    # The ids of the recorded node: 1g get 7 and 8.
    assert [pynvml.nvmlDeviceGetGpuInstanceId(device) for device in devices] == [7, 8, 1]
    assert pynvml.nvmlDeviceGetName(devices[2]) == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    assert pynvml.nvmlDeviceGetMemoryInfo(devices[2]).total == 20096 * MIB
    attributes = pynvml.nvmlDeviceGetAttributes_v2(devices[2])
    assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (42, 20096)
    assert (attributes.gpuInstanceSliceCount, attributes.sharedDecoderCount) == (3, 2)
    info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(handle, 1))
    assert (info.profileId, info.placement.start, info.placement.size) == (9, 4, 4)
    assert pynvml.nvmlDeviceGetUUID(info.device) == made.profile.gpus[0].uuid
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(devices[0])
    assert pynvml.nvmlDeviceGetUUID(parent) == made.profile.gpus[0].uuid
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuids[1])) == uuids[1]
    assert pynvml.nvmlDeviceIsMigDeviceHandle(devices[0]).value == 1
    assert pynvml.nvmlDeviceIsMigDeviceHandle(handle).value == 0


def test_a_mig_handle_is_refused_where_only_a_gpu_fits(node):
    node("dgx-a100").control.set_mig_layout(0, [("1g.5gb", 0)])
    device = mig_devices(pynvml.nvmlDeviceGetHandleByIndex(0))[0]
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetPciInfo(device)


def test_an_impossible_layout_changes_nothing(node):
    made = node("dgx-a100")
    before = made.control.set_mig_layout(0, [("1g.5gb", 0)])
    with pytest.raises(Exception, match="23"):
        made.control.set_mig_layout(0, [("4g.20gb", 0), ("3g.20gb", 0)])
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert [pynvml.nvmlDeviceGetUUID(device) for device in mig_devices(handle)] == before


def test_creation_at_an_exact_placement_and_destruction_leave_no_trace(a100):
    made, handle = a100
    instance, compute = create(handle, 14, 2, 2, compute=1)
    info = pynvml.nvmlComputeInstanceGetInfo(compute)
    uuid = pynvml.nvmlDeviceGetUUID(info.device)
    assert uuid.startswith("MIG-")
    access = made.root / "proc/driver/nvidia/capabilities/gpu0/mig/gi3/ci0/access"
    assert "DeviceFileMinor: 31" in access.read_text()
    with raises(pynvml.NVML_ERROR_IN_USE):
        pynvml.nvmlGpuInstanceDestroy(instance)
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert mig_devices(handle) == []
    assert not access.exists()
    with raises(pynvml.NVML_ERROR_NOT_FOUND):
        pynvml.nvmlGpuInstanceGetInfo(instance)


def test_the_same_ids_on_the_same_gpu_give_the_same_uuid_and_another_handle(a100):
    _, handle = a100
    first, compute = create(handle, 19, 0, 1)
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlComputeInstanceGetInfo(compute).device)
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(first)
    _, again = create(handle, 19, 0, 1)
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlComputeInstanceGetInfo(again).device) == uuid
    with raises(pynvml.NVML_ERROR_NOT_FOUND):
        pynvml.nvmlGpuInstanceGetInfo(first)


def test_a_taken_placement_is_insufficient_resources_and_a_wrong_one_invalid(a100):
    _, handle = a100
    create(handle, 9, 0, 4, compute=2)
    with raises(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES):
        create(handle, 19, 3, 1)
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        create(handle, 14, 1, 2)
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        create(handle, 77, 0, 1)


def test_seven_compute_slices_are_the_end_even_with_a_memory_slice_left(a100):
    _, handle = a100
    create(handle, 5, 0, 4, compute=3)
    create(handle, 9, 4, 4, compute=2)
    with raises(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES):
        pynvml.nvmlDeviceCreateGpuInstance(handle, 19)


def test_two_halves_leave_no_place_for_a_slice_although_one_multiprocessor_group_is_idle(a100):
    _, handle = a100
    for _ in range(2):
        pynvml.nvmlDeviceCreateGpuInstance(handle, 9)
    assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, 19) == 0


def test_only_one_instance_has_the_media_engines(a100):
    _, handle = a100
    create(handle, 20, 0, 1)
    with raises(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES):
        create(handle, 20, 1, 1)


def test_the_second_whole_compute_profile_is_listed_and_refused(a100):
    _, handle = a100
    instance = pynvml.nvmlDeviceCreateGpuInstance(handle, 0)
    plain = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 4, 0)
    linked = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, 8, 0)
    assert plain.name == linked.name == "MIG 7g.40gb"
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 8)
    pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 4)


def test_compute_instances_divide_a_gpu_instance(a100):
    _, handle = a100
    instance = pynvml.nvmlDeviceCreateGpuInstance(handle, 9)
    parts = [pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0) for _ in range(3)]
    assert [pynvml.nvmlComputeInstanceGetInfo(part).placement.start for part in parts] == [0, 1, 2]
    with raises(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    count = ctypes.c_uint(8)
    array = (pynvml.c_nvmlComputeInstance_t * 8)()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, 0, array, ctypes.byref(count))
    assert [pynvml.nvmlComputeInstanceGetInfo(array[i]).id for i in range(count.value)] == [0, 1, 2]
    assert len(mig_devices(handle)) == 3


def test_gpu_instances_are_listed_by_profile(a100):
    _, handle = a100
    for start in (0, 2):
        create(handle, 19, start, 1)
    count = ctypes.c_uint(8)
    array = (pynvml.c_nvmlGpuInstance_t * 8)()
    pynvml.nvmlDeviceGetGpuInstances(handle, 19, array, ctypes.byref(count))
    starts = [pynvml.nvmlGpuInstanceGetInfo(array[i]).placement.start for i in range(count.value)]
    assert starts == [0, 2]


def test_a_busy_device_is_not_destroyed(a100):
    made, handle = a100
    _, compute = create(handle, 19, 0, 1)
    made.control.add_process(0, 500, gi=7, ci=0)
    with raises(pynvml.NVML_ERROR_IN_USE):
        pynvml.nvmlComputeInstanceDestroy(compute)
    device = mig_devices(handle)[0]
    assert [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)] == [500]
    made.control.remove_process(500)
    pynvml.nvmlComputeInstanceDestroy(compute)


def test_the_mode_of_an_ampere_in_use_waits_for_a_reset(node):
    made = node("dgx-a100")
    made.control.add_process(0, 500)
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 1]
    made.control.reboot()
    assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]


def test_a_hopper_switches_at_once_and_not_under_a_process(node):
    made = node("dgx-h100")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    made.control.add_process(0, 500)
    with raises(pynvml.NVML_ERROR_IN_USE):
        pynvml.nvmlDeviceSetMigMode(handle, 1)
    made.control.remove_process(500)
    assert pynvml.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]
    create(handle, 19, 0, 1)
    with raises(pynvml.NVML_ERROR_IN_USE):
        pynvml.nvmlDeviceSetMigMode(handle, 0)


def test_creation_needs_mig_mode(node):
    node("dgx-h100")
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceCreateGpuInstance(pynvml.nvmlDeviceGetHandleByIndex(0), 19)


def test_utilisation_of_a_gpu_in_mig_mode_is_not_told(a100):
    _, handle = a100
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetUtilizationRates(handle)


@pytest.mark.parametrize("name", sorted(MIG_TABLES))
def test_a_table_is_consistent(name):
    table = MIG_TABLES[name]
    whole = max(table.profiles, key=lambda profile: profile.slices)
    assert len({profile.kind for profile in table.profiles}) == len(table.profiles)
    assert len({profile.profile_id for profile in table.profiles}) == len(table.profiles)
    for profile in table.profiles:
        assert all(start + profile.size <= table.memory_slices for start in profile.starts)
        assert profile.memory_mib <= whole.memory_mib
        parts = compute_profiles(table, profile)
        assert max(part.slices for part in parts) == profile.slices
        assert all(part.multiprocessors <= profile.multiprocessors for part in parts)
        assert len(table.instance_ids(profile)) >= profile.limit


@given(order=st.permutations(list(itertools.product((19, 15, 14, 9, 5), range(8)))))
@settings(max_examples=30)
def test_no_order_of_creation_makes_instances_overlap(order):
    from dra.sim.nvml.functions.mig_changes import add_gpu_instance
    from dra.sim.nvml.memory import Status
    from dra.sim.nvml.state import first_state
    from dra.sim.profiles import PROFILES

    profile = PROFILES["dgx-a100"]
    state = first_state(profile, salt="", layout="host")
    gpu = state.gpus[0]
    gpu.mig_current = 1
    table = mig_table("a100-40gb", "580.95.05")
    for profile_id, start in order:
        size = table.by_id(profile_id).size
        try:
            add_gpu_instance(state, table, gpu.uuid, profile_id=profile_id, place=(start, size))
        except Status as status:
            assert status.code in (
                pynvml.NVML_ERROR_INVALID_ARGUMENT,
                pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES,
            )
    places = [(instance.start, instance.size) for instance in gpu.instances]
    for position, (start, size) in enumerate(places):
        assert not overlaps(start, size, places[:position])
    assert sum(table.by_id(instance.profile_id).slices for instance in gpu.instances) <= 7
    assert len({instance.gi for instance in gpu.instances}) == len(places)
    assert places
