"""Between the version a client speaks and the version objects are kept in.

Pure: both directions give new objects. The shapes of resource.k8s.io are those of `dra.api.versions`; what is here are the
server's habits. Source: the conversion functions of resource.k8s.io and of events.k8s.io.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra.api.versions import from_v1, map_requests, to_v1
from dra.sim.apiserver.registry import DRA, Resource

Json = dict[str, Any]


def to_storage(resource: Resource, version: str, obj: Json) -> Json:
    """Give the object in the version it is kept in, kind and apiVersion set."""
    kind = obj.get("kind") if resource.custom is not None else resource.kind
    result = {**obj, "kind": kind, "apiVersion": resource.api_version(resource.storage)}
    if resource.group == DRA and version == "v1beta1":
        return map_requests(
            to_v1(result, version=version, kind=resource.kind), resource.kind, _stored_request
        )
    if resource.group == "events.k8s.io":
        return _event_to_core(result)
    return result


def from_storage(resource: Resource, version: str, obj: Json) -> Json:
    """Give the kept object in the version asked for."""
    result = {**obj, "kind": resource.kind, "apiVersion": resource.api_version(version)}
    if resource.group == DRA and version == "v1beta1":
        return map_requests(
            from_v1(result, version=version, kind=resource.kind), resource.kind, _shown_request
        )
    if resource.group == "events.k8s.io":
        return _event_from_core(result)
    return result


def _stored_request(request: Mapping[str, Any]) -> Json:
    """Give a request as the server stores it: what says nothing is not there."""
    exact = {k: v for k, v in (request.get("exactly") or {}).items() if v not in (None, "", [], 0)}
    rest = {k: v for k, v in request.items() if k != "exactly"}
    return {**rest, "exactly": exact} if exact else rest


def _shown_request(request: Mapping[str, Any]) -> Json:
    # The class name is written always there.
    return {"deviceClassName": "", **request}


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
