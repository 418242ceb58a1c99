"""Shared counters and capacity that run short: how much, and whether enough is free but not in one place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dra.allocator.capacity import consumed
from dra.allocator.model import AllocatedState, Device
from dra.values import Quantity

_ONE = 10**9
_POSITION = re.compile(r"-?\d+$")
_SET = re.compile(r"-?(counter-?set|counters?|shared)$")


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a device lacks.

    Attributes:
        place: what the amounts belong to: a counter set (a GPU) or the device itself.
        needs: amount by name, billionths; numbered counters (`memory-slice-3`) are added up under one name.
        left: likewise, what is left there.
        keys: the counters that are short, as (set, counter).
    """

    place: str
    needs: Mapping[str, int]
    left: Mapping[str, int]
    keys: tuple[tuple[str, str], ...] = ()

    @property
    def enough_here(self) -> bool:
        """Whether this place has enough of everything, only not where the device would sit."""
        return all(self.left.get(name, 0) >= amount for name, amount in self.needs.items())

    def usable(self, name: str) -> int:
        """Give what is left of one thing; nothing where another that the device needs has run out."""
        out = any(need > 0 and self.left.get(other, 0) <= 0 for other, need in self.needs.items())
        return 0 if out else self.left.get(name, 0)

    def __str__(self) -> str:
        """Give `memory: needs 40Gi, 20Gi left`."""
        if self.enough_here:
            return f"{self.place} has enough left, but not in one piece"
        parts = [
            f"{name}: needs {amount(need)}, {amount(max(self.left.get(name, 0), 0))} left"
            for name, need in self.needs.items()
            if self.left.get(name, 0) < need
        ]
        return f"{self.place}: {', '.join(parts)}"


def amount(nano: int) -> str:
    """Write billionths as people do: `40Gi`, `3`; large odd numbers rounded down to three digits and a unit."""
    units, rest = divmod(nano, 10**9)
    if rest or units < 1024:
        return str(Quantity(nano))
    exact = str(Quantity(nano, "binary"))
    if len(exact) <= 8:
        return exact
    for suffix, size in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if units >= size:
            return f"{units / size:.1f}{suffix}"
    return exact


def counter_shortage(device: Device, left: Mapping[tuple[str, str], int]) -> Shortage | None:
    """Compare what a device takes of shared counters with what is left; None if there is enough."""
    keys = tuple(key for key, need in device.consumes.items() if left.get(key, 0) < need)
    if not keys:
        return None
    counter_set = keys[0][0]
    needs: dict[str, int] = {}
    for (name, counter), need in device.consumes.items():
        if name == counter_set:
            base = _POSITION.sub("", counter)
            needs[base] = needs.get(base, 0) + need
    have: dict[str, int] = {}
    for (name, counter), value in left.items():
        base = _POSITION.sub("", counter)
        if name == counter_set and base in needs:
            # A place in a row is taken whole: what a GPU that is held as a whole leaves of it is of no use.
            usable = value if base == counter else value - value % _ONE
            have[base] = have.get(base, 0) + max(usable, 0)
    return Shortage(_SET.sub("", counter_set) or counter_set, needs, have, keys)


def capacity_shortage(device: Device, asked: Mapping[str, int], allocated: AllocatedState) -> Shortage | None:
    """Compare what a request takes of a shared device with what is left of it; None if there is enough."""
    takes = consumed(device, asked)
    if takes is None:
        return None
    used = allocated.capacity.get(device.id, {})
    capacities = device.raw.get("capacity") or {}
    left = {name: Quantity.of(capacities[name]["value"]).nano - used.get(name, 0) for name in takes}
    if all(left[name] >= need for name, need in takes.items()):
        return None
    return Shortage(device.id.device, takes, left)


def is_fragmented(shortages: Iterable[Shortage]) -> bool:
    """Tell whether the places together have enough for one of the wanted devices, though no place alone has it."""
    by_need: dict[tuple[tuple[str, int], ...], dict[str, Shortage]] = {}
    for shortage in shortages:
        by_need.setdefault(tuple(sorted(shortage.needs.items())), {})[shortage.place] = shortage
    for needs, places in by_need.items():
        if all(sum(max(item.usable(name), 0) for item in places.values()) >= need for name, need in needs):
            return True
    return False


def pieces(shortages: Iterable[Shortage]) -> str:
    """Give what is left in each place, the most first: `gpu-1 40Gi, gpu-0 20Gi of memory`."""
    places: dict[str, tuple[int, str]] = {}
    for shortage in shortages:
        name = main_name(shortage)
        places[shortage.place] = (max(shortage.usable(name), 0), name)
    ordered = sorted(places.items(), key=lambda item: (-item[1][0], item[0]))
    if not ordered:
        return ""
    shown = ", ".join(f"{place} {amount(left)}" for place, (left, _) in ordered[:8])
    return f"{shown}{' …' if len(ordered) > 8 else ''} of {ordered[0][1][1]}"


def main_name(shortage: Shortage) -> str:
    """Give the name that people count in: of what is short, or else of everything, memory if it is there."""
    short = [name for name, need in shortage.needs.items() if shortage.usable(name) < need]
    names = sorted(short or shortage.needs)
    return next((name for name in names if name.rpartition("/")[2] == "memory"), names[0])
