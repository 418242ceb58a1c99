"""`dra top` as data: GPUs and partitions, who holds them, what they do, and what deserves a look.

An allocation is called idle only where its load is known, was 0 in every reading, and the claim is old enough. A
partition whose load nobody can tell (no GPM: before Hopper) is `unknown`, whatever it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dra.diagnose.usage import Use, mig_space, shares, uses
from dra.host.cgroups import Place
from dra.inventory.model import Gpu
from dra.inventory.names import parse_vfio_name
from dra.inventory.sampling import Snapshot
from dra.nvml.telemetry import ProcessReading
from dra.prepare.allocations import Allocation

State = Literal["free", "cut", "busy", "idle", "held", "unknown", "foreign", "asleep", "unreadable"]

# A claim that was prepared more recently may still load its data.
IDLE_AFTER_SECONDS = 600.0
# Below it a GPU does nothing that anybody pays for: a desktop's clock, a monitoring agent.
IDLE_LOAD = 0.005


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim that holds the device. `seconds` since it was prepared; `load` and `memory_used` are its own part."""

    namespace: str
    claim: str
    pods: tuple[str, ...]
    request: str
    share: str
    seconds: float | None
    load: float | None
    memory_used: float | None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.claim}"


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process on a device that belongs to no claim of it."""

    pid: int
    command: str
    pod_uid: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that deserves a look: idle, foreign, fragmented, unreadable or unknown."""

    kind: Literal["idle", "foreign", "fragmented", "unreadable"]
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A GPU, or a MIG device on the GPU above it. Numbers are None where they are not known."""

    device: str
    uuid: str
    profile: str
    product: str
    state: State
    load: float | None
    memory_used: int | None
    memory_total: int | None
    power_watts: float | None
    temperature: int | None
    processes: int | None
    holders: tuple[Holder, ...] = ()
    watchers: tuple[Holder, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True, slots=True)
class Top:
    """One table. `seen_seconds` is how long the loads were watched; `taken` in seconds since 1970."""

    driver_version: str
    taken: float
    seen_seconds: float
    rows: tuple[Row, ...]
    problems: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every device could be read, or was left asleep; not so where no look at the node succeeded."""
        return all(row.state != "unreadable" for row in self.rows) and bool(self.rows or not self.problems)


class Watch:
    """Remembers the highest load of each device and its holders, so that idle means idle all the time.

    `clock`: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peaks: dict[tuple[str, tuple[str, ...]], float | None] = {}
        self._began: float | None = None

    def add(self, found: Iterable[Use]) -> None:
        """Take a reading."""
        if self._began is None:
            self._began = self._clock()
        before, self._peaks = self._peaks, {}
        for use in found:
            key = _watch_key(use)
            known = [value for value in (before.get(key), use.load) if value is not None]
            # Once not known, it cannot be said that it was idle.
            unknown = use.load is None or (key in before and before[key] is None)
            self._peaks[key] = None if unknown else max(known)

    def peak(self, use: Use) -> float | None:
        """Give the highest load while this device had these holders; None if it is not known."""
        return self._peaks.get(_watch_key(use))

    @property
    def seconds(self) -> float:
        """How long it has watched."""
        return 0.0 if self._began is None else self._clock() - self._began


def _watch_key(use: Use) -> tuple[str, tuple[str, ...]]:
    return use.uuid, tuple(sorted(each.ref.uid for each in use.holders))


def look(
    snapshot: Snapshot,
    held: Sequence[Allocation],
    watch: Watch,
    *,
    place_of: Callable[[int], Place | None],
    command_of: Callable[[int], str],
    now: float,
    idle_after_seconds: float = IDLE_AFTER_SECONDS,
) -> Top:
    """Give the table for one round of readings. `now` in seconds since 1970."""
    found = uses(snapshot, held, place_of=place_of, command_of=command_of)
    watch.add(found)
    cut = {use.gpu.uuid for use in found if use.mig is not None and use.holders}
    rows = tuple(
        _row(
            use,
            snapshot,
            watch,
            place_of=place_of,
            command_of=command_of,
            now=now,
            idle_after_seconds=idle_after_seconds,
            cut=use.mig is None and use.gpu.uuid in cut,
        )
        for use in found
    )
    rows += tuple(_passed_row(each, now=now) for each in held if parse_vfio_name(each.device))
    problems = [
        f"{each.code}: {each.subject}: {each.message.rstrip('.')}. {each.remedy}".rstrip()
        for each in snapshot.inventory.problems
    ]
    listed = {row.device for row in rows}
    problems += [
        f"claim {each.ref} holds {each.device}, which this node does not have"
        for each in held
        if each.device not in listed
    ]
    return Top(snapshot.inventory.driver_version, snapshot.taken, watch.seconds, rows, tuple(problems))


def _row(
    use: Use,
    snapshot: Snapshot,
    watch: Watch,
    *,
    place_of: Callable[[int], Place | None],
    command_of: Callable[[int], str],
    now: float,
    idle_after_seconds: float,
    cut: bool,
) -> Row:
    parts = {id(each.allocation): each for each in shares((use,), place_of=place_of)}
    holders: list[Holder] = []
    watchers: list[Holder] = []
    for each in use.allocations:
        part = parts[id(each)]
        holder = replace(_holder(each, now), load=part.load, memory_used=part.memory_used)
        (watchers if each.admin else holders).append(holder)
    error = snapshot.errors.get(use.gpu.uuid)
    strangers = tuple(_stranger(process, place_of, command_of) for process in use.foreign)
    read = use.reading is not None or use.mig_reading is not None
    asleep = use.gpu.uuid in snapshot.asleep
    idle = _idle_text(use, holders, watch, idle_after_seconds=idle_after_seconds)
    flags = [*(Flag("idle", idle),) * bool(idle), *_foreign_flags(strangers), *_mig_flags(use)]
    if not read and not asleep and use.mig is None:
        flags.append(Flag("unreadable", str(error) if error else "it did not answer in time"))
    return Row(
        device=use.device,
        uuid=use.uuid,
        profile=use.profile,
        product=use.gpu.product_name,
        state=_state(use, read=read, asleep=asleep, idle=bool(idle), strangers=bool(strangers), cut=cut),
        load=use.load,
        memory_used=use.memory.used if use.memory else None,
        memory_total=use.memory.total if use.memory else None,
        power_watts=use.reading.power_watts if use.reading else None,
        temperature=use.reading.temperature if use.reading else None,
        processes=len(use.processes) if read else None,
        holders=tuple(holders),
        watchers=tuple(watchers),
        strangers=strangers,
        flags=tuple(flags),
    )


def _holder(held: Allocation, now: float) -> Holder:
    pods = tuple(str(consumer) for consumer in held.consumers)
    seconds = None if held.prepared is None else max(0.0, now - held.prepared)
    return Holder(held.ref.namespace, held.ref.name, pods, held.request, held.share, seconds, None, None)


def _passed_row(held: Allocation, *, now: float) -> Row:
    """Give the line of a GPU that a claim has passed through: only the virtual machine knows what it does."""
    return Row(
        device=held.device, uuid="", profile="", product="passed through", state="held", load=None, memory_used=None,
        memory_total=None, power_watts=None, temperature=None, processes=None, holders=(_holder(held, now),),
    )  # fmt: skip


def _state(use: Use, *, read: bool, asleep: bool, idle: bool, strangers: bool, cut: bool) -> State:
    if asleep:
        return "asleep"
    if not read:
        return "unreadable"
    if not use.holders:
        if strangers:
            return "foreign"
        return "cut" if cut else "free"
    if use.load is None:
        return "unknown"
    if idle:
        return "idle"
    return "busy" if use.load > IDLE_LOAD else "held"


def _idle_text(use: Use, holders: Sequence[Holder], watch: Watch, *, idle_after_seconds: float) -> str:
    peak = watch.peak(use)
    ages = [holder.seconds for holder in holders if holder.seconds is not None]
    if peak is None or peak > IDLE_LOAD or not ages or len(ages) < len(holders):
        return ""
    youngest = min(ages)
    if youngest < idle_after_seconds:
        return ""
    return f"allocated {duration(youngest)}, {peak:.0%} (seen for {duration(watch.seconds)})"


def _foreign_flags(strangers: Sequence[Stranger]) -> list[Flag]:
    if not strangers:
        return []
    named = ", ".join(f"{each.pid} {each.command}".rstrip() for each in strangers[:3])
    more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
    return [Flag("foreign", f"processes without a claim: {named}{more}")]


def _stranger(
    process: ProcessReading, place_of: Callable[[int], Place | None], command_of: Callable[[int], str]
) -> Stranger:
    place = place_of(process.pid)
    return Stranger(
        process.pid, command_of(process.pid), place.pod_uid if place else "", process.memory_bytes
    )


def _mig_flags(use: Use) -> list[Flag]:
    space = mig_space(use.gpu) if use.mig is None else None
    if space is None or not space.free:
        return []
    best = best_hole(use.gpu)
    if best is None or space.largest_hole >= best:
        return []
    now = _profile_of_size(use.gpu, space.largest_hole)
    then = _profile_of_size(use.gpu, best)
    return [
        Flag(
            "fragmented",
            f"{space.free} of {space.total} memory slices free, room for {now or 'nothing'}; "
            f"moved together it would be {then}",
        )
    ]


def _profile_of_size(gpu: Gpu, size: int) -> str:
    """Give the profile that takes so many memory slices: the one with the most compute, without extras."""
    fitting = [
        profile
        for profile in gpu.mig_profiles
        if "+" not in profile.name and any(length == size for _, length in profile.placements)
    ]
    return max(fitting, key=lambda profile: profile.multiprocessors).name if fitting else ""


def best_hole(gpu: Gpu) -> int | None:
    """Give the largest placement, in memory slices, that would fit if what exists lay elsewhere; None if unknown.

    Every arrangement of the profiles that exist is tried: at most seven partitions.
    """
    choices = []
    for mig in gpu.mig_devices:
        places = tuple(place for place in mig.profile.placements)
        if not places:
            return None
        choices.append(places)
    # The ones with the fewest places first, equal ones in order.
    choices.sort(key=lambda places: (len(places), places))
    wanted = sorted(
        {place for profile in gpu.mig_profiles for place in profile.placements}, key=lambda p: -p[1]
    )
    best = 0

    def put(index: int, taken: frozenset[int], after: int) -> None:
        nonlocal best
        if index == len(choices):
            hole = next((size for start, size in wanted if taken.isdisjoint(range(start, start + size))), 0)
            best = max(best, hole)
            return
        for position, (start, size) in enumerate(choices[index]):
            pieces = frozenset(range(start, start + size))
            same = index > 0 and choices[index] == choices[index - 1]
            if (same and position <= after) or taken & pieces:
                continue
            put(index + 1, taken | pieces, position)

    put(0, frozenset(), -1)
    return best


def duration(seconds: float) -> str:
    """Give a time for people: `45 s`, `30 min`, `5 h`, `3 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size or (unit == "min" and seconds >= size):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def as_json(top: Top) -> dict[str, Any]:
    """Give the table for programs; keys have the names of the metrics' units."""
    return {
        "driverVersion": top.driver_version,
        "takenAt": top.taken,
        "seenSeconds": round(top.seen_seconds, 1),
        "devices": [_row_json(row) for row in top.rows],
        "problems": list(top.problems),
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "device": row.device,
        "uuid": row.uuid,
        "profile": row.profile or None,
        "product": row.product,
        "state": row.state,
        "utilizationRatio": row.load,
        "memoryUsedBytes": row.memory_used,
        "memoryTotalBytes": row.memory_total,
        "powerWatts": row.power_watts,
        "temperatureCelsius": row.temperature,
        "processes": row.processes,
        "holders": [_holder_json(each) for each in row.holders],
        "watchers": [_holder_json(each) for each in row.watchers],
        "foreignProcesses": [
            {
                "pid": each.pid,
                "command": each.command,
                "podUid": each.pod_uid or None,
                "memoryBytes": each.memory_bytes,
            }
            for each in row.strangers
        ],
        "flags": [{"kind": each.kind, "text": each.text} for each in row.flags],
    }


def _holder_json(holder: Holder) -> dict[str, Any]:
    return {
        "namespace": holder.namespace,
        "claim": holder.claim,
        "consumers": list(holder.pods),
        "request": holder.request,
        "share": holder.share or None,
        "allocatedSeconds": None if holder.seconds is None else round(holder.seconds),
        "utilizationRatio": holder.load,
        "memoryUsedBytes": holder.memory_used,
    }
