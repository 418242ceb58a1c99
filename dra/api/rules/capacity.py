"""Capacities of devices and how they may be consumed (request policies).

Source: pkg/apis/resource/validation of Kubernetes 1.36 (validateMultiAllocatableDeviceCapacity).
"""

from __future__ import annotations

from typing import Any

from dra.api.limits import MAX_VALID_VALUES
from dra.api.rules.cause import Cause
from dra.api.rules.fields import bad, duplicate, forbidden, required
from dra.api.rules.parts import limited
from dra.values import Quantity

Json = dict[str, Any]


def capacity(value: Json, field: str, *, shared: bool) -> list[Cause]:
    """Find what is wrong with a capacity; `shared`: the device allows several allocations."""
    policy = value.get("requestPolicy")
    if policy is None:
        return []
    at = f"{field}.requestPolicy"
    if not shared:
        return [forbidden(at, "allowMultipleAllocations must be true")]
    total = Quantity.parse(value.get("value") or "0")
    default = Quantity.parse(policy["default"]) if policy.get("default") is not None else None
    values, span = policy.get("validValues") or [], policy.get("validRange")
    if values and span is not None:
        why = 'exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time'
        return [forbidden(at, why)]
    if values:
        return _values([Quantity.parse(v) for v in values], default, total, at)
    if span is not None:
        return _span(span, default, total, at)
    return []


def _values(values: list[Quantity], default: Quantity | None, total: Quantity, field: str) -> list[Cause]:
    at = f"{field}.validValues"
    if default is None:
        return [required(f"{field}.default", "required when validValues is defined")]
    found = limited(values, at, MAX_VALID_VALUES)
    for i, value in enumerate(values):
        if value > total:
            found.append(bad(f"{at}[{i}]", str(value), f"option is larger than capacity value: {total}"))
        if value in values[:i]:
            found.append(duplicate(f"{at}[{i}]", str(value)))
        elif i and value < values[i - 1]:
            found.append(bad(f"{at}[{i}]", str(value), "values must be sorted in ascending order"))
    if default not in values or len(values) > MAX_VALID_VALUES:
        found.append(bad(at, str(default), "default value is not valid according to the requestPolicy"))
    return found


def _span(span: Json, default: Quantity | None, total: Quantity, field: str) -> list[Cause]:
    at = f"{field}.validRange"
    if default is None:
        return [required(f"{field}.default", "required when validRange is defined")]
    if span.get("min") is None:
        return [required(f"{at}.min", "required when validRange is defined")]
    low = Quantity.parse(span["min"])
    high = Quantity.parse(span["max"]) if span.get("max") is not None else None
    found: list[Cause] = []
    if low > total:
        found.append(bad(f"{at}.min", str(low), f"min is larger than capacity value: {total}"))
    if default < low:
        found.append(bad(f"{at}.min", str(default), f"default is less than min: {low}"))
    if high is not None:
        if low > high:
            found.append(bad(f"{at}.max", str(low), f"min is larger than max: {high}"))
        if high > total:
            found.append(bad(f"{at}.max", str(high), f"max is larger than capacity value: {total}"))
        if default > high:
            found.append(bad(f"{at}.max", str(default), f"default is more than max: {high}"))
    if span.get("step") is not None:
        found += _step(Quantity.parse(span["step"]), low, [high, default], total, f"{at}.step")
    return found


def _step(
    step: Quantity, low: Quantity, targets: list[Quantity | None], total: Quantity, field: str
) -> list[Cause]:
    # Release 1.36 divides by a step of zero and crashes; later ones refuse it, and so do we.
    if step.value <= 0:
        return [bad(field, str(step), "must be greater than zero")]
    found: list[Cause] = []
    if low + step > total:
        found.append(bad(field, str(step), f"one step {low + step} is larger than capacity value: {total}"))
    for target in targets:
        if target is not None and (target.value - low.value) % step.value:
            why = f"value is not a multiple of a given step ({step}) from ({low})"
            found.append(bad(field, str(target), why))
    return found
