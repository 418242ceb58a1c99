"""Conversion of resource.k8s.io objects between the served versions, on plain JSON.

Everything above `dra/kube` reads and writes the shape of v1; this module is the only place that knows how
v1beta1 and v1beta2 look. Pure: nothing is changed in place, what a conversion does not touch is shared with
the input, and fields it does not know are kept.

Source: k8s.io/api/resource/{v1,v1beta2,v1beta1}. v1beta2 has the shape of v1. v1beta1 wraps a device's
content in `basic` and has the fields of `exactly` directly in the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

GROUP = "resource.k8s.io"
# Newest first: the order in which a client prefers them.
VERSIONS = ("v1", "v1beta2", "v1beta1")

# The releases of Kubernetes that this driver works with.
OLDEST_KUBERNETES, NEWEST_KUBERNETES = (1, 32), (1, 37)
# The release since which a server serves a version once the group is on. Source: KEP-4381, API life cycle.
_SINCE = (("v1", (1, 34)), ("v1beta2", (1, 33)), ("v1beta1", (1, 32)))

Json = dict[str, Any]


def best_version(kubernetes: tuple[int, int]) -> str | None:
    """Give the newest version that a server of this release serves; None for releases this driver does not know."""
    if not OLDEST_KUBERNETES <= kubernetes <= NEWEST_KUBERNETES:
        return None
    return next(version for version, since in _SINCE if kubernetes >= since)


def to_v1(obj: Mapping[str, Any], *, version: str, kind: str) -> Json:
    """Give the v1 shape of an object that was read as `version`.

    Works on whole objects, on items of a list (which carry no kind) and on partial objects (a patch).
    """
    return _convert(obj, kind=kind, api_version="v1", parts=_FROM_V1BETA1 if version == "v1beta1" else {})


def from_v1(obj: Mapping[str, Any], *, version: str, kind: str) -> Json:
    """Give the shape that `version` wants for an object (or a patch of one) written as v1."""
    return _convert(obj, kind=kind, api_version=version, parts=_TO_V1BETA1 if version == "v1beta1" else {})


def map_requests(obj: Mapping[str, Any], kind: str, change: Callable[[Mapping[str, Any]], Json]) -> Json:
    """Give a claim or template with each of its requests changed; other kinds as they are."""
    spec = obj.get("spec")
    convert = {
        "ResourceClaim": _claim_spec(change),
        "ResourceClaimTemplate": _template_spec(_claim_spec(change)),
    }
    if kind not in convert or not isinstance(spec, Mapping):
        return dict(obj)
    return {**obj, "spec": convert[kind](spec)}


def _convert(
    obj: Mapping[str, Any], *, kind: str, api_version: str, parts: Mapping[str, Callable[[Any], Any]]
) -> Json:
    result = dict(obj)
    if "apiVersion" in result:
        result["apiVersion"] = f"{GROUP}/{api_version}"
    change = parts.get(kind)
    if change is not None and isinstance(result.get("spec"), Mapping):
        result["spec"] = change(result["spec"])
    return result


def _each(items: Any, change: Callable[[Mapping[str, Any]], Json]) -> Any:
    if not isinstance(items, list):
        return items
    return [change(item) if isinstance(item, Mapping) else item for item in items]


def _slice_spec(change: Callable[[Mapping[str, Any]], Json]) -> Callable[[Mapping[str, Any]], Json]:
    def convert(spec: Mapping[str, Any]) -> Json:
        if "devices" not in spec:
            return dict(spec)
        return {**spec, "devices": _each(spec["devices"], change)}

    return convert


def _claim_spec(change: Callable[[Mapping[str, Any]], Json]) -> Callable[[Mapping[str, Any]], Json]:
    def convert(spec: Mapping[str, Any]) -> Json:
        devices = spec.get("devices")
        if not isinstance(devices, Mapping) or "requests" not in devices:
            return dict(spec)
        return {**spec, "devices": {**devices, "requests": _each(devices["requests"], change)}}

    return convert


def _template_spec(convert: Callable[[Mapping[str, Any]], Json]) -> Callable[[Mapping[str, Any]], Json]:
    def outer(spec: Mapping[str, Any]) -> Json:
        inner = spec.get("spec")
        return {**spec, "spec": convert(inner)} if isinstance(inner, Mapping) else dict(spec)

    return outer


def _flat_device(device: Mapping[str, Any]) -> Json:
    rest = {key: value for key, value in device.items() if key != "basic"}
    return {**rest, **(device.get("basic") or {})}


def _basic_device(device: Mapping[str, Any]) -> Json:
    # `basic` is required there, even if it is empty.
    return {"name": device.get("name", ""), "basic": {k: v for k, v in device.items() if k != "name"}}


def _nested_request(request: Mapping[str, Any]) -> Json:
    if request.get("firstAvailable"):
        # The server adds an empty class name beside the list; v1 has no place for it.
        return {"name": request.get("name", ""), "firstAvailable": request["firstAvailable"]}
    content = {k: v for k, v in request.items() if k not in ("name", "firstAvailable")}
    return {"name": request.get("name", ""), "exactly": content}


def _flat_request(request: Mapping[str, Any]) -> Json:
    rest = {key: value for key, value in request.items() if key != "exactly"}
    return {**rest, **(request.get("exactly") or {})}


_FROM_V1BETA1: dict[str, Callable[[Any], Any]] = {
    "ResourceSlice": _slice_spec(_flat_device),
    "ResourceClaim": _claim_spec(_nested_request),
    "ResourceClaimTemplate": _template_spec(_claim_spec(_nested_request)),
}
_TO_V1BETA1: dict[str, Callable[[Any], Any]] = {
    "ResourceSlice": _slice_spec(_basic_device),
    "ResourceClaim": _claim_spec(_flat_request),
    "ResourceClaimTemplate": _template_spec(_claim_spec(_flat_request)),
}
