"""What a ResourceSlice must look like: names, node selection, devices, counters and every limit.

Source: pkg/apis/resource/validation of Kubernetes 1.36 (ValidateResourceSlice).
"""

from __future__ import annotations

from typing import Any

from dra.api.limits import (
    MAX_ATTRIBUTES_AND_CAPACITIES,
    MAX_CONDITIONS,
    MAX_CONSUMED_SETS,
    MAX_COUNTER_SETS,
    MAX_COUNTERS,
    MAX_COUNTERS_IN_SLICE,
    MAX_DEVICES,
    MAX_DEVICES_WITH_EXTRAS,
    MAX_TAINTS,
    MAX_VALUE_BYTES,
)
from dra.api.rules import names
from dra.api.rules.capacity import capacity as capacity_errors
from dra.api.rules.cause import Cause, Rules
from dra.api.rules.fields import bad, duplicate, immutable, required, too_long, too_many
from dra.api.rules.meta import qualified_name_errors
from dra.api.rules.parts import limited, node_selector, taint
from dra.values import is_api_version

Json = dict[str, Any]

SCALARS = ("int", "bool", "string", "version")
LISTS = ("ints", "bools", "strings", "versions")
_LISTS = frozenset(LISTS)
_VALUES = frozenset((*SCALARS, *LISTS))


def validate(obj: Json, rules: Rules, old: Json | None = None) -> list[Cause]:
    """Find what is wrong with a slice."""
    spec = obj.get("spec") or {}
    found = names.driver(spec.get("driver") or "", "spec.driver")
    found += _pool(spec.get("pool") or {})
    selection, final = _node_selection(spec)
    found += selection
    devices, counters = spec.get("devices"), spec.get("sharedCounters")
    if rules.minor >= 35 and devices is not None and counters is not None:
        final = [*final, bad("spec", "", "only one of `sharedCounters` or `devices` is allowed")]
    found += _devices(spec, rules)
    found += _counter_sets(counters or [], rules)
    if old is not None:
        found += _immutable(spec, old.get("spec") or {})
    return [*found, *final]


def _immutable(spec: Json, old: Json) -> list[Cause]:
    found: list[Cause] = []
    name, kept = (spec.get("pool") or {}).get("name"), (old.get("pool") or {}).get("name")
    if name != kept:
        found.append(immutable("spec.pool.name", name))
    return found + [
        immutable(f"spec.{key}", spec.get(key))
        for key in ("driver", "nodeName")
        if spec.get(key) != old.get(key)
    ]


def _pool(pool: Json) -> list[Cause]:
    found = names.pool(pool.get("name") or "", "spec.pool.name")
    count, generation = pool.get("resourceSliceCount") or 0, pool.get("generation") or 0
    if count <= 0:
        found.append(bad("spec.pool.resourceSliceCount", count, "must be greater than zero"))
    if generation < 0:
        found.append(bad("spec.pool.generation", generation, "must be greater than or equal to zero"))
    return found


_ONE_OF = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"


def _node_selection(spec: Json) -> tuple[list[Cause], list[Cause]]:
    found, chosen = _selection_values(spec, "spec")
    per_device = spec.get("perDeviceNodeSelection")
    if per_device:
        chosen.append("`perDeviceNodeSelection`")
    elif per_device is False:
        found.append(bad("spec.perDeviceNodeSelection", False, "must be either unset or set to true"))
    if not chosen:
        return found, [required("spec", _ONE_OF)]
    if len(chosen) > 1:
        return found, [bad("spec", f"{{{', '.join(chosen)}}}", f"{_ONE_OF}, but multiple fields are set")]
    return found, []


def _selection_values(spec: Json, field: str) -> tuple[list[Cause], list[str]]:
    found: list[Cause] = []
    chosen: list[str] = []
    name = spec.get("nodeName")
    if name:
        chosen.append("`nodeName`")
        found += names.subdomain(name, f"{field}.nodeName")
    elif name is not None:
        found.append(bad(f"{field}.nodeName", "", "must be either unset or set to a non-empty string"))
    selector = spec.get("nodeSelector")
    if selector is not None:
        chosen.append("`nodeSelector`")
        found += node_selector(selector, f"{field}.nodeSelector")
        terms = selector.get("nodeSelectorTerms") or []
        if len(terms) != 1:
            at = f"{field}.nodeSelector.nodeSelectorTerms"
            found.append(bad(at, terms, "must have exactly one node selector term"))
    if spec.get("allNodes"):
        chosen.append("`allNodes`")
    elif spec.get("allNodes") is False:
        found.append(bad(f"{field}.allNodes", False, "must be either unset or set to true"))
    return found, chosen


def is_advanced(device: Json) -> bool:
    """Whether a device lowers the limit of devices in its slice."""
    if device.get("taints") or device.get("consumesCounters"):
        return True
    return any(not _LISTS.isdisjoint(value) for value in (device.get("attributes") or {}).values())


def _devices(spec: Json, rules: Rules) -> list[Cause]:
    devices = spec.get("devices") or []
    limit = MAX_DEVICES_WITH_EXTRAS if any(is_advanced(d) for d in devices) else MAX_DEVICES
    found = limited(devices, "spec.devices", limit)
    if found:
        return found
    seen: set[str] = set()
    for i, device in enumerate(devices):
        field = f"spec.devices[{i}]"
        name = device.get("name") or ""
        found += _device(device, field, rules, per_device=bool(spec.get("perDeviceNodeSelection")))
        if name in seen:
            found.append(duplicate(field, name))
        seen.add(name)
    return found


def _device(device: Json, field: str, rules: Rules, *, per_device: bool) -> list[Cause]:
    found = names.label(device.get("name") or "", f"{field}.name")
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    for key, value in sorted(attributes.items()):
        found += names.qualified(key, f"{field}.attributes")
        found += _attribute(value, f"{field}.attributes[{key}]")
    for key, value in sorted(capacity.items()):
        found += names.qualified(key, f"{field}.capacity")
        shared = bool(device.get("allowMultipleAllocations"))
        found += capacity_errors(value, f"{field}.capacity[{key}]", shared=shared)
    total = len(attributes) + len(capacity)
    if total > MAX_ATTRIBUTES_AND_CAPACITIES:
        why = f"the total number of attributes and capacities must not exceed {MAX_ATTRIBUTES_AND_CAPACITIES}"
        found.append(bad(field, total, why))
    taints = device.get("taints") or []
    found += limited(taints, f"{field}.taints", MAX_TAINTS)
    for i, item in enumerate(taints):
        found += taint(item, f"{field}.taints[{i}]", rules.minor)
    found += _consumption(device.get("consumesCounters") or [], f"{field}.consumesCounters")
    found += _device_nodes(device, field, per_device=per_device)
    return [*found, *_binding(device, field)]


def _attribute(value: Json, field: str) -> list[Cause]:
    given = [key for key, item in value.items() if item is not None and key in _VALUES]
    if len(given) != 1:
        return [bad(field, value if given else "", "exactly one value must be specified")]
    key = given[0]
    found: list[Cause] = []
    if key in {"string", "version"}:
        found += _text(value[key], f"{field}.{key}", version=key == "version")
    if key in LISTS and not value[key]:
        found.append(required(f"{field}.{key}"))
    if key in {"strings", "versions"}:
        for i, item in enumerate(value[key]):
            found += _text(item, f"{field}.{key}[{i}]", version=key == "versions")
    return found


def _text(text: str, field: str, *, version: bool) -> list[Cause]:
    if len(text.encode()) > MAX_VALUE_BYTES:
        return [too_long(field, MAX_VALUE_BYTES)]
    if version and not is_api_version(text):
        return [bad(field, text, "must be a string compatible with semver.org spec 2.0.0")]
    return []


def _counters(counters: Json, field: str) -> list[Cause]:
    if not counters:
        return [required(field)]
    if len(counters) > MAX_COUNTERS:
        return [too_many(field, len(counters), MAX_COUNTERS)]
    return [cause for key in sorted(counters) for cause in names.label(key, field)]


def _counter_sets(sets: list[Json], rules: Rules) -> list[Cause]:
    found = limited(sets, "spec.sharedCounters", MAX_COUNTER_SETS) if rules.minor >= 35 else []
    if found:
        return found
    found = _named_counters(sets, "spec.sharedCounters", "name")
    total = sum(len(item.get("counters") or {}) for item in sets)
    if rules.minor < 35 and total > MAX_COUNTERS_IN_SLICE:
        why = f"the total number of counters in shared counters must not exceed {MAX_COUNTERS_IN_SLICE}"
        found.append(bad("spec.sharedCounters", total, why))
    return found


def _consumption(items: list[Json], field: str) -> list[Cause]:
    found = limited(items, field, MAX_CONSUMED_SETS)
    if found:
        return found
    return _named_counters(items, field, "counterSet")


def _named_counters(items: list[Json], field: str, name_key: str) -> list[Cause]:
    """Check counters by the name of their set, which `name_key` has; each name stands once."""
    found: list[Cause] = []
    seen: set[str] = set()
    for i, item in enumerate(items):
        at = f"{field}[{i}]"
        name = item.get(name_key) or ""
        found += names.label(name, f"{at}.{name_key}") if name else [required(f"{at}.{name_key}")]
        found += _counters(item.get("counters") or {}, f"{at}.counters")
        if name in seen:
            found.append(duplicate(at, name))
        seen.add(name)
    return found


def _device_nodes(device: Json, field: str, *, per_device: bool) -> list[Cause]:
    if not per_device:
        if any(device.get(key) is not None for key in ("nodeName", "nodeSelector", "allNodes")):
            why = (
                "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to "
                "true in the ResourceSlice spec"
            )
            return [bad(field, None, why)]
        return []
    found, chosen = _selection_values(device, field)
    why = (
        "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to "
        "true in the ResourceSlice spec"
    )
    if not chosen:
        found.append(required(field, why))
    elif len(chosen) > 1:
        found.append(bad(field, f"{{{', '.join(chosen)}}}", why))
    return found


def _binding(device: Json, field: str) -> list[Cause]:
    wanted, failures = device.get("bindingConditions") or [], device.get("bindingFailureConditions") or []
    at, failed_at = f"{field}.bindingConditions", f"{field}.bindingFailureConditions"
    found = [*_condition_names(wanted, at), *_condition_names(failures, failed_at)]
    for i, name in enumerate(failures):
        if name in wanted:
            why = "bindingFailureConditions must not overlap with bindingConditions"
            found.append(bad(f"{failed_at}[{i}]", name, why))
    if wanted and not failures:
        found.append(bad(failed_at, None, "bindingFailureConditions are required to use bindingConditions"))
    if failures and not wanted:
        found.append(bad(at, None, "bindingConditions are required to use bindingFailureConditions"))
    return found


def _condition_names(items: list[str], field: str) -> list[Cause]:
    found = limited(items, field, MAX_CONDITIONS)
    for i, name in enumerate(items):
        found += [bad(f"{field}[{i}]", name, why) for why in qualified_name_errors(name)]
        if name in items[:i]:
            found.append(duplicate(f"{field}[{i}]", name))
    return found
