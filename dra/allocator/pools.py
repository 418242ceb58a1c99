"""Slices to pools, as one node sees them.

Source: kubelet-independent rules of the structured allocator: only the newest generation of a pool counts; a pool
is complete when it has as many slices as each of them says; it is invalid when two devices or two counter
sets have one name, or a device consumes a counter that no set of the pool has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra.allocator.model import AllocatedState, Device, DeviceId, Features, Pool
from dra.allocator.nodes import node_matches
from dra.values import Quantity


@dataclass(slots=True)
class ParsedSlice:
    """A slice that was read once and serves every node."""

    raw: Mapping[str, Any]
    name: str
    driver: str
    pool: str
    generation: int
    count: int
    devices: tuple[Device, ...]
    counters: Mapping[tuple[str, str], int]
    # Names of counter sets, with repetitions.
    counter_sets: tuple[str, ...]
    per_device: bool


def parse_slices(slices: Iterable[Mapping[str, Any]]) -> list[ParsedSlice]:
    """Read v1 slices and sort them by name; equal names keep their order."""
    return sorted(map(_parse_slice, slices), key=lambda item: item.name)


def _parse_slice(raw: Mapping[str, Any]) -> ParsedSlice:
    spec = raw["spec"]
    driver, pool = spec["driver"], spec["pool"]
    per_device = bool(spec.get("perDeviceNodeSelection"))
    devices = tuple(
        _parse_device(device, DeviceId(driver, pool["name"], device["name"]), spec)
        for device in spec.get("devices") or []
    )
    counters: dict[tuple[str, str], int] = {}
    names: list[str] = []
    for counter_set in spec.get("sharedCounters") or []:
        names.append(counter_set["name"])
        for name, counter in (counter_set.get("counters") or {}).items():
            counters[counter_set["name"], name] = Quantity.of(counter["value"]).nano
    return ParsedSlice(
        raw=raw,
        name=raw.get("metadata", {}).get("name", ""),
        driver=driver,
        pool=pool["name"],
        generation=pool.get("generation", 0),
        count=pool.get("resourceSliceCount", 0),
        devices=devices,
        counters=counters,
        counter_sets=tuple(names),
        per_device=per_device,
    )


def _parse_device(raw: Mapping[str, Any], device_id: DeviceId, spec: Mapping[str, Any]) -> Device:
    consumes: dict[tuple[str, str], int] = {}
    for entry in raw.get("consumesCounters") or []:
        for name, counter in (entry.get("counters") or {}).items():
            key = (entry["counterSet"], name)
            consumes[key] = consumes.get(key, 0) + Quantity.of(counter["value"]).nano
    selection = raw if spec.get("perDeviceNodeSelection") else spec
    return Device(
        id=device_id,
        raw=raw,
        multi=bool(raw.get("allowMultipleAllocations")),
        consumes=consumes,
        taints=tuple(raw.get("taints") or ()),
        binds_conditions=tuple(raw.get("bindingConditions") or ()),
        binding_failure_conditions=tuple(raw.get("bindingFailureConditions") or ()),
        binds_to_node=bool(raw.get("bindsToNode")),
        node_name=selection.get("nodeName") or "",
        node_selector=selection.get("nodeSelector"),
    )


def _targets(selection: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    if selection.get("nodeName"):
        return bool(selection["nodeName"] == node.get("metadata", {}).get("name"))
    if selection.get("allNodes"):
        return True
    selector = selection.get("nodeSelector")
    return selector is not None and node_matches(selector, node)


def counters_left(pool: Pool, allocated: AllocatedState) -> dict[tuple[str, str], int]:
    """Give what is left of a pool's counters after all that is allocated and still published."""
    left = dict(pool.counters)
    for device in pool.all_devices:
        if device.consumes and (device.id in allocated.devices or device.id in allocated.shared):
            for counter, amount in device.consumes.items():
                left[counter] = left.get(counter, 0) - amount
    return left


class PoolIndex:
    """All slices of a cluster by pool, and the pools that each node has to look at."""

    def __init__(self, slices: Iterable[Mapping[str, Any]]) -> None:
        self._pools: dict[tuple[str, str], list[ParsedSlice]] = {}
        self._by_node: dict[str, set[tuple[str, str]]] = {}
        self._anywhere: set[tuple[str, str]] = set()
        for item in parse_slices(slices):
            key = (item.driver, item.pool)
            self._pools.setdefault(key, []).append(item)
            name = item.raw["spec"].get("nodeName")
            if name:
                self._by_node.setdefault(name, set()).add(key)
            else:
                self._anywhere.add(key)

    def for_node(self, node: Mapping[str, Any], features: Features) -> list[Pool]:
        """Give the pools that a node may use, in the order in which they are searched.

        Pools without binding conditions come first; within both halves by driver and name.
        """
        name = node.get("metadata", {}).get("name", "")
        keys = sorted(self._anywhere | self._by_node.get(name, set()))
        pools = [pool for key in keys if (pool := _make_pool(self._pools[key], node, features)) is not None]
        return [pool for pool in pools if not pool.has_binding_conditions] + [
            pool for pool in pools if pool.has_binding_conditions
        ]


def _make_pool(slices: Sequence[ParsedSlice], node: Mapping[str, Any], features: Features) -> Pool | None:
    # A pool that moves to another node keeps its old generation for the old node until those slices go.
    targeting = [item.generation for item in slices if _slice_targets(item, node, features)]
    if not targeting:
        return None
    newest = max(targeting)
    current = [item for item in slices if item.generation == newest]
    pool = Pool(driver=current[0].driver, name=current[0].pool, generation=newest, found=len(current))
    pool.wanted = max(item.count for item in current)
    pool.changed = max(str(item.raw.get("metadata", {}).get("creationTimestamp") or "") for item in current)
    for item in current:
        if item.per_device and not features.partitionable_devices:
            continue
        whole = not item.per_device and _targets(item.raw["spec"], node)
        pool.counters.update(item.counters)
        for device in item.devices:
            pool.all_devices.append(device)
            if _targets(device.raw, node) if item.per_device else whole:
                pool.devices.append(device)
    pool.incomplete = any(item.count != len(current) for item in current)
    pool.invalid = _find_fault(pool, current, features)
    pool.devices = [device for device in pool.devices if _is_usable(device, features)]
    return pool


def _slice_targets(item: ParsedSlice, node: Mapping[str, Any], features: Features) -> bool:
    if not item.per_device:
        return _targets(item.raw["spec"], node)
    return features.partitionable_devices and any(_targets(device.raw, node) for device in item.devices)


def _is_usable(device: Device, features: Features) -> bool:
    """Tell whether the enabled gates know all that the device asks of a scheduler; others must leave it alone."""
    if device.binds_conditions and not features.device_binding:
        return False
    return features.partitionable_devices or not device.raw.get("consumesCounters")


def _find_fault(pool: Pool, slices: Sequence[ParsedSlice], features: Features) -> str:
    seen: set[str] = set()
    sets: set[str] = set()
    for item in slices:
        for name in item.counter_sets:
            if name in sets:
                return f"counter set {name} is defined twice"
            sets.add(name)
    for device in pool.all_devices:
        if device.id.device in seen:
            return f"device {device.id.device} is listed twice"
        seen.add(device.id.device)
        if not features.partitionable_devices:
            continue
        for entry in device.raw.get("consumesCounters") or ():
            if entry["counterSet"] not in sets:
                return f"device {device.id.device} consumes from unknown counter set {entry['counterSet']}"
        for counter_set, counter in device.consumes:
            if (counter_set, counter) not in pool.counters:
                return f"device {device.id.device} consumes unknown counter {counter_set}/{counter}"
    return ""
