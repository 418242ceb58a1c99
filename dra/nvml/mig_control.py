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
    "MigOfGpu",
]

T = TypeVar("T")


class MigOfGpu:
    """The MIG of one GPU; each method is one call into the session.

    All of them raise DeviceError or StackError: DRA-NVML-…, and DRA-MIG-GPU-CHANGED where another board is at the
    address by now.

    Args:
        session: NVML.
        gpu_uuid: the GPU's UUID.
        address: its PCI address; known, no other GPU is woken and a hang is charged to it.
        deadline_seconds: for all of a call; one that makes something and is late takes it back as soon as it is through.
    """

    def __init__(
        self,
        session: NvmlSession,
        gpu_uuid: str,
        *,
        address: PciAddress | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        self._session, self._uuid = session, gpu_uuid
        self._address, self._deadline_seconds = address, deadline_seconds

    def look(self, *, profile_id: int, start: int) -> MigLook:
        """Give what stands at this place, half-made instances included."""
        return self._run(lambda gpu: gpu.look(profile_id, start))

    def find(self, *, profile_id: int, start: int) -> MigFacts | None:
        """Give the MIG device of this profile at this place; None if there is none, or only half of one."""
        return self._run(lambda gpu: gpu.find(profile_id, start))

    def instances(self) -> tuple[MigInstance, ...]:
        """Give all GPU instances by their place, whoever made them."""
        return self._run(lambda gpu: gpu.instances())

    def create(self, *, profile_id: int, start: int) -> MigFacts:
        """Make a MIG device at exactly this place, switching MIG mode on where that needs no reset.

        A GPU instance of the same profile that lies there without a compute instance (left by a crash) is completed.
        After an error nothing is left behind; where even taking back failed, the error's field `left` says what.

        Raises:
            DeviceError: DRA-MIG-MODE-NEEDS-RESET (before Hopper, mode off); DRA-MIG-IN-USE (processes keep the mode
                from being switched; retryable); DRA-MIG-OCCUPIED (retryable); DRA-MIG-PLACEMENT (no such place).
        """
        return self._run(lambda gpu: gpu.create(profile_id, start))

    def destroy(
        self, *, gi: int, ci: int | None, uuid: str, profile_id: int | None = None, start: int | None = None
    ) -> bool:
        """Destroy a MIG device; whether anything of it was there.

        Ids are used again, and so are the UUIDs that follow from them: another UUID, or another profile or start
        where those are given, means that ours is gone already. A GPU instance without its compute instance (an
        earlier attempt got half-way) is destroyed too; `ci` None says that it never had one.

        Raises:
            DeviceError: DRA-MIG-IN-USE: a process uses it (retryable).
        """
        return self._run(lambda gpu: gpu.destroy(gi, ci, uuid, profile_id=profile_id, start=start))

    def clear_half_made(self, *, profile_id: int, start: int) -> bool:
        """Destroy the GPU instance of this profile at this place if it has no compute instance; whether it did.

        For whoever undoes a creation of which the end is not known (a crash in between).
        """
        return self._run(lambda gpu: gpu.clear_half_made(profile_id, start))

    def mode_off_if_empty(self) -> bool:
        """Switch MIG mode off if the GPU has no instances; whether it is off now. Call only where we switched it on.

        Before Hopper the mode is never touched.

        Raises:
            DeviceError: DRA-MIG-IN-USE: a process keeps the mode from being switched (retryable).
        """
        return self._run(lambda gpu: gpu.mode_off_if_empty())

    def _run(self, work: Callable[[GpuMig], T]) -> T:
        subject = self._uuid if self._address is None else str(self._address)

        def call(api: NvmlApi) -> T:
            return work(GpuMig(api, subject, self._uuid, self._address))

        return self._session.run(call, subject=subject, deadline_seconds=self._deadline_seconds)
