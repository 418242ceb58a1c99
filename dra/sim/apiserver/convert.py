"""Between the version a client speaks and the version objects are kept in.

Pure: both directions give new objects. Source: the conversion functions of resource.k8s.io (v1beta1 wraps a device in
`basic` and flattens an exact request) and of events.k8s.io.
"""

from __future__ import annotations

from typing import Any

from dra.sim.apiserver.registry import DRA, Resource

Json = dict[str, Any]

_EXACT = ("deviceClassName", "selectors", "allocationMode", "count", "adminAccess", "tolerations", "capacity")


def to_storage(resource: Resource, version: str, obj: Json) -> Json:
    """Give the object in the version it is kept in, kind and apiVersion set."""
    kind = obj.get("kind") if resource.custom is not None else resource.kind
    result = {**obj, "kind": kind, "apiVersion": resource.api_version(resource.storage)}
    if resource.group == DRA and version == "v1beta1":
        return _map_dra(result, resource.kind, _device_from_beta1, _request_from_beta1)
    if resource.group == "events.k8s.io":
        return _event_to_core(result)
    return result


def from_storage(resource: Resource, version: str, obj: Json) -> Json:
    """Give the kept object in the version asked for."""
    result = {**obj, "kind": resource.kind, "apiVersion": resource.api_version(version)}
    if resource.group == DRA and version == "v1beta1":
        return _map_dra(result, resource.kind, _device_to_beta1, _request_to_beta1)
    if resource.group == "events.k8s.io":
        return _event_from_core(result)
    return result


def _map_dra(obj: Json, kind: str, device: Any, request: Any) -> Json:
    spec = obj.get("spec")
    if not isinstance(spec, dict):
        return obj
    if kind == "ResourceSlice" and spec.get("devices"):
        return {**obj, "spec": {**spec, "devices": [device(d) for d in spec["devices"]]}}
    if kind == "ResourceClaim":
        return {**obj, "spec": _map_claim(spec, request)}
    if kind == "ResourceClaimTemplate" and isinstance(spec.get("spec"), dict):
        return {**obj, "spec": {**spec, "spec": _map_claim(spec["spec"], request)}}
    return obj


def _map_claim(spec: Json, request: Any) -> Json:
    devices = spec.get("devices")
    if not isinstance(devices, dict) or not devices.get("requests"):
        return spec
    return {**spec, "devices": {**devices, "requests": [request(r) for r in devices["requests"]]}}


def _device_to_beta1(device: Json) -> Json:
    return {"name": device.get("name", ""), "basic": {k: v for k, v in device.items() if k != "name"}}


def _device_from_beta1(device: Json) -> Json:
    return {"name": device.get("name", ""), **(device.get("basic") or {})}


def _request_to_beta1(request: Json) -> Json:
    flat = {k: v for k, v in request.items() if k != "exactly"}
    # The class name is written always there.
    return {"deviceClassName": "", **flat, **(request.get("exactly") or {})}


def _request_from_beta1(request: Json) -> Json:
    exact = {k: request[k] for k in _EXACT if request.get(k) not in (None, "", [], 0)}
    rest = {k: v for k, v in request.items() if k not in _EXACT}
    return {**rest, "exactly": exact} if exact else rest


_EVENT_FIELDS = {
    "regarding": "involvedObject", "note": "message", "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp", "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count", "reportingController": "reportingComponent",
}  # fmt: skip
_EVENT_FIELDS_BACK = {core: new for new, core in _EVENT_FIELDS.items()}


def _event_to_core(obj: Json) -> Json:
    result = {_EVENT_FIELDS.get(k, k): v for k, v in obj.items()}
    return {"involvedObject": {}, "source": {}, **result, "apiVersion": "v1"}


def _event_from_core(obj: Json) -> Json:
    return {_EVENT_FIELDS_BACK.get(k, k): v for k, v in obj.items()}
