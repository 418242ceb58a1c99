"""The API's rules for slices and for the pool they make, checked before anything is sent. Pure.

What the server would refuse keeps a whole node stale, so it is found here, with the device and field at fault.
The rules of the pool are the scheduler's: it takes nothing from an invalid pool.

Source: resource.k8s.io/v1 validation and the structured allocator of Kubernetes 1.36.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dra.api.limits import (
    MAX_CONSUMED_IN_SLICE,
    MAX_COUNTER_SETS,
    MAX_COUNTERS,
    MAX_COUNTERS_IN_SLICE,
    MAX_DEVICES,
    MAX_DEVICES_WITH_EXTRAS,
    MAX_DRIVER,
    MAX_POOL,
)
from dra.slices.rules import (
    Violation,
    check_counters,
    check_device,
    lists_of,
)
from dra.values import is_dns_label, is_dns_subdomain

_SELECTORS = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_DEVICE_SELECTORS = ("nodeName", "nodeSelector", "allNodes")


def has_extras(device: Mapping[str, Any]) -> bool:
    """Whether a device halves the room in its slice."""
    if device.get("taints") or device.get("consumesCounters"):
        return True
    attributes = device.get("attributes") or {}
    return any(lists_of(attribute) for attribute in attributes.values())


def validate_slices(
    specs: Sequence[Mapping[str, Any]], *, counters_apart: bool = True, devices_too: bool = True
) -> list[Violation]:
    """Give every broken rule of a pool's ResourceSlice specs (v1 shape); empty if they may be published.

    Args:
        specs: all of one pool and generation.
        counters_apart: the rules from 1.35 on; before, counter sets stand beside the devices that use them.
        devices_too: also check each device by itself.
    """
    found: list[Violation] = []
    for index, spec in enumerate(specs):
        path = f"slices[{index}].spec"
        found += _check_spec(spec, path, devices_too=devices_too)
        found += _check_apart(spec, path) if counters_apart else _check_combined(spec, path)
    found += _check_pool(specs)
    return found


def _check_apart(spec: Mapping[str, Any], path: str) -> Iterator[Violation]:
    if spec.get("sharedCounters") and spec.get("devices") is not None:
        yield Violation(path, "devices and sharedCounters exclude each other in one slice")


def _check_combined(spec: Mapping[str, Any], path: str) -> Iterator[Violation]:
    sets = spec.get("sharedCounters") or []
    count = sum(len(each.get("counters") or {}) for each in sets)
    if count > MAX_COUNTERS_IN_SLICE:
        yield Violation(
            f"{path}.sharedCounters", f"{count} counters in all, at most {MAX_COUNTERS_IN_SLICE} before 1.35"
        )
    known = {each.get("name") for each in sets}
    consumed = 0
    for index, device in enumerate(spec.get("devices") or []):
        for entry in device.get("consumesCounters") or []:
            consumed += len(entry.get("counters") or {})
            if entry.get("counterSet") not in known:
                yield Violation(
                    f"{path}.devices[{index}].consumesCounters",
                    f"set {entry.get('counterSet')!r} is not in the same slice, as it must be before 1.35",
                )
    if consumed > MAX_CONSUMED_IN_SLICE:
        yield Violation(
            f"{path}.devices",
            f"{consumed} counters are used in all, at most {MAX_CONSUMED_IN_SLICE} before 1.35",
        )


def _check_spec(spec: Mapping[str, Any], path: str, *, devices_too: bool) -> Iterator[Violation]:
    driver = str(spec.get("driver", ""))
    if not is_dns_subdomain(driver, limit=MAX_DRIVER):
        yield Violation(
            f"{path}.driver", f"{driver!r} is no DNS subdomain of at most {MAX_DRIVER} characters"
        )
    yield from _check_pool_field(spec.get("pool") or {}, f"{path}.pool")
    yield from _check_selection(spec, path)
    yield from _check_counter_sets(spec.get("sharedCounters") or [], f"{path}.sharedCounters")
    devices = spec.get("devices") or []
    limit = MAX_DEVICES_WITH_EXTRAS if any(map(has_extras, devices)) else MAX_DEVICES
    if len(devices) > limit:
        yield Violation(f"{path}.devices", f"{len(devices)} devices, at most {limit}")
    per_device = spec.get("perDeviceNodeSelection") is True
    for index, device in enumerate(devices):
        where = f"{path}.devices[{index}]"
        if devices_too:
            yield from check_device(device, where)
        given = [name for name in _DEVICE_SELECTORS if device.get(name) is not None]
        if (len(given) == 1) != per_device or len(given) > 1 or device.get("allNodes") is False:
            yield Violation(where, "a device has one node selection with perDeviceNodeSelection, else none")


def _check_pool_field(pool: Mapping[str, Any], path: str) -> Iterator[Violation]:
    name = str(pool.get("name", ""))
    if not 0 < len(name) <= MAX_POOL or not all(is_dns_subdomain(part) for part in name.split("/")):
        yield Violation(f"{path}.name", f"{name!r} is no list of DNS subdomains joined by '/'")
    if not _is_count(pool.get("generation", 0), least=0):
        yield Violation(f"{path}.generation", "the generation must be a number from 0")
    if not _is_count(pool.get("resourceSliceCount"), least=1):
        yield Violation(f"{path}.resourceSliceCount", "the number of slices must be at least 1")


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _check_selection(spec: Mapping[str, Any], path: str) -> Iterator[Violation]:
    given = [name for name in _SELECTORS if spec.get(name) is not None]
    if len(given) != 1:
        yield Violation(path, f"exactly one of {', '.join(_SELECTORS)} is required")
    node = spec.get("nodeName")
    if node is not None and not is_dns_subdomain(str(node)):
        yield Violation(f"{path}.nodeName", f"{node!r} is no node name")
    for name in ("allNodes", "perDeviceNodeSelection"):
        if spec.get(name) is False:
            yield Violation(f"{path}.{name}", "must be true or absent")
    selector = spec.get("nodeSelector")
    if selector is not None and len(selector.get("nodeSelectorTerms") or []) != 1:
        yield Violation(f"{path}.nodeSelector", "exactly one term is required")


def _check_counter_sets(sets: Sequence[Mapping[str, Any]], path: str) -> Iterator[Violation]:
    if len(sets) > MAX_COUNTER_SETS:
        yield Violation(path, f"{len(sets)} counter sets, at most {MAX_COUNTER_SETS}")
    for index, each in enumerate(sets):
        where = f"{path}[{index}]"
        if not is_dns_label(str(each.get("name", ""))):
            yield Violation(f"{where}.name", f"{each.get('name')!r} is no DNS label")
        counters = each.get("counters") or {}
        if not 0 < len(counters) <= MAX_COUNTERS:
            yield Violation(f"{where}.counters", f"{len(counters)} counters, from 1 to {MAX_COUNTERS}")
        yield from check_counters(counters, f"{where}.counters")


def _check_pool(specs: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    devices = [device for spec in specs for device in spec.get("devices") or []]
    for name, count in Counter(str(device.get("name")) for device in devices).items():
        if count > 1:
            yield Violation("devices", f"{count} devices are called {name!r}")
    sets = [each for spec in specs for each in spec.get("sharedCounters") or []]
    for name, count in Counter(str(each.get("name")) for each in sets).items():
        if count > 1:
            yield Violation("sharedCounters", f"{count} counter sets are called {name!r}")
    known = {str(each.get("name")): set(each.get("counters") or {}) for each in sets}
    for device in devices:
        for entry in device.get("consumesCounters") or []:
            missing = set(entry.get("counters") or {}) - known.get(str(entry.get("counterSet")), set())
            if missing:
                yield Violation(
                    f"devices[{device.get('name')}]",
                    f"counters {', '.join(sorted(missing))} are not in set {entry.get('counterSet')!r}",
                )
    heads = {(spec.get("driver"), repr(spec.get("pool"))) for spec in specs}
    if len(heads) > 1:
        yield Violation("pool", "the slices differ in driver, pool, generation or count")
    for spec in specs:
        if (spec.get("pool") or {}).get("resourceSliceCount") not in (len(specs), None):
            yield Violation("pool", f"resourceSliceCount is not {len(specs)}, the number of slices")
            break
