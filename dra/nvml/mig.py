"""MIG, read only: the devices a GPU has, and the profiles it offers."""

from __future__ import annotations

import math
from ctypes import byref, c_uint
from typing import Any

import pynvml

from dra.errors import DraError
from dra.nvml.api import NvmlApi
from dra.nvml.errors import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED
from dra.nvml.facts import Issue, MigDeviceFacts, MigProfileFacts

# What a GPU says to a profile it does not know. Source: nvmlDeviceGetGpuInstanceProfileInfoV.
_NOT_OFFERED = (NOT_SUPPORTED, INVALID_ARGUMENT, FUNCTION_NOT_FOUND)

# GPU instance profiles by the number they are enumerated with: (compute slices, suffix of the name).
# Source: NVML_GPU_INSTANCE_PROFILE_*.
_SHAPES: dict[int, tuple[int, str]] = {
    0x0: (1, ""), 0x1: (2, ""), 0x2: (3, ""), 0x3: (4, ""), 0x4: (7, ""), 0x5: (8, ""), 0x6: (6, ""),
    0x7: (1, "+me"), 0x8: (2, "+me"), 0x9: (1, ""), 0xA: (1, "+gfx"), 0xB: (2, "+gfx"), 0xC: (4, "+gfx"),
    0xD: (1, "-me"), 0xE: (2, "-me"), 0xF: (1, "+me.all"), 0x10: (2, "+me.all"), 0x11: (3, "+gfx"),
}  # fmt: skip
# Room for profiles that are newer than this table; a GPU answers INVALID_ARGUMENT to what it does not know.
_NEWER = 6
# More than any GPU has memory slices.
_MAX_PLACEMENTS = 64


def profile_name(*, enumerated: int, memory_mib: int, gpu_memory_bytes: int) -> str:
    """Give the name of a profile for drivers that do not tell it, as NVIDIA's tools compute it.

    The memory is rounded up to eighths of the GPU's, which is rounded up to whole GiB.
    """
    slices, suffix = _SHAPES[enumerated]
    eighths = math.ceil(memory_mib * 2**20 * 8 / gpu_memory_bytes)
    gib = math.floor(eighths * math.ceil(gpu_memory_bytes / 2**30) / 8 + 0.5)
    return f"{slices}g.{gib}gb{suffix}"


def read_profiles(
    api: NvmlApi, handle: Any, *, subject: str, memory_bytes: int | None
) -> tuple[MigProfileFacts, ...]:
    """Give every GPU instance profile that the GPU offers, by the order of enumeration."""
    found: list[MigProfileFacts] = []
    for number in range(len(_SHAPES) + _NEWER):
        try:
            info, named = _profile_info(api, handle, number, subject)
            placements = possible_placements(api, handle, info.id, subject=subject)
        except DraError as error:
            if error.code in _NOT_OFFERED:
                continue
            raise
        name = named
        if not name and number in _SHAPES and memory_bytes:
            name = profile_name(
                enumerated=number, memory_mib=info.memorySizeMB, gpu_memory_bytes=memory_bytes
            )
        if name:  # a profile nobody can name cannot be asked for
            found.append(_facts(info, name, placements))
    return tuple(found)


def read_devices(
    api: NvmlApi, handle: Any, *, subject: str, profiles: tuple[MigProfileFacts, ...]
) -> tuple[tuple[MigDeviceFacts, ...], tuple[Issue, ...]]:
    """Give the MIG devices of a GPU in MIG mode by placement, and what could not be read.

    A GPU instance that is divided further (1c.3g) is reported, not given: its parts have no names of their own.
    """
    by_id = {profile.profile_id: profile for profile in profiles}
    devices: list[MigDeviceFacts] = []
    issues: list[Issue] = []
    for index in range(api.call("nvmlDeviceGetMaxMigDeviceCount", handle, subject=subject)):
        try:
            mig = api.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, subject=subject)
            devices.append(_device(api, handle, mig, by_id, subject))
        except DraError as error:
            if error.code == NOT_FOUND:  # an empty place
                continue
            issues.append(Issue.of(error, subject=f"{subject} MIG {index}"))
        except KeyError as error:
            issues.append(
                Issue(
                    f"{subject} MIG {index}",
                    "DRA-NVML-MIG-PROFILE",
                    f"GPU {subject}: MIG device {index} has the unknown profile {error.args[0]}; it is not published",
                    "Upgrade this driver.",
                )
            )
    shared = {device.gpu_instance_id for device in devices}
    for instance in sorted(shared):
        parts = [device for device in devices if device.gpu_instance_id == instance]
        if len(parts) > 1:
            devices = [device for device in devices if device.gpu_instance_id != instance]
            issues.append(
                Issue(
                    f"{subject} GI {instance}",
                    "DRA-NVML-MIG-DIVIDED",
                    f"GPU {subject}: GPU instance {instance} holds {len(parts)} compute instances; it is not published",
                    "Give each GPU instance one compute instance over all of it.",
                )
            )
    return tuple(sorted(devices, key=lambda device: (device.start, device.size))), tuple(issues)


def _device(
    api: NvmlApi, handle: Any, mig: Any, profiles: dict[int, MigProfileFacts], subject: str
) -> MigDeviceFacts:
    gpu_instance = api.call("nvmlDeviceGetGpuInstanceId", mig, subject=subject)
    instance = api.call("nvmlDeviceGetGpuInstanceById", handle, gpu_instance, subject=subject)
    info = api.call("nvmlGpuInstanceGetInfo", instance, subject=subject)
    return MigDeviceFacts(
        uuid=api.call("nvmlDeviceGetUUID", mig, subject=subject),
        profile=profiles[info.profileId],
        gpu_instance_id=gpu_instance,
        compute_instance_id=api.call("nvmlDeviceGetComputeInstanceId", mig, subject=subject),
        start=info.placement.start,
        size=info.placement.size,
    )


def _profile_info(api: NvmlApi, handle: Any, number: int, subject: str) -> tuple[Any, str]:
    try:
        info = api.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, number, 2, subject=subject)
    except DraError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        return api.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, number, 1, subject=subject), ""
    text = info.name.decode("utf-8", "replace") if isinstance(info.name, bytes) else str(info.name)
    return info, text.removeprefix("MIG ").strip()


def possible_placements(
    api: NvmlApi, handle: Any, profile_id: int, *, subject: str
) -> tuple[tuple[int, int], ...]:
    """Give where instances of a profile may lie, (start, size) in memory slices, taken places included."""
    count = c_uint(_MAX_PLACEMENTS)
    room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    api.call(
        "nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile_id, room, byref(count), subject=subject
    )
    return tuple(sorted((place.start, place.size) for place in room[: count.value]))


def _facts(info: Any, name: str, placements: tuple[tuple[int, int], ...]) -> MigProfileFacts:
    return MigProfileFacts(
        name=name,
        profile_id=int(info.id),
        slices=int(info.sliceCount),
        memory_mib=int(info.memorySizeMB),
        multiprocessors=int(info.multiprocessorCount),
        copy_engines=int(info.copyEngineCount),
        decoders=int(info.decoderCount),
        encoders=int(info.encoderCount),
        jpeg_engines=int(info.jpegCount),
        ofa_engines=int(info.ofaCount),
        placements=placements,
    )
