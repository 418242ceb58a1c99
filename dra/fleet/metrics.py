"""What a fleet has, from its slices and claims: GPUs by product and state, and memory slices that nobody can get.

A GPU counts once, whole or cut. Its memory slices are *stranded* where they are free and no placement that is published
fits on them beside what is given out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dra.diagnose.policy import FleetGpu, fleet_gpus
from dra.fleet.copies import MEMORY_SLICE, Copies
from dra.inventory.allocations import sides_in_pool
from dra.inventory.names import GpuName, MigName, parse_device_name
from dra.kube.resources import RESOURCE_CLAIMS, RESOURCE_SLICES
from dra.telemetry.families import FLEET_GPUS, FLEET_MEMORY_SLICES
from dra.telemetry.metrics import Samples, samples_of

_STATES = ("allocated", "tainted", "free")
_SLICE_STATES = ("allocated", "free", "stranded")


@dataclass(slots=True)
class _Gpu:
    """Devices of one GPU by name: the memory slices that each takes, and which of them are tainted away."""

    places: dict[str, frozenset[str]] = field(default_factory=dict)
    open: bool = False


def fleet_samples(
    slices: Iterable[Mapping[str, Any]], claims: Iterable[Mapping[str, Any]], *, driver: str
) -> tuple[Samples, Samples]:
    """Give `dra_fleet_gpus` and `dra_fleet_memory_slices`. Pure."""
    listed, asked = tuple(slices), tuple(claims)
    gpus = fleet_gpus(listed, asked, driver=driver)
    offers = _offers(listed, driver)
    given = _given(asked, driver, _sides(listed, driver))
    counts: Counter[tuple[str, str]] = Counter()
    parts: Counter[tuple[str, str]] = Counter()
    for gpu in gpus:
        offer = offers.get((gpu.node, gpu.device), _Gpu())
        product = gpu.identity.product
        state = "allocated" if gpu.claims else "free" if offer.open else "tainted"
        counts[product, state] += 1
        for name, number in _memory_slices(gpu, offer, given).items():
            parts[product, name] += number
    products = sorted({gpu.identity.product for gpu in gpus})
    cut = sorted({product for product, _ in parts})
    return (
        samples_of(
            FLEET_GPUS,
            [((product, state), float(counts[product, state])) for product in products for state in _STATES],
        ),
        samples_of(
            FLEET_MEMORY_SLICES,
            [((product, state), float(parts[product, state])) for product in cut for state in _SLICE_STATES],
        ),
    )


def _offers(slices: Iterable[Mapping[str, Any]], driver: str) -> dict[tuple[str, str], _Gpu]:
    found: dict[tuple[str, str], _Gpu] = {}
    for each in slices:
        spec = each.get("spec") or {}
        if spec.get("driver") != driver:
            continue
        for device in spec.get("devices") or ():
            name = parse_device_name(str(device.get("name") or ""))
            if not isinstance(name, GpuName | MigName):
                continue
            gpu = found.setdefault((str(spec.get("nodeName")), str(GpuName(name.minor))), _Gpu())
            away = any(taint.get("effect") != "None" for taint in device.get("taints") or ())
            gpu.open = gpu.open or not away
            taken = frozenset(
                counter
                for consumed in device.get("consumesCounters") or ()
                for counter in consumed.get("counters") or ()
                if counter.startswith(MEMORY_SLICE)
            )
            if taken:
                gpu.places[str(device["name"])] = taken
    return found


def _sides(slices: Iterable[Mapping[str, Any]], driver: str) -> dict[str, dict[str, str]]:
    """Give which GPU each `gpu-vfio-<index>` is, by pool."""
    pools: dict[str, list[Mapping[str, Any]]] = {}
    for each in slices:
        spec = each.get("spec") or {}
        if spec.get("driver") == driver:
            pools.setdefault(str((spec.get("pool") or {}).get("name")), []).extend(spec.get("devices") or ())
    return {pool: sides_in_pool(devices) for pool, devices in pools.items()}


def _given(
    claims: Iterable[Mapping[str, Any]], driver: str, sides: Mapping[str, Mapping[str, str]]
) -> dict[str, set[str]]:
    """Give the devices that are allocated, by pool; access for monitoring takes nothing."""
    found: dict[str, set[str]] = {}
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            if result.get("driver") == driver and not result.get("adminAccess"):
                pool, device = str(result.get("pool")), str(result.get("device"))
                found.setdefault(pool, set()).add(sides.get(pool, {}).get(device, device))
    return found


def _memory_slices(gpu: FleetGpu, offer: _Gpu, given: Mapping[str, set[str]]) -> dict[str, int]:
    every = frozenset(part for taken in offer.places.values() for part in taken)
    if not every:
        return {}
    # A pool has its node's name.
    taken = frozenset(
        part for name in given.get(gpu.node, ()) for part in offer.places.get(name, frozenset())
    )
    left = every - taken
    usable = frozenset(
        part
        for name, parts in offer.places.items()
        if isinstance(parse_device_name(name), MigName) and parts <= left
        for part in parts
    )
    return {"allocated": len(taken), "free": len(left & usable), "stranded": len(left - usable)}


class FleetMetrics:
    """Counts when somebody scrapes: a collector of the registry.

    Args:
        copies: of the slices, while this replica leads; else None. If each replica spoke for the fleet, a sum over
            them would count every GPU twice.
    """

    def __init__(self, copies: Callable[[], Copies | None], *, driver: str) -> None:
        self._copies, self._driver = copies, driver

    def __call__(self) -> Iterable[Samples]:
        """Ask for the claims, and count. Raises DraError, which costs the scrape these families."""
        copies = self._copies()
        if copies is None:
            return ()
        return fleet_samples(copies.all(RESOURCE_SLICES), copies.all(RESOURCE_CLAIMS), driver=self._driver)
