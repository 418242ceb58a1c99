"""Consumable capacity: what a request takes of a device (KEP-5075).

Amounts are billionths. Up to 1.36 ranges are computed in whole units, a fraction counts as the next whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra.allocator.model import Device
from dra.values import Quantity

_UNIT = 10**9


def requested(request: Mapping[str, Any]) -> dict[str, int]:
    """Give `capacity.requests` of a request as billionths."""
    asked = (request.get("capacity") or {}).get("requests") or {}
    return {name: Quantity.of(value).nano for name, value in asked.items()}


def consumed(device: Device, asked: Mapping[str, int]) -> dict[str, int] | None:
    """Give what a request takes of each capacity of a shared device; None when the policy refuses it.

    An unknown capacity name refuses too.
    """
    capacities = device.raw.get("capacity") or {}
    if any(name not in capacities for name in asked):
        return None
    taken: dict[str, int] = {}
    for name, capacity in capacities.items():
        amount = _effective(asked.get(name), capacity)
        if amount is None or amount > Quantity.of(capacity["value"]).nano:
            return None
        taken[name] = amount
    return taken


def fits_whole(device: Device, asked: Mapping[str, int]) -> bool:
    """Tell whether a device that is not shared has at least what is asked for."""
    capacities = device.raw.get("capacity") or {}
    return all(
        name in capacities and amount <= Quantity.of(capacities[name]["value"]).nano
        for name, amount in asked.items()
    )


def has_room(device: Device, takes: Mapping[str, int], used: Mapping[str, int]) -> bool:
    """Tell whether a shared device has what is taken left beside what is used, of every capacity."""
    capacities = device.raw.get("capacity") or {}
    return all(
        used.get(name, 0) + amount <= Quantity.of(capacities[name]["value"]).nano
        for name, amount in takes.items()
    )


def _effective(asked: int | None, capacity: Mapping[str, Any]) -> int | None:
    policy = capacity.get("requestPolicy")
    if asked is None:
        if policy and policy.get("default") is not None:
            return Quantity.of(policy["default"]).nano
        return Quantity.of(capacity["value"]).nano
    if not policy:
        return asked
    if policy.get("validRange"):
        return _in_range(asked, policy["validRange"])
    if policy.get("validValues"):
        values = sorted(Quantity.of(value).nano for value in policy["validValues"])
        return next((value for value in values if value >= asked), None)
    return asked


def _in_range(asked: int, valid: Mapping[str, Any]) -> int | None:
    minimum = Quantity.of(valid["min"]).nano if valid.get("min") is not None else 0
    maximum = Quantity.of(valid["max"]).nano if valid.get("max") is not None else None
    amount = max(asked, minimum)
    if valid.get("step") is not None:
        step = -(-Quantity.of(valid["step"]).nano // _UNIT) * _UNIT
        if step > 0:
            steps = -(-(amount - minimum) // step)
            amount = minimum + steps * step
    return None if maximum is not None and amount > maximum else amount
