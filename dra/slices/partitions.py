"""Dynamic MIG: which of a GPU's forms are offered, its counter set, and a device for every placement. Pure.

A GPU and its possible partitions draw on one counter set, so that the scheduler gives out only what can stand side
by side. Nothing that is published changes when a partition is made or destroyed for a claim.

Source: KEP-4815; reference driver, dynamic MIG.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from dra.api.limits import MAX_COUNTERS
from dra.inventory.model import Gpu, Inventory, MigProfile
from dra.inventory.names import GpuName
from dra.slices.devices import SliceProblem, gpu_device, partition_device, profile_amounts
from dra.slices.features import ServerFeatures
from dra.slices.rules import check_counters
from dra.values import Quantity

MigMode = Literal["dynamic", "static", "none"]

# From this compute capability on (Hopper), MIG mode is switched without a reset, so whole and cut are both on offer.
_SWITCHES_LIVE = (9, 0)
# Capacities as counters.
_COUNTERS = {
    "memory": "memory",
    "multiprocessors": "multiprocessors",
    "copyEngines": "copy-engines",
    "decoders": "decoders",
    "encoders": "encoders",
    "jpegEngines": "jpeg-engines",
    "ofaEngines": "ofa-engines",
}
_MEMORY_SLICE = "memory-slice-"
# What the whole GPU takes of each memory slice.
_TOUCH = "1m"

Counters = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Forms:
    """What of a GPU is listed: the whole, the partitions that exist, or every partition that could."""

    whole: bool
    existing: bool = False
    possible: bool = False


def plan_forms(gpu: Gpu, *, mig_mode: MigMode, features: ServerFeatures) -> Forms:
    """Say what of a GPU is listed.

    With partitions made on demand: from Hopper on the whole GPU and all placements; before, whichever the MIG mode
    allows, for it is not switched while the node runs. A GPU on which somebody made partitions by hand, or that
    somebody put in MIG mode, is not ours to recut as a whole.
    """
    if mig_mode == "none":
        return Forms(whole=not gpu.mig_enabled)
    static = Forms(whole=not gpu.mig_enabled, existing=gpu.mig_enabled)
    by_hand = any(not mig.ours for mig in gpu.mig_devices)
    if mig_mode == "static" or not features.partitionable or by_hand or not _placements(gpu):
        return static
    if gpu.compute_capability >= _SWITCHES_LIVE:
        # Also while ours lie on it: what is published does not change with them.
        mode_by_hand = gpu.mig_enabled and not gpu.mig_mode_ours
        return Forms(whole=not mode_by_hand, possible=True)
    return Forms(whole=False, possible=True) if gpu.mig_enabled else static


def as_published(
    inventory: Inventory, *, mode_of: Callable[[Gpu], MigMode], features: ServerFeatures
) -> Inventory:
    """Leave out of an inventory what no pool shows: the partitions of GPUs that are offered in all their forms.

    Two inventories that are equal then publish the same, though partitions were made or destroyed in between.
    """

    def shown(gpu: Gpu) -> Gpu:
        forms = plan_forms(gpu, mig_mode=mode_of(gpu), features=features)
        if not forms.possible:
            return gpu
        return replace(
            gpu, mig_devices=(), mig_enabled=gpu.mig_enabled and not forms.whole, mig_mode_ours=forms.whole
        )

    return replace(inventory, gpus=tuple(map(shown, inventory.gpus)))


def counter_set_name(gpu: Gpu) -> str:
    """Give the name of a GPU's counter set. Source: reference driver."""
    return f"{GpuName(gpu.minor)}-counter-set"


def counter_set(gpu: Gpu, problems: list[SliceProblem]) -> dict[str, Any] | None:
    """Give the counter set of a GPU; None, and a problem, if no server would take it.

    Each value is the most that any profile needs, which is what the profile over the whole GPU needs.
    """
    most = {name: max(profile_amounts(each)[name] for each in gpu.mig_profiles) for name in _COUNTERS}
    slices = max(start + size for _, start, size in _placements(gpu))
    counters = _counters(most, range(slices))
    wrong = [broken.message for broken in check_counters(counters, "counters")]
    if len(counters) > MAX_COUNTERS:
        wrong.append(f"{len(counters)} counters, at most {MAX_COUNTERS}")
    if wrong:
        name = str(GpuName(gpu.minor))
        why = f"{name}: its partitions cannot be offered on demand: {'; '.join(wrong)}"
        problems.append(SliceProblem(name, "sharedCounters", "DRA-SLICE-COUNTERS", why, "Report it."))
        return None
    return {"name": counter_set_name(gpu), "counters": counters}


def whole_device(
    gpu: Gpu, inventory: Inventory, shared: dict[str, Any], problems: list[SliceProblem]
) -> dict[str, Any]:
    """Give the whole GPU, which leaves no room for any partition.

    Its memory is NVML's total, as without partitions: no selector changes its meaning. The rest are the largest
    partition's.

    Of each memory slice it takes a thousandth. That excludes every partition, each of which takes whole slices, and is
    excluded by each; and it leaves the room that monitoring needs: Kubernetes up to 1.37 counts a device once more for
    admin access (its issue 140729), so that a GPU that took all counters could not be monitored while it is in use.
    """
    device = gpu_device(gpu, inventory, problems)
    capacity = dict(device.get("capacity", {}))
    for name in _COUNTERS:
        if name != "memory":
            most = max(profile_amounts(each)[name] for each in gpu.mig_profiles)
            capacity[name] = {"value": str(Quantity.of(most, binary=True))}
    touched = {name: {"value": _TOUCH} for name in touched_counters(shared)}
    consumes = [{"counterSet": shared["name"], "counters": touched}]
    return {**device, "capacity": capacity, "consumesCounters": consumes}


def touched_counters(shared: dict[str, Any]) -> Counters:
    """Give the counters, with all there is of them, of which the whole GPU takes a little: those of memory slices."""
    return {name: each for name, each in shared["counters"].items() if name.startswith(_MEMORY_SLICE)}


def possible_devices(gpu: Gpu, inventory: Inventory, problems: list[SliceProblem]) -> list[dict[str, Any]]:
    """Give a device for every placement of every profile, in the order in which they are best given out."""
    devices: list[dict[str, Any]] = []
    for profile, start, size in ordered_placements(gpu):
        device = partition_device(gpu, profile, start, inventory=inventory, problems=problems)
        counters = _counters(profile_amounts(profile), range(start, start + size))
        device["consumesCounters"] = [{"counterSet": counter_set_name(gpu), "counters": counters}]
        devices.append(device)
    return devices


def ordered_placements(gpu: Gpu) -> list[tuple[MigProfile, int, int]]:
    """Give (profile, start, size) of every placement, in the order in which first-fit packs well.

    Small ones come first, and of one size those with fewer processors and engines, so that a request that says
    little takes little. Of one profile that place comes first which is in the way of the fewest others, counted by
    their size; among equals the last, as the driver itself does. On the usual tables this fills a GPU from its end,
    where the odd slice is that no 2g can use, and keeps the half in which alone a 4g can lie.
    """
    every = _placements(gpu)

    def in_the_way(start: int, size: int) -> int:
        return sum(
            other_size
            for _, other, other_size in every
            if start < other + other_size and other < start + size
        )

    def rank(placement: tuple[MigProfile, int, int]) -> tuple[int, ...]:
        profile, start, size = placement
        engines = (
            profile.copy_engines
            + profile.decoders
            + profile.encoders
            + profile.jpeg_engines
            + profile.ofa_engines
        )
        kind = (size, profile.multiprocessors, engines, profile.profile_id)
        return (*kind, in_the_way(start, size), -start)

    return sorted(every, key=lambda each: (rank(each), each[0].name))


def _placements(gpu: Gpu) -> list[tuple[MigProfile, int, int]]:
    return [
        (profile, start, size)
        for profile in gpu.mig_profiles
        for start, size in profile.placements
        if size > 0 and start >= 0
    ]


def _counters(amounts: dict[str, int], slices: range) -> Counters:
    counters = {
        counter: {"value": str(Quantity.of(amounts[name], binary=True))}
        for name, counter in _COUNTERS.items()
    }
    return counters | {f"{_MEMORY_SLICE}{number}": {"value": "1"} for number in slices}
