"""Taints that DeviceTaintRules put on devices, and which pods a NoExecute taint drives away. Pure.

Source: KEP-5055; the resource slice tracker and the device taint eviction controller of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dra.allocator.model import DeviceId
from dra.allocator.taints import tolerates

Json = dict[str, Any]


def tainted_slices(
    slices: Sequence[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Give the slices with the taints of rules added to the devices that they select."""
    if not rules:
        return list(slices)
    return [_with_rules(item, rules) for item in slices]


def _with_rules(item: Mapping[str, Any], rules: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    spec = item["spec"]
    devices = []
    changed = False
    for device in spec.get("devices") or []:
        more = [
            rule["spec"]["taint"]
            for rule in rules
            if _selects((rule.get("spec") or {}).get("deviceSelector"), spec, device["name"])
        ]
        changed |= bool(more)
        devices.append({**device, "taints": [*(device.get("taints") or []), *more]} if more else device)
    return {**item, "spec": {**spec, "devices": devices}} if changed else item


def _selects(selector: Mapping[str, Any] | None, spec: Mapping[str, Any], device: str) -> bool:
    # No selector matches nothing, an empty one everything.
    if selector is None:
        return False
    wanted = ((selector.get("driver"), spec["driver"]), (selector.get("pool"), spec["pool"]["name"]), (selector.get("device"), device))  # fmt: skip
    return all(not asked or asked == found for asked, found in wanted)


@dataclass(frozen=True, slots=True)
class Eviction:
    """A pod that must go: from when on, in seconds since the epoch, and because of what."""

    pod_uid: str
    at: float
    why: str


def plan_evictions(
    claims: Iterable[Mapping[str, Any]], slices: Iterable[Mapping[str, Any]], *, now: float
) -> list[Eviction]:
    """Give an eviction for each user of a claim whose device has a NoExecute taint that it does not tolerate for good.

    A toleration with `tolerationSeconds` counts from the moment the taint was added (`now` if that is not known).
    """
    tainted = {
        DeviceId(item["spec"]["driver"], item["spec"]["pool"]["name"], device["name"]): found
        for item in slices
        for device in item["spec"].get("devices") or []
        if (found := [taint for taint in device.get("taints") or [] if taint.get("effect") == "NoExecute"])
    }
    if not tainted:
        return []
    evictions: list[Eviction] = []
    for claim in claims:
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
        due = [
            (at, f"device {device} has taint {_shown(taint)}")
            for result in results
            for device in (DeviceId(result["driver"], result["pool"], result["device"]),)
            for taint in tainted.get(device, ())
            if (at := _end(taint, result.get("tolerations") or [], now)) is not None
        ]
        if due:
            at, why = min(due)
            users = [entry for entry in status.get("reservedFor") or [] if entry.get("resource") == "pods"]
            evictions += [Eviction(user["uid"], at, why) for user in users]
    return evictions


def _end(taint: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]], now: float) -> float | None:
    """Give when tolerance of a taint ends: `now` without a toleration, None for never."""
    seconds = [item.get("tolerationSeconds") for item in tolerations if tolerates(item, taint)]
    if not seconds:
        return now
    limits = [int(value) for value in seconds if value is not None]
    if not limits:
        return None
    added = taint.get("timeAdded")
    start = datetime.fromisoformat(added).timestamp() if added else now
    return start + max(0, min(limits))


def _shown(taint: Mapping[str, Any]) -> str:
    value = taint.get("value")
    return f"{taint['key']}{f'={value}' if value else ''}:{taint['effect']}"
