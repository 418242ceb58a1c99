"""What to leave out of a pool so that the API server accepts the rest. Pure.

The server refuses a whole slice for one bad value. The field paths in its answer say which device, and mostly
which part of it: that part is left out and reported, all other devices are published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dra.errors import DeviceError
from dra.kube.failures import Cause
from dra.values import is_qualified_name

Json = dict[str, Any]
Part = Literal["device", "attributes", "capacity", "taints", "sharedCounters"]

_DEVICE = re.compile(r"spec\.devices\[(\d+)\](?:\.basic)?(?:\.(\w+)(?:\[([^\]]*)\])?)?")
_COUNTERS = re.compile(r"spec\.sharedCounters\[(\d+)\]")
_LIMIT = re.compile(r"must not exceed (\d+)")
_ITEMS = re.compile(r"at most (\d+) items")
_QUOTED = re.compile(r'Invalid value: "((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Refusal:
    """One part of the pool that this server does not take.

    It holds for the very value that was refused: another value of the same attribute is tried.
    """

    part: Part
    device: str
    name: str
    value: str
    reason: str

    @property
    def error(self) -> DeviceError:
        """The same as a sentence with a remedy."""
        what = {
            "device": f"device {self.device}",
            "attributes": f"attribute {self.name} of device {self.device}",
            "capacity": f"capacity {self.name} of device {self.device}",
            "taints": f"taint {self.name} of device {self.device}",
            "sharedCounters": f"counter set {self.name} with the devices that use it",
        }[self.part]
        return DeviceError(
            "DRA-SLICE-REFUSED",
            f"{what} is not published: {self.reason}",
            remedy="All else is published. Report this with the value; an API server of another version may take it.",
            device=self.device,
        )


def plan_refusals(causes: Iterable[Cause], content: Json) -> tuple[Refusal, ...]:
    """Give what has to be left out of the content that was refused; empty if no cause points into it."""
    refusals: dict[tuple[str, str, str], Refusal] = {}
    for cause in causes:
        for refusal in _refusals_of(cause, content):
            refusals.setdefault((refusal.part, refusal.device, refusal.name), refusal)
    return tuple(refusals.values())


def device_limit(causes: Iterable[Cause]) -> int | None:
    """Give the number of devices per slice that the server allows, if that is what it complained about."""
    for cause in causes:
        match = _ITEMS.search(cause.message)
        if cause.field == "spec.devices" and match:
            return int(match[1])
    return None


def without_refused(contents: Sequence[Json], refusals: Sequence[Refusal]) -> tuple[Json, ...]:
    """Give the contents without what was refused."""
    if not refusals:
        return tuple(contents)
    refused = {refusal.value for refusal in refusals if refusal.part == "sharedCounters"}
    sets = [entry for content in contents for entry in content.get("sharedCounters") or []]
    gone = frozenset(str(entry.get("name") or "") for entry in sets if _text(entry) in refused)
    return tuple(_content_without(content, refusals, gone) for content in contents)


def split(contents: Sequence[Json], limit: int | None) -> tuple[Json, ...]:
    """Give the contents with at most `limit` devices in each."""
    if limit is None or limit < 1:
        return tuple(contents)
    parts: list[Json] = []
    for content in contents:
        devices = content.get("devices") or []
        parts.append({**content, "devices": devices[:limit]} if len(devices) > limit else content)
        parts.extend({"devices": devices[at : at + limit]} for at in range(limit, len(devices), limit))
    return tuple(parts)


def _refusals_of(cause: Cause, content: Json) -> list[Refusal]:
    reason = f"{cause.field}: {cause.message}"
    counters = _COUNTERS.match(cause.field)
    if counters:
        sets = content.get("sharedCounters") or []
        entry = _at(sets, int(counters[1]))
        return (
            [Refusal("sharedCounters", "", str(entry.get("name") or ""), _text(entry), reason)]
            if entry
            else []
        )
    match = _DEVICE.match(cause.field)
    device = _at(content.get("devices") or [], int(match[1])) if match else None
    if match is None or device is None:
        return []
    part, key = match[2] or "", match[3]
    name = str(device.get("name") or "")
    if part in ("attributes", "capacity"):
        kind: Part = "attributes" if part == "attributes" else "capacity"
        known = device.get(kind) or {}
        names = [key] if key in known else _bad_names(known, cause.message)
        if names:
            return [Refusal(kind, name, bad, _text(known[bad]), reason) for bad in names]
    if part == "taints" and key is not None:
        taint = _at(device.get("taints") or [], int(key) if key.isdigit() else -1)
        # A device without a taint that keeps pods away must not be published; one without a remark may.
        if taint is not None and taint.get("effect") == "None":
            return [Refusal("taints", name, str(taint.get("key")), _text(taint), reason)]
    limit = _LIMIT.search(cause.message)
    if not part and limit:
        surplus = len(device.get("attributes") or {}) + len(device.get("capacity") or {}) - int(limit[1])
        names = list(device.get("attributes") or {})[-surplus:] if surplus > 0 else []
        if len(names) == surplus > 0:
            return [
                Refusal("attributes", name, bad, _text(device["attributes"][bad]), reason) for bad in names
            ]
    return [Refusal("device", name, name, _text(device), reason)]


def _bad_names(known: Mapping[str, Any], message: str) -> list[str]:
    """Find the names that the server does not like; it quotes only the bad half of a name, or nothing."""
    bad = [name for name in known if not is_qualified_name(name)]
    if bad:
        return bad
    quoted = _QUOTED.search(message)
    return [name for name in known if quoted and quoted[1] and quoted[1] in name.split("/")]


def _content_without(content: Json, refusals: Sequence[Refusal], gone: frozenset[str]) -> Json:
    result = dict(content)
    if gone and result.get("sharedCounters"):
        result["sharedCounters"] = [
            entry for entry in result["sharedCounters"] if str(entry.get("name") or "") not in gone
        ]
    devices = []
    for device in result.get("devices") or []:
        kept = _device_without(device, [r for r in refusals if r.device == str(device.get("name") or "")])
        uses = {str(entry.get("counterSet")) for entry in device.get("consumesCounters") or []}
        if kept is not None and not uses & gone:
            devices.append(kept)
    result["devices"] = devices
    return {key: value for key, value in result.items() if value}


def _device_without(device: Json, refusals: Sequence[Refusal]) -> Json | None:
    for refusal in refusals:
        if refusal.part == "device":
            if _text(device) == refusal.value:
                return None
        elif refusal.part == "taints":
            taints = [taint for taint in device.get("taints") or [] if _text(taint) != refusal.value]
            device = {**device, "taints": taints}
        else:
            entries = device.get(refusal.part) or {}
            if refusal.name in entries and _text(entries[refusal.name]) == refusal.value:
                rest = {name: value for name, value in entries.items() if name != refusal.name}
                device = {**device, refusal.part: rest}
    return device


def _at(items: Sequence[Any], index: int) -> Json | None:
    return items[index] if 0 <= index < len(items) and isinstance(items[index], dict) else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
