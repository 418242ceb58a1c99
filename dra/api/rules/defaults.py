"""What the server fills in where a claim says nothing. Source: pkg/apis/resource/v1/defaults of Kubernetes 1.36."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


def exact_requests(spec: Json) -> Iterator[Json]:
    """Give every request and alternative of a claim spec that selects devices."""
    for request in (spec.get("devices") or {}).get("requests") or []:
        if request.get("exactly") is not None:
            yield request["exactly"]
        yield from request.get("firstAvailable") or []


def default_claim(spec: Json) -> None:
    """Fill in allocation mode, count and toleration operators."""
    spec.setdefault("devices", {})
    for request in exact_requests(spec):
        if not request.get("allocationMode"):
            request["allocationMode"] = "ExactCount"
        if request["allocationMode"] == "ExactCount" and not request.get("count"):
            request["count"] = 1
        for toleration in request.get("tolerations") or []:
            if not toleration.get("operator"):
                toleration["operator"] = "Equal"
