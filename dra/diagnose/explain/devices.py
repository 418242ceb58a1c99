"""How far each device of a node gets with a request: the funnel from published to free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dra.allocator.capacity import consumed, fits_whole
from dra.allocator.model import Device, Features, Pool
from dra.allocator.taints import untolerated
from dra.diagnose.explain.holders import Holdings
from dra.diagnose.explain.model import DeviceOutcome, RequestOutcome, Trace
from dra.diagnose.explain.requests import Asked
from dra.diagnose.explain.shortage import Shortage, amount, capacity_shortage, counter_shortage
from dra.values import Quantity


@dataclass(slots=True)
class Funnel:
    """A request on a node: the outcome, and what running short means there."""

    outcome: RequestOutcome
    shortages: list[tuple[Device, Pool, Shortage]] = field(default_factory=list)
    # Devices that would match in pools from which nothing may be taken.
    blocked: list[tuple[Pool, str]] = field(default_factory=list)
    multi_free: bool = False


def judge(asked: Asked, pools: Sequence[Pool], holdings: Holdings, features: Features) -> Funnel:
    """Follow every device of the pools through the stages; the first that stops it counts."""
    outcome = RequestOutcome(asked.claim, asked.name, asked.count, asked.mode)
    funnel = Funnel(outcome)
    for pool in pools:
        why = pool_fault(pool)
        for device in pool.devices:
            trace = asked.selectors.trace(device)
            if why:
                stage, detail = "pool", why
                if not trace.stage:
                    funnel.blocked.append((pool, why))
            elif trace.stage:
                stage, detail = trace.stage, ""
            else:
                stage, detail = _stage(
                    asked, device, pool, holdings=holdings, features=features, funnel=funnel
                )
            outcome.counts[stage] += 1
            outcome.devices.append(DeviceOutcome(device.id, stage, detail, trace))
    if asked.mode == "All":
        # A shared device without room is left out, as one that does not match; any other must be had.
        full = sum(not shortage.keys for _, _, shortage in funnel.shortages)
        outcome.needed = max(outcome.matching - full, 1)
    return funnel


def pool_fault(pool: Pool) -> str:
    """Say why nothing may be taken from a pool; empty if something may."""
    if pool.invalid:
        return f"pool {pool} is invalid: {pool.invalid}"
    if not pool.incomplete:
        return ""
    since = f" since {pool.changed}" if pool.changed else ""
    return f"pool {pool} is incomplete{since}: {pool.found} of {pool.wanted} slices of generation {pool.generation}"


def detail_of(trace: Trace | None) -> str:
    """Say what a selector has against a device."""
    if trace is None or not trace.stage:
        return ""
    if trace.error:
        return trace.error
    return str(trace.misses[0]) if trace.misses else "a selector is false"


def _stage(
    asked: Asked, device: Device, pool: Pool, *, holdings: Holdings, features: Features, funnel: Funnel
) -> tuple[str, str]:
    shares = features.consumable_capacity
    if asked.capacity and (lacks := _too_small(asked, device, shares=shares)):
        return "capacity", lacks
    if holdings.in_use(device, admin=asked.admin, shares=shares):
        return "held", ", ".join(map(str, holdings.of(device.id)))
    if device.multi and shares:
        shortage = capacity_shortage(device, asked.capacity, holdings.allocated)
        if shortage is not None:
            funnel.shortages.append((device, pool, shortage))
            return "short", _with_users(str(shortage), [str(item) for item in holdings.of(device.id)])
    if device.consumes and features.partitionable_devices and not holdings.of(device.id):
        shortage = counter_shortage(device, holdings.left(pool))
        if shortage is not None:
            funnel.shortages.append((device, pool, shortage))
            users = holdings.users_of(pool, shortage.keys)
            named = [f"{user.device} by {holdings.of(user)[0]}" for user in users]
            return "short", _with_users(str(shortage), named)
    taints = untolerated(device.taints, asked.tolerations) if features.device_taints else []
    if taints:
        return "taint", ", ".join(map(taint_text, taints))
    funnel.multi_free = funnel.multi_free or (device.multi and shares)
    return "free", ""


def _with_users(text: str, users: Sequence[str]) -> str:
    if not users:
        return text
    more = f" and {len(users) - 3} more" if len(users) > 3 else ""
    return f"{text}; in use: {', '.join(users[:3])}{more}"


def taint_text(taint: object) -> str:
    """Write a device taint: `key=value:effect since TIME`."""
    assert isinstance(taint, dict)
    value = f"={taint['value']}" if taint.get("value") else ""
    since = f" since {taint['timeAdded']}" if taint.get("timeAdded") else ""
    return f"{taint['key']}{value}:{taint.get('effect', '')}{since}"


def _too_small(asked: Asked, device: Device, *, shares: bool) -> str:
    """Say which capacity of a device can never give what is asked for; empty if it could."""
    if device.multi and shares:
        if consumed(device, asked.capacity) is not None:
            return ""
    elif fits_whole(device, asked.capacity):
        return ""
    capacities = device.raw.get("capacity") or {}
    for name, need in asked.capacity.items():
        if name not in capacities:
            return f"it has no capacity {name}"
        whole = Quantity.of(capacities[name]["value"]).nano
        if need > whole:
            return f"{name}: asks {amount(need)}, the device has {amount(whole)}"
    return "its request policy does not allow the amount asked for"
