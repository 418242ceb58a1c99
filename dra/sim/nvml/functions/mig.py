"""MIG, reading: modes, profiles, placements, instances, MIG devices."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.memory import Status, check_version, fill, number, point, put, put_handle, store, target
from dra.sim.nvml.mig_tables import (
    ComputeInstanceProfile,
    GpuInstanceProfile,
    MigTable,
    compute_profiles,
    overlaps,
)
from dra.sim.nvml.registry import Subject, also_as, nvml
from dra.sim.nvml.state import ComputeInstance, GpuInstance, GpuState

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

    GpuInstanceRef = tuple[Device, GpuInstance]
    ComputeInstanceRef = tuple[Device, GpuInstance, ComputeInstance]

# As many profiles this NVML knows; a higher number is an invalid argument, a lower one it does not offer is
# not supported.
_KINDS = pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT
_COMPUTE_KINDS = pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT


@nvml()
def nvmlDeviceGetMigMode(lib: SimulatedNvml, device: Device, current: Any, pending: Any) -> None:
    """Give the MIG mode now and after a reset."""
    lib.table(device)
    put(current, device.gpu.mig_current)
    put(pending, device.gpu.mig_pending)


@nvml()
def nvmlDeviceGetMaxMigDeviceCount(lib: SimulatedNvml, device: Device, count: Any) -> None:
    """Give how many MIG devices the GPU can have; 0 without MIG."""
    put(count, lib.table(device).slices if device.model.mig_table else 0)


@nvml()
def nvmlDeviceGetMigDeviceHandleByIndex(lib: SimulatedNvml, device: Device, index: Any, handle: Any) -> None:
    """Give a MIG device by its index; places may be empty."""
    table = lib.table(device)
    wanted = number(index)
    if not 0 <= wanted < table.slices:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for instance in device.gpu.instances:
        for compute in instance.computes:
            if compute.index == wanted:
                return put_handle(handle, lib.handle("mig", device.gpu.uuid, instance.serial, compute.serial))
    raise Status(pynvml.NVML_ERROR_NOT_FOUND)


@nvml(mig=True)
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(lib: SimulatedNvml, device: Device, handle: Any) -> None:
    """Give the GPU of a MIG device."""
    _only_mig(device)
    put_handle(handle, lib.handle("gpu", device.gpu.uuid))


@nvml(mig=True)
def nvmlDeviceIsMigDeviceHandle(lib: SimulatedNvml, device: Device, answer: Any) -> None:
    """Say whether a handle is a MIG device's."""
    put(answer, int(device.instance is not None))


@nvml(mig=True)
def nvmlDeviceGetGpuInstanceId(lib: SimulatedNvml, device: Device, answer: Any) -> None:
    """Give the id of a MIG device's GPU instance."""
    put(answer, _only_mig(device)[0].gi)


@nvml(mig=True)
def nvmlDeviceGetComputeInstanceId(lib: SimulatedNvml, device: Device, answer: Any) -> None:
    """Give the id of a MIG device's compute instance."""
    put(answer, _only_mig(device)[1].ci)


@also_as("nvmlDeviceGetAttributes")
@nvml(mig=True)
def nvmlDeviceGetAttributes_v2(lib: SimulatedNvml, device: Device, attributes: Any) -> None:
    """Give the size of a MIG device."""
    instance, compute = _only_mig(device)
    table = lib.table(device)
    profile = gpu_profile(table, instance.profile_id)
    part = compute_profile(table, profile, compute.profile_id)
    fill(
        target(attributes),
        multiprocessorCount=part.multiprocessors,
        sharedCopyEngineCount=profile.copy_engines,
        sharedDecoderCount=profile.decoders,
        sharedEncoderCount=0,
        sharedJpegCount=profile.jpeg_engines,
        sharedOfaCount=profile.ofa_engines,
        gpuInstanceSliceCount=profile.slices,
        computeInstanceSliceCount=part.slices,
        memorySizeMB=profile.memory_mib,
    )


# Profiles and placements


@nvml()
def nvmlDeviceGetGpuInstanceProfileInfo(lib: SimulatedNvml, device: Device, kind: Any, info: Any) -> None:
    """Give a profile by its number of enumeration."""
    fill(target(info), **_profile_values(_offered(lib, device, number(kind))))


@nvml(since=520)
def nvmlDeviceGetGpuInstanceProfileInfoV(lib: SimulatedNvml, device: Device, kind: Any, info: Any) -> None:
    """Give a profile with its name."""
    structure = target(info)
    check_version(structure, pynvml.nvmlGpuInstanceProfileInfo_v2)
    profile = _offered(lib, device, number(kind))
    fill(structure, **_profile_values(profile), name=f"MIG {profile.name}")


@nvml(since=580)
def nvmlDeviceGetGpuInstanceProfileInfoByIdV(
    lib: SimulatedNvml, device: Device, wanted: Any, info: Any
) -> None:
    """Give a profile by its id, with its name."""
    structure = target(info)
    check_version(structure, pynvml.nvmlGpuInstanceProfileInfo_v2)
    profile = lib.table(device).by_id(number(wanted))
    if profile is None:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    fill(structure, **_profile_values(profile), name=f"MIG {profile.name}")


@nvml()
def nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    lib: SimulatedNvml, device: Device, wanted: Any, placements: Any, count: Any
) -> None:
    """Give where instances of a profile may lie, taken places included."""
    profile = _profile_by_id(lib, device, number(wanted))
    target(count).value = len(profile.starts)
    if placements is not None:
        store(placements, [partial(fill, start=start, size=profile.size) for start in profile.starts])


@nvml()
def nvmlDeviceGetGpuInstanceRemainingCapacity(
    lib: SimulatedNvml, device: Device, wanted: Any, count: Any
) -> None:
    """Give how many more instances of a profile fit, one at a time."""
    profile = _profile_by_id(lib, device, number(wanted))
    _only_in_mig_mode(device)
    put(count, len(free_starts(lib.table(device), device.gpu, profile)))


# Instances


@nvml()
def nvmlDeviceGetGpuInstances(
    lib: SimulatedNvml, device: Device, wanted: Any, instances: Any, count: Any
) -> None:
    """Give the GPU instances of one profile."""
    _profile_by_id(lib, device, number(wanted))
    _only_in_mig_mode(device)
    found = [
        lib.handle("gi", device.gpu.uuid, instance.serial)
        for instance in device.gpu.instances
        if instance.profile_id == number(wanted)
    ]
    _store_handles(instances, count, found)


@nvml()
def nvmlDeviceGetGpuInstanceById(lib: SimulatedNvml, device: Device, wanted: Any, handle: Any) -> None:
    """Give a GPU instance by its id."""
    lib.table(device)
    _only_in_mig_mode(device)
    for instance in device.gpu.instances:
        if instance.gi == number(wanted):
            return put_handle(handle, lib.handle("gi", device.gpu.uuid, instance.serial))
    raise Status(pynvml.NVML_ERROR_NOT_FOUND)


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceGetInfo(lib: SimulatedNvml, subject: GpuInstanceRef, info: Any) -> None:
    """Give id, profile and placement of a GPU instance."""
    device, instance = subject
    structure = target(info)
    fill(structure, id=instance.gi, profileId=instance.profile_id)
    fill(structure.placement, start=instance.start, size=instance.size)
    point(pointer_field(structure, "device"), lib.handle("gpu", device.gpu.uuid))


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceGetComputeInstanceProfileInfo(
    lib: SimulatedNvml, subject: GpuInstanceRef, kind: Any, engines: Any, info: Any
) -> None:
    """Give a compute instance profile by its number of enumeration."""
    profile, part = _offered_part(lib, subject, number(kind), number(engines))
    fill(target(info), **_part_values(profile, part))


@nvml(Subject.GPU_INSTANCE, since=520)
def nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    lib: SimulatedNvml, subject: GpuInstanceRef, kind: Any, engines: Any, info: Any
) -> None:
    """Give a compute instance profile with its name."""
    structure = target(info)
    check_version(structure, pynvml.nvmlComputeInstanceProfileInfo_v2)
    profile, part = _offered_part(lib, subject, number(kind), number(engines))
    whole = part.slices == profile.slices
    name = f"MIG {profile.name}" if whole else f"MIG {part.slices}c.{profile.name}"
    fill(structure, **_part_values(profile, part), name=name)


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceGetComputeInstancePossiblePlacements(
    lib: SimulatedNvml, subject: GpuInstanceRef, wanted: Any, placements: Any, count: Any
) -> None:
    """Give where compute instances of a profile may lie."""
    part = _part_by_id(lib, subject, number(wanted))
    target(count).value = len(part.starts)
    if placements is not None:
        store(placements, [partial(fill, start=start, size=part.slices) for start in part.starts])


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
    lib: SimulatedNvml, subject: GpuInstanceRef, wanted: Any, count: Any
) -> None:
    """Give how many more compute instances of a profile fit."""
    part = _part_by_id(lib, subject, number(wanted))
    put(count, len(free_part_starts(subject[1], part)))


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceGetComputeInstances(
    lib: SimulatedNvml, subject: GpuInstanceRef, wanted: Any, instances: Any, count: Any
) -> None:
    """Give the compute instances of one profile."""
    _part_by_id(lib, subject, number(wanted))
    device, instance = subject
    found = [
        lib.handle("ci", device.gpu.uuid, compute.serial)
        for compute in instance.computes
        if compute.profile_id == number(wanted)
    ]
    _store_handles(instances, count, found)


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceGetComputeInstanceById(
    lib: SimulatedNvml, subject: GpuInstanceRef, wanted: Any, handle: Any
) -> None:
    """Give a compute instance by its id."""
    device, instance = subject
    for compute in instance.computes:
        if compute.ci == number(wanted):
            return put_handle(handle, lib.handle("ci", device.gpu.uuid, compute.serial))
    raise Status(pynvml.NVML_ERROR_NOT_FOUND)


@nvml(Subject.COMPUTE_INSTANCE)
def nvmlComputeInstanceGetInfo_v2(lib: SimulatedNvml, subject: ComputeInstanceRef, info: Any) -> None:
    """Give id, profile and placement; `device` is the MIG device's handle, which leads to its UUID."""
    device, instance, compute = subject
    structure = target(info)
    fill(structure, id=compute.ci, profileId=compute.profile_id)
    fill(structure.placement, start=compute.start, size=compute.size)
    mig = lib.handle("mig", device.gpu.uuid, instance.serial, compute.serial)
    point(pointer_field(structure, "device"), mig)
    point(pointer_field(structure, "gpuInstance"), lib.handle("gi", device.gpu.uuid, instance.serial))


# Shared with what changes instances


def gpu_profile(table: MigTable, profile_id: int) -> GpuInstanceProfile:
    """Give a GPU instance profile by id.

    Raises:
        Status: NOT_SUPPORTED.
    """
    profile = table.by_id(profile_id)
    if profile is None:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return profile


def compute_profile(table: MigTable, profile: GpuInstanceProfile, profile_id: int) -> ComputeInstanceProfile:
    """Give a compute instance profile by id.

    Raises:
        Status: NOT_SUPPORTED.
    """
    for part in compute_profiles(table, profile):
        if part.profile_id == profile_id:
            return part
    raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)


def free_starts(table: MigTable, gpu: GpuState, profile: GpuInstanceProfile) -> list[int]:
    """Give where an instance of a profile could be made now."""
    same = sum(instance.profile_id == profile.profile_id for instance in gpu.instances)
    used_slices = sum(gpu_profile(table, instance.profile_id).slices for instance in gpu.instances)
    if same >= profile.limit or used_slices + profile.slices > table.slices:
        return []
    if not _engines_left(table, gpu, profile):
        return []
    taken = [(instance.start, instance.size) for instance in gpu.instances]
    return [start for start in profile.starts if not overlaps(start, profile.size, taken)]


def _engines_left(table: MigTable, gpu: GpuState, profile: GpuInstanceProfile) -> bool:
    """Whether there are media engines for one more instance: of each kind the GPU has what its largest profile has."""
    instances = [gpu_profile(table, instance.profile_id) for instance in gpu.instances]
    return all(
        sum(getattr(each, kind) for each in (*instances, profile))
        <= max(getattr(each, kind) for each in table.profiles)
        for kind in ("decoders", "jpeg_engines", "ofa_engines")
    )


def free_part_starts(instance: GpuInstance, part: ComputeInstanceProfile) -> list[int]:
    """Give where a compute instance could be made now."""
    taken = [(compute.start, compute.size) for compute in instance.computes]
    return [start for start in part.starts if not overlaps(start, part.slices, taken)]


def pointer_field(structure: Any, name: str) -> Any:
    """Give the memory of a pointer field; reading the attribute would give a copy."""
    import ctypes

    field = getattr(type(structure), name)
    return (ctypes.c_char * field.size).from_buffer(structure, field.offset)


def _only_mig(device: Device) -> tuple[GpuInstance, ComputeInstance]:
    if device.instance is None or device.compute is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return device.instance, device.compute


def _only_in_mig_mode(device: Device) -> None:
    if not device.gpu.mig_current:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _offered(lib: SimulatedNvml, device: Device, kind: int) -> GpuInstanceProfile:
    table = lib.table(device)
    if not 0 <= kind < _KINDS:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    profile = table.by_kind(kind)
    if profile is None:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return profile


def _profile_by_id(lib: SimulatedNvml, device: Device, profile_id: int) -> GpuInstanceProfile:
    return gpu_profile(lib.table(device), profile_id)


def _offered_part(
    lib: SimulatedNvml, subject: GpuInstanceRef, kind: int, engines: int
) -> tuple[GpuInstanceProfile, ComputeInstanceProfile]:
    device, instance = subject
    if not 0 <= kind < _COMPUTE_KINDS or engines != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    table = lib.table(device)
    profile = gpu_profile(table, instance.profile_id)
    for part in compute_profiles(table, profile):
        if part.kind == kind:
            return profile, part
    raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _part_by_id(lib: SimulatedNvml, subject: GpuInstanceRef, profile_id: int) -> ComputeInstanceProfile:
    device, instance = subject
    table = lib.table(device)
    return compute_profile(table, gpu_profile(table, instance.profile_id), profile_id)


def _profile_values(profile: GpuInstanceProfile) -> dict[str, int]:
    return {
        "id": profile.profile_id,
        "isP2pSupported": 0,
        "sliceCount": profile.slices,
        "instanceCount": profile.limit,
        "multiprocessorCount": profile.multiprocessors,
        "copyEngineCount": profile.copy_engines,
        "decoderCount": profile.decoders,
        "encoderCount": 0,
        "jpegCount": profile.jpeg_engines,
        "ofaCount": profile.ofa_engines,
        "memorySizeMB": profile.memory_mib,
    }


def _part_values(profile: GpuInstanceProfile, part: ComputeInstanceProfile) -> dict[str, int]:
    return {
        "id": part.profile_id,
        "sliceCount": part.slices,
        "instanceCount": part.limit,
        "multiprocessorCount": part.multiprocessors,
        "sharedCopyEngineCount": profile.copy_engines,
        "sharedDecoderCount": profile.decoders,
        "sharedEncoderCount": 0,
        "sharedJpegCount": profile.jpeg_engines,
        "sharedOfaCount": profile.ofa_engines,
    }


def _store_handles(array: Any, count: Any, addresses: Iterable[int]) -> None:
    """Store handles in an array of pointers, whose elements are read as copies."""
    import ctypes

    found = list(addresses)
    target(count).value = len(found)
    if not found:
        return
    if array is None:
        raise Status(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    memory = target(array)
    address = ctypes.addressof(memory)
    if isinstance(array, ctypes._Pointer):
        address = ctypes.addressof(array.contents)
    slots = (ctypes.c_void_p * len(found)).from_address(address)
    for position, handle in enumerate(found):
        slots[position] = handle
