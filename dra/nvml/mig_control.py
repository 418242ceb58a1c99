"""MIG, changing: make, find and destroy one MIG device at one place, and the MIG mode it needs.

A MIG device is a GPU instance with one compute instance over all of it. It is made whole or not at all: what was
made before a failure is taken back, also when the caller's time is over. Only one change on a GPU at a time (the
caller's lock); different GPUs go in parallel.

Source: nvmlDeviceCreateGpuInstanceWithPlacement, nvmlGpuInstanceCreateComputeInstance, nvmlDeviceSetMigMode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from dra.errors import DeviceError, DraError
from dra.nvml.api import NvmlApi
from dra.nvml.errors import (
    FUNCTION_NOT_FOUND,
    IN_USE,
    INSUFFICIENT_RESOURCES,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
)
from dra.nvml.mig import possible_placements
from dra.nvml.session import NvmlSession
from dra.values import PciAddress

T = TypeVar("T")

MODE_NEEDS_RESET = "DRA-MIG-MODE-NEEDS-RESET"
MIG_IN_USE = "DRA-MIG-IN-USE"
MIG_OCCUPIED = "DRA-MIG-OCCUPIED"
MIG_PLACEMENT = "DRA-MIG-PLACEMENT"
MIG_GPU_CHANGED = "DRA-MIG-GPU-CHANGED"

# From here on the mode is switched without a reset. Source: NVML_DEVICE_ARCH_HOPPER; MIG user guide.
_HOPPER = 9
# No GPU has more instances of one profile, nor a GPU instance more compute instances.
_MAX_INSTANCES = 16
_MAX_COMPUTE_INSTANCES = 8
# Compute profiles that are not the plain ones: media engines (REV1), NVLink between parts of one GPU (NVL).
_SPECIAL_COMPUTE = frozenset(
    getattr(pynvml, name)
    for name in ("NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1", "NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL")
    if hasattr(pynvml, name)
)
_COMPUTE_KINDS = int(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)
# What is said to a compute profile that is listed and yet cannot be had; the next one may.
_TRY_NEXT = frozenset({NOT_SUPPORTED, INVALID_ARGUMENT, INSUFFICIENT_RESOURCES})
_ABSENT = frozenset({NOT_FOUND, NOT_SUPPORTED, INVALID_ARGUMENT})


@dataclass(frozen=True, slots=True)
class MigFacts:
    """A MIG device: ids of its GPU and compute instance, UUID, place in memory slices.

    `mode_switched`: MIG mode was off and was switched on for it.
    """

    gi: int
    ci: int
    uuid: str
    profile_id: int
    start: int
    size: int
    mode_switched: bool = False


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


def destroy_mig(
    session: NvmlSession,
    gpu_uuid: str,
    *,
    gi: int,
    ci: int,
    uuid: str,
    profile_id: int | None = None,
    start: int | None = None,
    deadline_seconds: float | None = None,
    address: PciAddress | None = None,
) -> bool:
    """Destroy a MIG device; whether anything of it was there.

    Ids are used again, and so are the UUIDs that follow from them: another UUID, or another profile or start
    where those are given, means that ours is gone already. A GPU instance without its compute instance (an
    earlier attempt got half-way) is destroyed too.

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
    work: Callable[[_Gpu], T],
    *,
    deadline_seconds: float | None,
    address: PciAddress | None,
) -> T:
    subject = gpu_uuid if address is None else str(address)

    def call(api: NvmlApi) -> T:
        return work(_Gpu(api, subject, gpu_uuid, address))

    return session.run(call, subject=subject, deadline_seconds=deadline_seconds)


class _Gpu:
    """One GPU inside one call into the session."""

    def __init__(self, api: NvmlApi, subject: str, uuid: str, address: PciAddress | None) -> None:
        self._api, self._subject, self._uuid = api, subject, uuid
        self._handle = api.remembered(("mig handle", subject, uuid), lambda: self._find_handle(address))

    def _find_handle(self, address: PciAddress | None) -> Any:
        if address is None:
            return self._call("nvmlDeviceGetHandleByUUID", self._uuid)
        handle = self._api.handle(address)
        there = self._call("nvmlDeviceGetUUID", handle)
        if there != self._uuid:
            raise DeviceError(
                MIG_GPU_CHANGED,
                f"GPU {self._uuid}: at {address} is {there} now",
                remedy="The board was replaced; delete the pod so that it is scheduled again.",
                gpu=self._subject,
            )
        return handle

    def _call(self, name: str, *args: object, undoing: bool = False) -> Any:
        return self._api.call(name, *args, subject=self._subject, undoing=undoing)

    def _absent(self, name: str, *args: object) -> Any:
        """Call for something that may not be there; None then."""
        try:
            return self._call(name, *args)
        except DraError as error:
            if error.code in _ABSENT:
                return None
            raise

    # Looking

    def _instances(self, profile_id: int) -> Iterator[tuple[Any, Any]]:
        """Give the GPU instances of a profile with their infos."""
        count = c_uint(_MAX_INSTANCES)
        room = (pynvml.c_nvmlGpuInstance_t * _MAX_INSTANCES)()
        try:
            self._call("nvmlDeviceGetGpuInstances", self._handle, profile_id, room, byref(count))
        except DraError as error:
            if error.code in (NOT_SUPPORTED, NOT_FOUND):  # MIG mode is off
                return
            raise
        for instance in room[: count.value]:
            info = self._absent("nvmlGpuInstanceGetInfo", instance)
            if info is not None:
                yield instance, info

    def _instance_at(self, profile_id: int, start: int) -> tuple[Any, Any] | None:
        found = self._instances(profile_id)
        return next((each for each in found if each[1].placement.start == start), None)

    def _compute_of(self, instance: Any) -> Any:
        """Give the first compute instance of a GPU instance; None if it has none."""
        for number in range(_MAX_COMPUTE_INSTANCES):
            compute = self._absent("nvmlGpuInstanceGetComputeInstanceById", instance, number)
            if compute is not None:
                return compute
        return None

    def _facts(self, info: Any, compute: Any, *, mode_switched: bool = False) -> MigFacts:
        part = self._call("nvmlComputeInstanceGetInfo", compute)
        return MigFacts(
            gi=int(info.id),
            ci=int(part.id),
            uuid=str(self._call("nvmlDeviceGetUUID", part.device)),
            profile_id=int(info.profileId),
            start=int(info.placement.start),
            size=int(info.placement.size),
            mode_switched=mode_switched,
        )

    def find(self, profile_id: int, start: int) -> MigFacts | None:
        found = self._instance_at(profile_id, start)
        compute = None if found is None else self._compute_of(found[0])
        return None if found is None or compute is None else self._facts(found[1], compute)

    # Making

    def create(self, profile_id: int, start: int) -> MigFacts:
        size = self._size_of(profile_id, start)
        undo: list[tuple[str, Callable[[], None]]] = []
        try:
            switched = self._mode_on(undo)
            instance, info = self._make_instance(profile_id, start, size, undo)
            compute = self._make_compute(instance, profile_id)
            undo.append(
                ("compute instance", functools.partial(self._undo, "nvmlComputeInstanceDestroy", compute))
            )
            facts = self._facts(info, compute, mode_switched=switched)
            self._api.check_awaited()
        except DraError as error:
            left = self._take_back(undo)
            if left:
                error.fields["left"] = left
            raise
        return facts

    def _take_back(self, undo: list[tuple[str, Callable[[], None]]]) -> str:
        """Undo the last first; what could not be undone, and with it what lies below, is named."""
        while undo:
            try:
                undo[-1][1]()
            except DraError:
                return ", ".join(name for name, _ in reversed(undo))
            undo.pop()
        return ""

    def _undo(self, name: str, *args: object) -> None:
        self._call(name, *args, undoing=True)

    def _size_of(self, profile_id: int, start: int) -> int:
        def ask() -> dict[int, int]:
            return dict(possible_placements(self._api, self._handle, profile_id, subject=self._subject))

        sizes: dict[int, int] = {}
        try:
            sizes = self._api.remembered(("mig placements", self._uuid, profile_id), ask)
        except DraError as error:
            if error.code not in _ABSENT | {FUNCTION_NOT_FOUND}:
                raise
        if start not in sizes:
            raise DeviceError(
                MIG_PLACEMENT,
                f"GPU {self._subject}: MIG profile {profile_id} cannot begin at memory slice {start}"
                + (
                    f", only at {', '.join(map(str, sorted(sizes)))}"
                    if sizes
                    else "; the GPU does not offer it"
                ),
                remedy="Delete the pod so that it is scheduled again.",
                gpu=self._subject,
            )
        return sizes[start]

    def _mode_on(self, undo: list[tuple[str, Callable[[], None]]]) -> bool:
        current, _pending = self._call("nvmlDeviceGetMigMode", self._handle)
        if current == 1:
            return False
        if not self._switches_live():
            raise self._needs_reset("switching it on needs a GPU reset")
        undo.append(("MIG mode", functools.partial(self._undo, "nvmlDeviceSetMigMode", self._handle, 0)))
        self._set_mode(1)
        if self._call("nvmlDeviceGetMigMode", self._handle)[0] != 1:
            raise self._needs_reset("the driver has put off switching it on until the GPU is reset")
        return True

    def _set_mode(self, mode: int) -> None:
        try:
            self._call("nvmlDeviceSetMigMode", self._handle, mode)
        except DraError as error:
            if error.code != IN_USE:
                raise
            word = "on" if mode else "off"
            raise DeviceError(
                MIG_IN_USE,
                f"GPU {self._subject}: MIG mode cannot be switched {word} while a process uses the GPU",
                remedy="Stop the process (nvidia-smi, or fuser -v /dev/nvidia*); monitoring agents hold GPUs too.",
                retryable=True,
                gpu=self._subject,
            ) from error

    def _needs_reset(self, why: str) -> DeviceError:
        return DeviceError(
            MODE_NEEDS_RESET,
            f"GPU {self._subject}: MIG mode is off, and {why}",
            remedy="Drain the node and switch it on by hand (nvidia-smi -mig 1, then nvidia-smi --gpu-reset).",
            gpu=self._subject,
        )

    def _switches_live(self) -> bool:
        def ask() -> int:
            return int(
                self._api.optional("nvmlDeviceGetArchitecture", self._handle, subject=self._subject) or 0
            )

        return self._api.remembered(("architecture", self._uuid), ask) >= _HOPPER

    def _make_instance(
        self, profile_id: int, start: int, size: int, undo: list[tuple[str, Callable[[], None]]]
    ) -> tuple[Any, Any]:
        place = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
        try:
            instance = self._call(
                "nvmlDeviceCreateGpuInstanceWithPlacement", self._handle, profile_id, byref(place)
            )
        except DraError as error:
            if error.code != INSUFFICIENT_RESOURCES:
                raise
            found = self._instance_at(profile_id, start)
            if found is None or self._compute_of(found[0]) is not None:
                raise self._occupied(profile_id, start, size, found) from error
            instance = found[0]
        undo.append(("GPU instance", functools.partial(self._undo, "nvmlGpuInstanceDestroy", instance)))
        return instance, self._call("nvmlGpuInstanceGetInfo", instance)

    def _occupied(self, profile_id: int, start: int, size: int, found: tuple[Any, Any] | None) -> DeviceError:
        what = (
            "an instance that overlaps" if found is None else f"GPU instance {found[1].id} is there already"
        )
        return DeviceError(
            MIG_OCCUPIED,
            f"GPU {self._subject}: no room for MIG profile {profile_id} in memory slices {start} to "
            f"{start + size - 1}: {what}",
            remedy="Look for the instance that holds the place (nvidia-smi mig -lgi); destroy it if nobody needs it.",
            retryable=True,
            gpu=self._subject,
        )

    def _make_compute(self, instance: Any, profile_id: int) -> Any:
        wanted = self._api.remembered(
            ("mig compute profiles", self._uuid, profile_id), lambda: self._compute_profiles(instance)
        )
        refused: DraError | None = None
        for number in wanted:
            try:
                return self._call("nvmlGpuInstanceCreateComputeInstance", instance, number)
            except DraError as error:
                if error.code not in _TRY_NEXT:
                    raise
                refused = refused or error
        if refused is not None:
            raise refused
        raise DeviceError(
            MIG_PLACEMENT,
            f"GPU {self._subject}: MIG profile {profile_id} offers no compute instance",
            remedy="Upgrade the NVIDIA driver; report it.",
            gpu=self._subject,
        )

    def _compute_profiles(self, instance: Any) -> tuple[int, ...]:
        """Give the ids of the compute profiles over the whole GPU instance, the plain ones first."""
        offered: list[tuple[int, int, int]] = []
        for kind in range(_COMPUTE_KINDS):
            info = self._absent(
                "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                instance,
                kind,
                pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
                1,
            )
            if info is not None:
                offered.append((int(info.sliceCount), kind, int(info.id)))
        most = max((slices for slices, _, _ in offered), default=0)
        whole = [
            (kind in _SPECIAL_COMPUTE, kind, number) for slices, kind, number in offered if slices == most
        ]
        return tuple(number for _, _, number in sorted(whole))

    # Destroying

    def destroy(self, gi: int, ci: int, uuid: str, *, profile_id: int | None, start: int | None) -> bool:
        instance = self._absent("nvmlDeviceGetGpuInstanceById", self._handle, gi)
        info = None if instance is None else self._absent("nvmlGpuInstanceGetInfo", instance)
        if info is None:
            return False
        if profile_id not in (None, info.profileId) or start not in (None, info.placement.start):
            return False
        compute = self._absent("nvmlGpuInstanceGetComputeInstanceById", instance, ci)
        if compute is None:
            # Half destroyed earlier, unless somebody else has parts in it.
            return self._compute_of(instance) is None and self._destroy(
                "nvmlGpuInstanceDestroy", instance, uuid
            )
        if self._facts(info, compute).uuid != uuid:
            return False
        self._destroy("nvmlComputeInstanceDestroy", compute, uuid)
        self._destroy("nvmlGpuInstanceDestroy", instance, uuid)
        return True

    def _destroy(self, name: str, what: Any, uuid: str) -> bool:
        try:
            self._call(name, what)
        except DraError as error:
            if error.code == NOT_FOUND:
                return False
            if error.code != IN_USE:
                raise
            raise DeviceError(
                MIG_IN_USE,
                f"GPU {self._subject}: MIG device {uuid} is still in use",
                remedy="It is destroyed when the process that uses it has ended (nvidia-smi shows which).",
                retryable=True,
                gpu=self._subject,
            ) from error
        return True

    def clear_half_made(self, profile_id: int, start: int) -> bool:
        found = self._instance_at(profile_id, start)
        if found is None or self._compute_of(found[0]) is not None:
            return False
        return self._destroy("nvmlGpuInstanceDestroy", found[0], f"(half made, GPU instance {found[1].id})")

    def mode_off_if_empty(self) -> bool:
        current, pending = self._call("nvmlDeviceGetMigMode", self._handle)
        if current == 0 and pending == 0:
            return True
        if not self._switches_live():
            return False
        for index in range(self._call("nvmlDeviceGetMaxMigDeviceCount", self._handle)):
            if self._absent("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, index) is not None:
                return False
        try:
            self._set_mode(0)
        except DeviceError as error:
            # An instance without a MIG device keeps the mode on as a process does.
            if error.code == MIG_IN_USE and self._has_instances():
                return False
            raise
        return bool(self._call("nvmlDeviceGetMigMode", self._handle)[0] == 0)

    def _has_instances(self) -> bool:
        return any(
            self._absent("nvmlDeviceGetGpuInstanceById", self._handle, number) is not None
            for number in range(_MAX_INSTANCES)
        )
