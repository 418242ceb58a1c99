"""MIG, changing: make, find and destroy one MIG device at one place, and the MIG mode it needs.

A MIG device is a GPU instance with one compute instance over all of it. It is made whole or not at all: what was
made before a failure is taken back, also when the caller's time is over. Only one change on a GPU at a time (the
caller's lock); different GPUs go in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dra.nvml.api import NvmlApi
from dra.nvml.mig_gpu import (
    MIG_GPU_CHANGED,
    MIG_IN_USE,
    MIG_OCCUPIED,
    MIG_PLACEMENT,
    MODE_NEEDS_RESET,
    GpuMig,
    MigFacts,
    MigInstance,
    MigLook,
)
from dra.nvml.session import NvmlSession
from dra.values import PciAddress

__all__ = [
    "MIG_GPU_CHANGED",
    "MIG_IN_USE",
    "MIG_OCCUPIED",
    "MIG_PLACEMENT",
    "MODE_NEEDS_RESET",
    "MigFacts",
    "MigInstance",
    "MigLook",
    "clear_half_made",
    "create_mig",
    "destroy_mig",
    "find_mig",
    "instances_of",
    "look_mig",
    "mig_mode_off_if_empty",
]

T = TypeVar("T")


def create_mig(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    profile_id: int,
    start: int,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> MigFacts:
    """Make a MIG device at exactly this place, switching MIG mode on where that needs no reset.

    A GPU instance of the same profile that lies there without a compute instance (left by a crash) is completed.
    After an error nothing is left behind; where even taking back failed, the error's field `left` says what.

    Args:
        session: NVML.
        gpu_uuid: the GPU's UUID.
        profile_id: id of the GPU instance profile.
        start: first memory slice.
        deadline_seconds: for all of it; a call that is late takes back what it made as soon as it is through.
        address: the GPU's PCI address; known, no other GPU is woken and a hang is charged to it.

    Raises:
        DeviceError: DRA-MIG-MODE-NEEDS-RESET (before Hopper, mode off); DRA-MIG-IN-USE (processes keep the mode
            from being switched; retryable); DRA-MIG-OCCUPIED (retryable); DRA-MIG-PLACEMENT (no such place);
            DRA-MIG-GPU-CHANGED; DRA-NVML-….
        StackError: DRA-NVML-…
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.create(profile_id, start),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def find_mig(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    profile_id: int,
    start: int,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> MigFacts | None:
    """Give the MIG device of this profile at this place; None if there is none, or only half of one.

    Raises:
        DeviceError, StackError: DRA-NVML-…; DRA-MIG-GPU-CHANGED.
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.find(profile_id, start),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def look_mig(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    profile_id: int,
    start: int,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> MigLook:
    """Give what stands at this place, half-made instances included.

    Raises:
        DeviceError, StackError: DRA-NVML-…; DRA-MIG-GPU-CHANGED.
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.look(profile_id, start),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def instances_of(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> tuple[MigInstance, ...]:
    """Give all GPU instances of a GPU by their place, whoever made them.

    Raises:
        DeviceError, StackError: DRA-NVML-…; DRA-MIG-GPU-CHANGED.
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.instances(),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def destroy_mig(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    gi: int,
    ci: int | None,
    uuid: str,
    profile_id: int | None = None,
    start: int | None = None,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> bool:
    """Destroy a MIG device; whether anything of it was there.

    Ids are used again, and so are the UUIDs that follow from them: another UUID, or another profile or start
    where those are given, means that ours is gone already. A GPU instance without its compute instance (an
    earlier attempt got half-way) is destroyed too; `ci` None says that it never had one.

    Raises:
        DeviceError: DRA-MIG-IN-USE: a process uses it (retryable); DRA-MIG-GPU-CHANGED; DRA-NVML-….
        StackError: DRA-NVML-…
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.destroy(gi, ci, uuid, profile_id=profile_id, start=start),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def clear_half_made(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    profile_id: int,
    start: int,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> bool:
    """Destroy the GPU instance of this profile at this place if it has no compute instance; whether it did.

    For whoever undoes a creation of which the end is not known (a crash in between).

    Raises:
        DeviceError, StackError: DRA-NVML-…; DRA-MIG-GPU-CHANGED.
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.clear_half_made(profile_id, start),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def mig_mode_off_if_empty(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> bool:
    """Switch MIG mode off if the GPU has no instances; whether it is off now. Call only where we switched it on.

    Before Hopper the mode is never touched.

    Raises:
        DeviceError: DRA-MIG-IN-USE: a process keeps the mode from being switched (retryable); DRA-NVML-….
        StackError: DRA-NVML-…
    """
    return _run(
        session,
        gpu_uuid,
        lambda gpu: gpu.mode_off_if_empty(),
        deadline_seconds=deadline_seconds,
        address=address,
    )


def _run(
    session: NvmlSession,
    gpu_uuid: str,
    work: Callable[[GpuMig], T],
    *,
    deadline_seconds: float | None,
    address: PciAddress | None,
) -> T:
    subject = gpu_uuid if address is None else str(address)

    def call(api: NvmlApi) -> T:
        return work(GpuMig(api, subject, gpu_uuid, address))

    return session.run(call, subject=subject, deadline_seconds=deadline_seconds)
