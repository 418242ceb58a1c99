"""Who uses what: readings of the hardware joined with the claims that hold it. Pure, for metrics and `dra top`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dra.health.outcome import mig_name
from dra.host.cgroups import Place
from dra.inventory.model import Gpu, MigDevice
from dra.inventory.names import GpuName
from dra.inventory.sampling import Snapshot
from dra.nvml.telemetry import GpuReading, MemoryReading, MigReading, ProcessReading
from dra.prepare.allocations import Allocation

# The server of MPS holds the contexts of its clients, which are counted themselves.
_MPS_SERVER = "nvidia-cuda-mps"


@dataclass(frozen=True, slots=True)
class Use:
    """A device at one moment: a GPU, or a MIG device.

    `load` is None where it is not known: not read, or a partition without GPM. `foreign` are processes that belong
    to no claim of the device; None: what a process belongs to cannot be seen.
    """

    device: str
    uuid: str
    profile: str
    gpu: Gpu
    mig: MigDevice | None = None
    reading: GpuReading | None = None
    mig_reading: MigReading | None = None
    processes: tuple[ProcessReading, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    foreign: tuple[ProcessReading, ...] = ()
    unseen: int = 0
    load: float | None = None
    memory: MemoryReading | None = None

    @property
    def holders(self) -> tuple[Allocation, ...]:
        """The allocations that take the device, access for monitoring left out."""
        return tuple(each for each in self.allocations if not each.admin)


@dataclass(frozen=True, slots=True)
class Share:
    """What one allocation uses of its device; None where that is not known."""

    allocation: Allocation
    load: float | None = None
    memory_used: float | None = None
    memory_limit: int | None = None
    processes: int | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where the processes of a snapshot run, each looked up once."""

    place_of: Callable[[int], Place | None]
    command_of: Callable[[int], str]
    places: dict[int, Place | None] = field(default_factory=dict)

    def place(self, pid: int) -> Place | None:
        if pid not in self.places:
            self.places[pid] = self.place_of(pid)
        return self.places[pid]


def uses(
    snapshot: Snapshot,
    allocations: Iterable[Allocation],
    *,
    place_of: Callable[[int], Place | None],
    command_of: Callable[[int], str] = lambda _pid: "",
) -> tuple[Use, ...]:
    """Give every GPU and MIG device of a snapshot with what uses and holds it, GPUs before their MIG devices.

    `place_of` tells the pod of a process, `command_of` its name.
    """
    by_uuid: dict[str, list[Allocation]] = {}
    for each in allocations:
        by_uuid.setdefault(each.uuid or each.device, []).append(each)
    seen = _Seen(place_of, command_of)
    found = []
    for gpu in snapshot.inventory.gpus:
        reading = snapshot.readings.get(gpu.uuid)
        found.append(_gpu_use(gpu, reading, tuple(by_uuid.get(gpu.uuid, ())), seen))
        found += [
            _mig_use(gpu, mig, own, reading, tuple(by_uuid.get(mig.uuid, ())), seen)
            for mig, own in _mig_devices(gpu, reading)
        ]
    return tuple(found)


def _gpu_use(gpu: Gpu, reading: GpuReading | None, held: tuple[Allocation, ...], seen: _Seen) -> Use:
    mine = tuple(
        process
        for process in (reading.processes if reading else ())
        if not gpu.mig_enabled or not process.instances
    )
    foreign, unseen = _foreign(mine, held, seen)
    return Use(
        device=str(GpuName(gpu.minor)), uuid=gpu.uuid, profile="", gpu=gpu, reading=reading, processes=mine,
        allocations=held, foreign=foreign, unseen=unseen,
        load=reading.load if reading else None, memory=reading.memory if reading else None,
    )  # fmt: skip


def _mig_devices(gpu: Gpu, reading: GpuReading | None) -> Sequence[tuple[MigDevice, MigReading | None]]:
    read = {} if reading is None else {mig.uuid: mig for mig in reading.mig}
    return [(mig, read.get(mig.uuid)) for mig in gpu.mig_devices]


def _mig_use(
    gpu: Gpu,
    mig: MigDevice,
    own: MigReading | None,
    reading: GpuReading | None,
    held: tuple[Allocation, ...],
    seen: _Seen,
) -> Use:
    instances = (mig.gpu_instance_id, mig.compute_instance_id)
    mine = tuple(
        process for process in (reading.processes if reading else ()) if process.instances == instances
    )
    foreign, unseen = _foreign(mine, held, seen)
    return Use(
        device=mig_name(gpu, mig), uuid=mig.uuid, profile=mig.profile.name, gpu=gpu, mig=mig, mig_reading=own,
        processes=mine, allocations=held, foreign=foreign, unseen=unseen,
        load=None if own is None else own.activity.get("graphics"), memory=None if own is None else own.memory,
    )  # fmt: skip


def _foreign(
    processes: Sequence[ProcessReading], held: Sequence[Allocation], seen: _Seen
) -> tuple[tuple[ProcessReading, ...], int]:
    """Give the processes that no claim of the device accounts for, and how many of the others cannot be told."""
    pods = {consumer.uid for each in held for consumer in each.consumers if consumer.resource == "pods"}
    # A claim that is reserved for something that stands for pods: any pod may be one of them.
    any_pod = any(consumer.resource != "pods" for each in held for consumer in each.consumers)
    foreign, unseen = [], 0
    for process in processes:
        if process.pid == os.getpid():
            continue
        place = seen.place(process.pid)
        if place is not None and place.pod_uid and (any_pod or place.pod_uid in pods):
            continue
        if seen.command_of(process.pid).startswith(_MPS_SERVER):
            continue
        if place is None and held:
            unseen += 1
        else:
            # With no holder it is foreign wherever it runs.
            foreign.append(process)
    return tuple(foreign), unseen


def shares(found: Iterable[Use], *, place_of: Callable[[int], Place | None]) -> tuple[Share, ...]:
    """Give what each allocation uses. A sole holder's use is the device's; of several, that of their own processes."""
    seen = _Seen(place_of, lambda _pid: "")
    return tuple(_share(use, each, seen) for use in found for each in use.allocations)


def _share(use: Use, allocation: Allocation, seen: _Seen) -> Share:
    if allocation.admin:
        return Share(allocation)
    limit = allocation.memory_bytes
    if limit is None and use.memory is not None:
        limit = use.memory.total
    known = use.reading is not None or use.mig_reading is not None
    own = _own_processes(use, allocation, seen)
    if allocation.sole:
        energy = use.reading.energy_joules if use.reading is not None and not use.gpu.mig_enabled else None
        return Share(
            allocation,
            load=use.load,
            memory_used=None if use.memory is None else use.memory.used,
            memory_limit=limit,
            # Whatever is not foreign is this holder's.
            processes=len(use.processes) - len(use.foreign) if known else None,
            energy_joules=energy,
        )
    if own is None or not known:
        return Share(allocation, memory_limit=limit)
    return Share(
        allocation,
        load=_sum_of([process.load for process in own]),
        memory_used=_sum_of([process.memory_bytes for process in own]),
        memory_limit=limit,
        processes=len(own),
    )


def _own_processes(use: Use, allocation: Allocation, seen: _Seen) -> tuple[ProcessReading, ...] | None:
    """Give the processes of the claim's pods; None if it cannot be told which they are.

    Nor can it if the claim holds the device twice, or has a pod in common with another holder.
    """
    pods = {consumer.uid for consumer in allocation.consumers if consumer.resource == "pods"}
    times = Counter(consumer.uid for each in use.holders for consumer in each.consumers)
    if not pods or any(times[uid] > 1 for uid in pods):
        return None
    places = {process.pid: seen.place(process.pid) for process in use.processes}
    if None in places.values():
        return None
    return tuple(
        process
        for process in use.processes
        if (place := places[process.pid]) is not None and place.pod_uid in pods
    )


def _sum_of(values: Sequence[float | None]) -> float | None:
    """Sum what is known; None if something is not, 0 for nothing at all."""
    return None if None in values else sum(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class MigSpace:
    """Memory slices of a GPU in MIG mode. `largest_hole` is the size of the largest profile that still fits."""

    total: int
    used: int
    largest_hole: int

    @property
    def free(self) -> int:
        """Slices that nothing lies on."""
        return self.total - self.used

    @property
    def is_fragmented(self) -> bool:
        """Whether what is free cannot be used in one piece."""
        return self.largest_hole < self.free


def mig_space(gpu: Gpu) -> MigSpace | None:
    """Give how much of a GPU its MIG devices take; None without MIG mode or where the placements are not known."""
    placements = [place for profile in gpu.mig_profiles for place in profile.placements]
    if not gpu.mig_enabled or not placements:
        return None
    total = max(start + size for start, size in placements)
    taken = {piece for mig in gpu.mig_devices for piece in range(mig.start, min(mig.start + mig.size, total))}
    holes = [size for start, size in placements if taken.isdisjoint(range(start, start + size))]
    return MigSpace(total, len(taken), max(holes, default=0))


def by_claim(found: Iterable[Allocation]) -> Mapping[str, Sequence[Allocation]]:
    """Give the allocations by UID of their claim, in order."""
    grouped: dict[str, list[Allocation]] = {}
    for each in found:
        grouped.setdefault(each.ref.uid, []).append(each)
    return grouped
