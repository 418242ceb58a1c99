"""The API's rules for one device, as the API server checks them. Pure.

Paths are the API's (`devices[0].attributes[uuid]`). Messages are ours.

Source: resource.k8s.io/v1 validation of Kubernetes 1.36.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dra.api.limits import (
    MAX_ATTRIBUTES_AND_CAPACITIES,
    MAX_CONDITIONS,
    MAX_CONSUMED_SETS,
    MAX_COUNTERS,
    MAX_TAINTS,
    MAX_VALID_VALUES,
    MAX_VALUE_BYTES,
)
from dra.errors import DraError
from dra.values import Quantity, is_api_version, is_dns_label, is_dns_subdomain, is_qualified_name

MAX_VALUES = 48

_INT64 = range(-(2**63), 2**63)
_SCALARS = ("int", "bool", "string", "version")
_LISTS = {"ints": "int", "bools": "bool", "strings": "string", "versions": "version"}
_EFFECTS = ("NoSchedule", "NoExecute", "None")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that is broken, and where. `attribute` or `capacity` name the part of a device to leave out."""

    path: str
    message: str
    attribute: str = ""
    capacity: str = ""


# A node's devices repeat the same names and values hundreds of times.
_is_qualified_name = functools.lru_cache(maxsize=512)(is_qualified_name)
_is_dns_label = functools.lru_cache(maxsize=512)(is_dns_label)


def is_label_name(text: str) -> bool:
    """Whether a text is a label key: `name` or `dns.subdomain/name`."""
    prefix, slash, name = text.rpartition("/")
    if slash and not is_dns_subdomain(prefix):
        return False
    return len(name) <= 63 and _LABEL.fullmatch(name) is not None


def is_label_value(text: str) -> bool:
    """Whether a text is a label value; the empty one is."""
    return not text or (len(text) <= 63 and _LABEL.fullmatch(text) is not None)


def check_device(device: Mapping[str, Any], path: str) -> Iterator[Violation]:
    """Give what is wrong with one device by itself."""
    if not is_dns_label(str(device.get("name", ""))):
        yield Violation(f"{path}.name", f"{device.get('name')!r} is no DNS label of at most 63 characters")
    attributes = device.get("attributes") or {}
    capacity = device.get("capacity") or {}
    if len(attributes) + len(capacity) > MAX_ATTRIBUTES_AND_CAPACITIES:
        count = len(attributes) + len(capacity)
        yield Violation(path, f"{count} attributes and capacities, at most {MAX_ATTRIBUTES_AND_CAPACITIES}")
    values = 0
    for name, attribute in attributes.items():
        if _is_plain(name, attribute):
            values += 1
            continue
        where = f"{path}.attributes[{name}]"
        values += sum(map(len, lists_of(attribute))) or 1
        for message in _name_and(name, _check_attribute(attribute)):
            yield Violation(where, message, attribute=name)
    if values > MAX_VALUES:
        yield Violation(f"{path}.attributes", f"{values} values in all, at most {MAX_VALUES}")
    shared = device.get("allowMultipleAllocations") is True
    for name, each in capacity.items():
        if _is_amount(each) and _is_qualified_name(name):
            continue
        for message in _name_and(name, _check_capacity(each, shared=shared)):
            yield Violation(f"{path}.capacity[{name}]", message, capacity=name)
    yield from _check_consumption(device.get("consumesCounters") or [], f"{path}.consumesCounters")
    yield from _check_taints(device.get("taints") or [], f"{path}.taints")
    yield from _check_conditions(device, path)


def _is_plain(name: str, attribute: Any) -> bool:
    """Whether an attribute is right at first sight: one scalar. Most are, and a pool of partitions has thousands."""
    if type(attribute) is not dict or len(attribute) != 1 or not _is_qualified_name(name):
        return False
    ((kind, value),) = attribute.items()
    if kind == "bool":
        return type(value) is bool
    if kind == "int":
        return type(value) is int and value in _INT64
    short = type(value) is str and value.isascii() and len(value) <= MAX_VALUE_BYTES
    return short and (kind == "string" or (kind == "version" and is_api_version(value)))


def _is_amount(capacity: Any) -> bool:
    """Whether a capacity is an amount and nothing else."""
    return type(capacity) is dict and len(capacity) == 1 and quantity_of(capacity.get("value")) is not None


def _name_and(name: str, messages: Iterator[str]) -> Iterator[str]:
    if not _is_qualified_name(name):
        yield f"{name!r} is no identifier of at most 32 characters with an optional domain of at most 63"
    yield from messages


def lists_of(attribute: Any) -> list[list[Any]]:
    """Give the lists that an attribute holds."""
    if not isinstance(attribute, Mapping):
        return []
    return [attribute[kind] for kind in _LISTS if isinstance(attribute.get(kind), list)]


def _check_attribute(attribute: Any) -> Iterator[str]:
    if not isinstance(attribute, Mapping):
        yield f"{attribute!r} is no object"
        return
    kinds = [kind for kind in (*_SCALARS, *_LISTS) if attribute.get(kind) is not None]
    if len(kinds) != 1:
        yield f"exactly one value is required, not {len(kinds)}"
        return
    kind = kinds[0]
    if kind in _SCALARS:
        yield from _check_value(kind, attribute[kind])
        return
    if not attribute[kind]:
        yield "the list is empty"
    for item in attribute[kind]:
        yield from _check_value(_LISTS[kind], item)


def _check_value(kind: str, value: object) -> Iterator[str]:
    if kind == "bool":
        if not isinstance(value, bool):
            yield f"{value!r} is no boolean"
    elif kind == "int":
        if isinstance(value, bool) or not isinstance(value, int) or value not in _INT64:
            yield f"{value!r} is no 64-bit integer"
    elif not isinstance(value, str):
        yield f"{value!r} is no text"
    elif len(value.encode("utf-8", "surrogatepass")) > MAX_VALUE_BYTES:
        yield f"the value has more than {MAX_VALUE_BYTES} bytes"
    elif kind == "version" and not is_api_version(value):
        yield f"{value!r} is no semantic version"


def quantity_of(value: object) -> Quantity | None:
    """Read a quantity of a JSON document; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return _quantity(str(value))


@functools.lru_cache(maxsize=512)
def _quantity(text: str) -> Quantity | None:
    try:
        return Quantity.parse(text)
    except DraError:
        return None


def _check_capacity(capacity: Any, *, shared: bool) -> Iterator[str]:
    if not isinstance(capacity, Mapping):
        yield f"{capacity!r} is no object"
        return
    total = quantity_of(capacity.get("value"))
    if total is None:
        yield f"{capacity.get('value')!r} is no quantity"
        return
    policy = capacity.get("requestPolicy")
    if policy is None:
        return
    if not shared:
        yield "a requestPolicy needs allowMultipleAllocations"
        return
    yield from _check_policy(policy, total)


def _check_policy(policy: Mapping[str, Any], total: Quantity) -> Iterator[str]:
    listed, limits = policy.get("validValues") or [], policy.get("validRange")
    default = quantity_of(policy.get("default"))
    if "default" in policy and default is None:
        yield f"the default {policy['default']!r} is no quantity"
        return
    if listed and limits is not None:
        yield "validValues and validRange exclude each other"
        return
    if default is None and (listed or limits is not None):
        yield "a default is required beside validValues or validRange"
        return
    if listed:
        yield from _check_valid_values([quantity_of(value) for value in listed], default, total)
    if limits is not None:
        yield from _check_range(limits, default, total)


def _check_valid_values(
    listed: list[Quantity | None], default: Quantity | None, total: Quantity
) -> Iterator[str]:
    values = [value for value in listed if value is not None]
    if len(values) < len(listed):
        yield "validValues holds something that is no quantity"
    if len(listed) > MAX_VALID_VALUES:
        yield f"{len(listed)} validValues, at most {MAX_VALID_VALUES}"
    if any(later <= earlier for earlier, later in itertools.pairwise(values)):
        yield "validValues must ascend without repetition"
    if any(value > total for value in values):
        yield "a valid value is larger than the capacity"
    if default not in values:
        yield "the default is not among the validValues"


def _check_range(limits: Mapping[str, Any], default: Quantity | None, total: Quantity) -> Iterator[str]:
    least, most, step = (quantity_of(limits.get(name)) for name in ("min", "max", "step"))
    for name, value in (("max", most), ("step", step)):
        if name in limits and value is None:
            yield f"validRange.{name} {limits[name]!r} is no quantity"
    if least is None:
        yield "validRange needs a min"
        return
    if default is not None and default < least:
        yield "the default is less than min"
    if least > total:
        yield "min is larger than the capacity"
    if most is not None and (most < least or most > total or (default is not None and default > most)):
        yield "max must be at least min and default, and at most the capacity"
    if step is None:
        return
    if step.nano <= 0:
        yield "step must be greater than zero"
        return
    if least + step > total:
        yield "one step above min is more than the capacity"
    for name, value in (("default", default), ("max", most)):
        if value is not None and (value.nano - least.nano) % step.nano:
            yield f"{name} is no whole number of steps above min"


def _check_consumption(entries: list[Mapping[str, Any]], path: str) -> Iterator[Violation]:
    if len(entries) > MAX_CONSUMED_SETS:
        yield Violation(path, f"{len(entries)} counter sets are used, at most {MAX_CONSUMED_SETS}")
    names = [str(entry.get("counterSet", "")) for entry in entries]
    if len(set(names)) < len(names):
        yield Violation(path, "a counter set is named twice")
    for index, entry in enumerate(entries):
        where = f"{path}[{index}]"
        if not _is_dns_label(names[index]):
            yield Violation(f"{where}.counterSet", f"{names[index]!r} is no DNS label")
        counters = entry.get("counters") or {}
        if not counters:
            yield Violation(f"{where}.counters", "at least one counter is required")
        if len(counters) > MAX_COUNTERS:
            yield Violation(f"{where}.counters", f"{len(counters)} counters, at most {MAX_COUNTERS}")
        yield from check_counters(counters, f"{where}.counters")


def check_counters(counters: Mapping[str, Mapping[str, Any]], path: str) -> Iterator[Violation]:
    """Give what is wrong with the names and values of counters."""
    for name, counter in counters.items():
        if not _is_dns_label(name):
            yield Violation(f"{path}[{name}]", f"{name!r} is no DNS label")
        if quantity_of(counter.get("value")) is None:
            yield Violation(f"{path}[{name}]", f"{counter.get('value')!r} is no quantity")


def _check_taints(taints: list[Mapping[str, Any]], path: str) -> Iterator[Violation]:
    if len(taints) > MAX_TAINTS:
        yield Violation(path, f"{len(taints)} taints, at most {MAX_TAINTS}")
    for index, taint in enumerate(taints):
        if not is_label_name(str(taint.get("key", ""))):
            yield Violation(f"{path}[{index}].key", f"{taint.get('key')!r} is no label name")
        if not is_label_value(str(taint.get("value") or "")):
            yield Violation(f"{path}[{index}].value", f"{taint.get('value')!r} is no label value")
        if taint.get("effect") not in _EFFECTS:
            yield Violation(
                f"{path}[{index}].effect", f"{taint.get('effect')!r} is none of {', '.join(_EFFECTS)}"
            )


def _check_conditions(device: Mapping[str, Any], path: str) -> Iterator[Violation]:
    binding = list(device.get("bindingConditions") or [])
    failing = list(device.get("bindingFailureConditions") or [])
    if bool(binding) != bool(failing):
        yield Violation(path, "bindingConditions and bindingFailureConditions need each other")
    if set(binding) & set(failing):
        yield Violation(f"{path}.bindingFailureConditions", "a condition is in both lists")
    for name, listed in (("bindingConditions", binding), ("bindingFailureConditions", failing)):
        if len(listed) > MAX_CONDITIONS:
            yield Violation(f"{path}.{name}", f"{len(listed)} conditions, at most {MAX_CONDITIONS}")
        if len(set(listed)) < len(listed):
            yield Violation(f"{path}.{name}", "a condition is named twice")
        for condition in listed:
            if not is_label_name(condition):
                yield Violation(f"{path}.{name}", f"{condition!r} is no label name")
