"""One GPU's MIG inside one call into the session: look, make, destroy. For `dra.nvml.mig_control` alone.

Source: nvmlDeviceCreateGpuInstanceWithPlacement, nvmlGpuInstanceCreateComputeInstance, nvmlDeviceSetMigMode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint
from dataclasses import dataclass
from typing import Any

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
from dra.values import PciAddress

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


# What was made, and how to take it back.
_Undo = list[tuple[str, Callable[[], None]]]


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


@dataclass(frozen=True, slots=True)
class MigLook:
    """What stands at one place: whether MIG mode is on, and the ids of what is there.

    `gi` is None where nothing is; `ci` is None and `uuid` empty where only a GPU instance is.
    """

    mode_on: bool
    gi: int | None = None
    ci: int | None = None
    uuid: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A GPU instance and its place in memory slices."""

    gi: int
    profile_id: int
    start: int
    size: int


class GpuMig:
    """One GPU inside one call into the session; see the functions of `dra.nvml.mig_control` for what each does."""

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

    def look(self, profile_id: int, start: int) -> MigLook:
        """Give what stands at a place, whole or half."""
        mode = self._api.optional("nvmlDeviceGetMigMode", self._handle, subject=self._subject)
        if mode is None or mode[0] != 1:
            return MigLook(mode_on=False)
        found = self._instance_at(profile_id, start)
        if found is None:
            return MigLook(mode_on=True)
        instance, info = found
        size = int(info.placement.size)
        compute = self._compute_of(instance)
        if compute is None:
            return MigLook(mode_on=True, gi=int(info.id), size=size)
        facts = self._facts(info, compute)
        return MigLook(mode_on=True, gi=facts.gi, ci=facts.ci, uuid=facts.uuid, size=size)

    def find(self, profile_id: int, start: int) -> MigFacts | None:
        """Give the whole device at a place."""
        seen = self.look(profile_id, start)
        if seen.gi is None or seen.ci is None:
            return None
        return MigFacts(seen.gi, seen.ci, seen.uuid, profile_id, start, seen.size)

    def instances(self) -> tuple[MigInstance, ...]:
        """Give all GPU instances by their place."""
        found: list[MigInstance] = []
        for number in range(_MAX_INSTANCES):
            instance = self._absent("nvmlDeviceGetGpuInstanceById", self._handle, number)
            info = None if instance is None else self._absent("nvmlGpuInstanceGetInfo", instance)
            if info is not None:
                place = info.placement
                found.append(MigInstance(number, int(info.profileId), int(place.start), int(place.size)))
        return tuple(sorted(found, key=lambda each: (each.start, each.size)))

    # Making

    def create(self, profile_id: int, start: int) -> MigFacts:
        """Make a device, or take back what was made."""
        size = self._size_of(profile_id, start)
        undo: _Undo = []
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

    def _take_back(self, undo: _Undo) -> str:
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

    def _mode_on(self, undo: _Undo) -> bool:
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

    def _make_instance(self, profile_id: int, start: int, size: int, undo: _Undo) -> tuple[Any, Any]:
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
        what = f"GPU instance {found[1].id} is there already" if found else self._overlapping(start, size)
        return DeviceError(
            MIG_OCCUPIED,
            f"GPU {self._subject}: no room for MIG profile {profile_id} in memory slices {_span(start, size)}: "
            f"{what}",
            remedy="Look for the instance that holds the place (nvidia-smi mig -lgi); destroy it if nobody needs it.",
            retryable=True,
            gpu=self._subject,
        )

    def _overlapping(self, start: int, size: int) -> str:
        try:
            others = [
                f"GPU instance {each.gi} (profile {each.profile_id}) has {_span(each.start, each.size)}"
                for each in self.instances()
                if each.start < start + size and start < each.start + each.size
            ]
        except DraError:
            others = []
        return ", ".join(others) or "the GPU has as many instances as it can have"

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

    def destroy(
        self, gi: int, ci: int | None, uuid: str, *, profile_id: int | None, start: int | None
    ) -> bool:
        """Destroy a device if it is this one."""
        instance = self._absent("nvmlDeviceGetGpuInstanceById", self._handle, gi)
        info = None if instance is None else self._absent("nvmlGpuInstanceGetInfo", instance)
        if info is None:
            return False
        if profile_id not in (None, info.profileId) or start not in (None, info.placement.start):
            return False
        compute = None if ci is None else self._absent("nvmlGpuInstanceGetComputeInstanceById", instance, ci)
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
        """Destroy a GPU instance without compute instances."""
        found = self._instance_at(profile_id, start)
        if found is None or self._compute_of(found[0]) is not None:
            return False
        return self._destroy("nvmlGpuInstanceDestroy", found[0], f"(half made, GPU instance {found[1].id})")

    def mode_off_if_empty(self) -> bool:
        """Switch the mode off where nothing lies on the GPU."""
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
            if error.code == MIG_IN_USE and self.instances():
                return False
            raise
        return bool(self._call("nvmlDeviceGetMigMode", self._handle)[0] == 0)


def _span(start: int, size: int) -> str:
    return str(start) if size == 1 else f"{start} to {start + size - 1}"
