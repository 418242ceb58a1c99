"""Which device and which counter set stands in which slice. Pure.

From Kubernetes 1.35 counter sets stand in slices of their own; before, each beside the devices that use it. A GPU's
devices stay together where they fit, so that news about one GPU changes one slice.

Source: resource.k8s.io validation of Kubernetes 1.34 and 1.36.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dra.api.limits import (
    MAX_CONSUMED_IN_SLICE,
    MAX_COUNTER_SETS,
    MAX_DEVICES,
    MAX_DEVICES_WITH_EXTRAS,
)
from dra.slices.devices import SliceProblem
from dra.slices.features import ServerFeatures
from dra.slices.validate import has_extras


@dataclass(frozen=True, slots=True)
class SliceContent:
    """What stands in one slice, in v1's JSON.

    From 1.35 a slice holds devices or counter sets, before it may hold both; neither is an empty slice. The lists
    are not to be changed.
    """

    devices: list[dict[str, Any]] | None
    shared_counters: list[dict[str, Any]] | None = None

    def spec_part(self) -> dict[str, Any]:
        """Give the part of `spec` that is this content. Absent lists have no key: the server tests for the key."""
        part: dict[str, Any] = {}
        if self.devices is not None:
            part["devices"] = self.devices
        if self.shared_counters is not None:
            part["sharedCounters"] = self.shared_counters
        return part


# The counter set that a GPU needs, and what is listed of it.
Offer = tuple[dict[str, Any] | None, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """What is listed of one GPU, in order, and the counter set that it draws on."""

    devices: tuple[dict[str, Any], ...]
    counter_set: dict[str, Any] | None = None


def lay_out(
    groups: Sequence[GpuGroup], features: ServerFeatures, problems: list[SliceProblem]
) -> tuple[SliceContent, ...]:
    """Give the slices: always at least one."""
    sets = [group.counter_set for group in groups if group.counter_set is not None]
    if not sets:
        listed = [device for group in groups for device in group.devices]
        return tuple(SliceContent(chunk) for chunk in _chunks(listed, features))
    if not features.counters_apart:
        return tuple(_combined(groups, problems))
    apart = [
        SliceContent(None, sets[start : start + MAX_COUNTER_SETS])
        for start in range(0, len(sets), MAX_COUNTER_SETS)
    ]
    return (*apart, *(SliceContent(chunk) for chunk in _packed(groups)))


def _chunks(devices: Sequence[dict[str, Any]], features: ServerFeatures) -> list[list[dict[str, Any]]]:
    """Split devices without counters.

    Where taints can be, room is kept for them: the first taint would otherwise move devices from slice to
    slice, and with them the generation of the whole pool.
    """
    roomy = not features.device_taints and not any(map(has_extras, devices))
    size = MAX_DEVICES if roomy else MAX_DEVICES_WITH_EXTRAS
    return [list(devices[start : start + size]) for start in range(0, len(devices), size)] or [[]]


def _packed(groups: Sequence[GpuGroup]) -> Iterator[list[dict[str, Any]]]:
    """Fill slices with whole groups; only a group that is larger than a slice is split."""
    current: list[dict[str, Any]] = []
    for group in groups:
        if current and len(current) + len(group.devices) > MAX_DEVICES_WITH_EXTRAS:
            yield current
            current = []
        current = [*current, *group.devices]
        while len(current) > MAX_DEVICES_WITH_EXTRAS:
            yield current[:MAX_DEVICES_WITH_EXTRAS]
            current = current[MAX_DEVICES_WITH_EXTRAS:]
    if current:
        yield current


def _combined(groups: Sequence[GpuGroup], problems: list[SliceProblem]) -> Iterator[SliceContent]:
    """One slice for each GPU with counters; the others in between, in order."""
    waiting: list[GpuGroup] = []
    for group in groups:
        if group.counter_set is None:
            waiting.append(group)
            continue
        yield from (SliceContent(chunk) for chunk in _packed(waiting))
        waiting = []
        yield SliceContent(_fitting(group, problems), [group.counter_set])
    yield from (SliceContent(chunk) for chunk in _packed(waiting))


def _fitting(group: GpuGroup, problems: list[SliceProblem]) -> list[dict[str, Any]]:
    """Leave out what has no room beside its counter set; the last, the whole GPU where it is listed, stays."""
    if not group.devices:
        return []
    last = group.devices[-1]
    kept: list[dict[str, Any]] = []
    consumed = _consumed(last)
    for device in group.devices[:-1]:
        consumed += _consumed(device)
        if len(kept) + 1 < MAX_DEVICES_WITH_EXTRAS and consumed <= MAX_CONSUMED_IN_SLICE:
            kept.append(device)
            continue
        name = str(device["name"])
        problems.append(
            SliceProblem(
                name, "name", "DRA-SLICE-ROOM",
                f"{name}: it is left out, for before Kubernetes 1.35 all devices of a GPU must stand in one slice, "
                f"which has room for {MAX_DEVICES_WITH_EXTRAS} devices and {MAX_CONSUMED_IN_SLICE} counters",
                "Upgrade to Kubernetes 1.35.",
            )
        )  # fmt: skip
    return [*kept, last]


def _consumed(device: dict[str, Any]) -> int:
    return sum(len(entry["counters"]) for entry in device.get("consumesCounters", ()))
