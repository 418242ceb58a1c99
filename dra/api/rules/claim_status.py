"""What a ResourceClaim's status must look like, and how it may change.

Source: pkg/apis/resource/validation of Kubernetes 1.36 (ValidateResourceClaimStatusUpdate).
"""

from __future__ import annotations

import ipaddress
from typing import Any

from dra.api.rules import names
from dra.api.rules.cause import Cause
from dra.api.rules.claims import (
    ADMIN_LABEL,
    ADMIN_TEXT,
    UNKNOWN_REQUEST,
    request_names,
    request_references,
)
from dra.api.rules.decode import same_meaning
from dra.api.rules.fields import (
    bad,
    duplicate,
    forbidden,
    immutable,
    required,
    too_long,
    too_many,
    unsupported,
)
from dra.api.rules.parts import conditions, limited, node_selector, opaque_config, raw_object

Json = dict[str, Any]
DeviceKey = tuple[str, str, str, str]

MAX_CONSUMERS = 256
MAX_RESULTS = 32
MAX_CONDITIONS = 8
MAX_IPS = 16


def validate(new: Json, old: Json, namespace: Json | None) -> list[Cause]:
    """Find what is wrong with a new status."""
    status, kept = new.get("status") or {}, old.get("status") or {}
    allocation = status.get("allocation")
    found = _consumers(new, status.get("reservedFor") or [], kept.get("reservedFor") or [])
    found += _devices(status.get("devices") or [], allocation)
    if allocation is not None:
        if kept.get("allocation") is None:
            found += _allocation(allocation, new.get("spec") or {}, namespace)
        elif not same_meaning(kept["allocation"], allocation):
            found.append(immutable("status.allocation", allocation))
    return found


def _consumers(obj: Json, consumers: list[Json], kept: list[Json]) -> list[Cause]:
    field = "status.reservedFor"
    found: list[Cause] = []
    if len(consumers) > MAX_CONSUMERS:
        found.append(too_many(field, len(consumers), MAX_CONSUMERS))
    seen: set[str] = set()
    for i, consumer in enumerate(consumers if not found else []):
        at = f"{field}[{i}]"
        found += [required(f"{at}.{key}") for key in ("resource", "name", "uid") if not consumer.get(key)]
        uid = consumer.get("uid") or ""
        if uid and uid in seen:
            found.append(duplicate(at, uid))
        seen.add(uid)
    if consumers and (obj.get("status") or {}).get("allocation") is None:
        found.append(forbidden(field, "may not be specified when `allocated` is not set"))
    elif obj["metadata"].get("deletionTimestamp"):
        before = {consumer.get("uid") for consumer in kept}
        if any(consumer.get("uid") not in before for consumer in consumers):
            why = "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set"
            found.append(forbidden(field, why))
    return found


def _allocation(allocation: Json, spec: Json, namespace: Json | None) -> list[Cause]:
    field = "status.allocation"
    devices = allocation.get("devices") or {}
    known = request_names(spec)
    found = _results(devices.get("results") or [], f"{field}.devices.results", known, namespace)
    for i, config in enumerate(devices.get("config") or []):
        at = f"{field}.devices.config[{i}]"
        source = config.get("source") or ""
        if not source:
            found.append(required(f"{at}.source"))
        elif source not in {"FromClass", "FromClaim"}:
            found.append(unsupported(f"{at}.source", source, ["FromClaim", "FromClass"]))
        found += request_references(config.get("requests") or [], f"{at}.requests", known)
        found += opaque_config(config, at)
    selector = allocation.get("nodeSelector")
    return found + (node_selector(selector, f"{field}.nodeSelector") if selector is not None else [])


def _results(results: list[Json], field: str, known: set[str], namespace: Json | None) -> list[Cause]:
    found = limited(results, field, MAX_RESULTS)
    labels = ((namespace or {}).get("metadata") or {}).get("labels") or {}
    for i, result in enumerate(results if not found else []):
        at = f"{field}[{i}]"
        request = result.get("request") or ""
        for part in request.split("/"):
            found += names.label(part, f"{at}.request")
        if request not in known:
            found.append(bad(f"{at}.request", request, UNKNOWN_REQUEST))
        found += names.driver(result.get("driver") or "", f"{at}.driver")
        found += names.pool(result.get("pool") or "", f"{at}.pool")
        found += names.label(result.get("device") or "", f"{at}.device")
        if result.get("adminAccess") and labels.get(ADMIN_LABEL) != "true":
            found.append(forbidden(f"{at}.adminAccess", ADMIN_TEXT))
        if result.get("shareID") is not None:
            found += names.uid(result["shareID"], f"{at}.shareID")
    return found


def device_key(entry: Json) -> DeviceKey:
    """Give what tells one allocated device from another."""
    return (
        entry.get("driver") or "",
        entry.get("pool") or "",
        entry.get("device") or "",
        entry.get("shareID") or "",
    )


def allocated_keys(allocation: Json | None) -> set[DeviceKey]:
    """Give the keys of all allocated devices."""
    return {device_key(result) for result in ((allocation or {}).get("devices") or {}).get("results") or []}


def _devices(devices: list[Json], allocation: Json | None) -> list[Cause]:
    found: list[Cause] = []
    allocated = allocated_keys(allocation)
    seen: set[DeviceKey] = set()
    for i, device in enumerate(devices):
        field = f"status.devices[{i}]"
        key = device_key(device)
        shown = dict(zip(("Driver", "Pool", "Device", "ShareID"), key, strict=True))
        if key in seen:
            found.append(duplicate(field, shown))
        seen.add(key)
        if device.get("shareID") is not None:
            found += names.uid(device["shareID"], f"{field}.shareID")
        if key not in allocated:
            found.append(bad(field, shown, "must be an allocated device in the claim"))
        found += conditions(device.get("conditions") or [], f"{field}.conditions", limit=MAX_CONDITIONS)
        found += raw_object(device.get("data"), f"{field}.data", wanted=False)
        found += _network(device.get("networkData") or {}, f"{field}.networkData")
    return found


def _network(data: Json, field: str) -> list[Cause]:
    found: list[Cause] = []
    for key, limit in (("interfaceName", 256), ("hardwareAddress", 128)):
        if len((data.get(key) or "").encode()) > limit:
            found.append(too_long(f"{field}.{key}", limit))
    ips = data.get("ips") or []
    found += limited(ips, f"{field}.ips", MAX_IPS)
    for i, text in enumerate(ips if len(ips) <= MAX_IPS else []):
        at = f"{field}.ips[{i}]"
        canonical = canonical_cidr(text)
        if canonical is None:
            found.append(
                bad(at, text, "must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)")
            )
        elif canonical != text:
            found.append(bad(at, text, f'must be in canonical form ("{canonical}")'))
        if text in ips[:i]:
            found.append(duplicate(at, text))
    return found


def canonical_cidr(text: str) -> str | None:
    """Give an interface address in its canonical form, None where it is none."""
    address, slash, length = text.partition("/")
    if not slash:
        return None
    if "." in address and ":" not in address:
        # Leading zeros are read as decimal, as Go's legacy parser does.
        address = ".".join(str(int(part)) if part.isdigit() else part for part in address.split("."))
    try:
        return str(ipaddress.ip_interface(f"{address}/{length}"))
    except ValueError:
        return None
