"""Chosen devices to `status.allocation` (resource.k8s.io/v1 AllocationResult)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dra.allocator.model import Features
from dra.allocator.requests import ClaimSearch
from dra.allocator.search import Chosen
from dra.values import Quantity

Json = dict[str, Any]


def make_allocation(
    claim: ClaimSearch, chosen: Sequence[Chosen], *, node_name: str, features: Features
) -> Json:
    """Give the AllocationResult of one claim: results in the order of choice, configuration, node selector."""
    devices: Json = {"results": [_result(item, features) for item in chosen]}
    config = _class_configs(chosen) + _claim_configs(claim.raw, chosen)
    if config:
        devices["config"] = config
    allocation: Json = {"devices": devices}
    selector = _node_selector(chosen, node_name)
    if selector is not None:
        allocation["nodeSelector"] = selector
    return allocation


def _result(item: Chosen, features: Features) -> Json:
    device = item.device
    result: Json = {"request": item.request.name, **device.id._asdict()}
    if item.request.admin:
        result["adminAccess"] = True
    if item.request.tolerations and features.device_taints:
        result["tolerations"] = [dict(toleration) for toleration in item.request.tolerations]
    if features.device_binding and device.binds_conditions:
        result["bindingConditions"] = list(device.binds_conditions)
        if device.binding_failure_conditions:
            result["bindingFailureConditions"] = list(device.binding_failure_conditions)
    if item.consumed is not None:
        result["shareID"] = str(uuid.uuid4())
        if item.consumed:
            capacities = device.raw["capacity"]
            result["consumedCapacity"] = {
                name: str(Quantity(amount, Quantity.of(capacities[name]["value"]).format))
                for name, amount in item.consumed.items()
            }
    return result


def _class_configs(chosen: Sequence[Chosen]) -> list[Json]:
    classes: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for item in chosen:
        _, names = classes.setdefault(item.request.class_name, (item.request.class_raw, []))
        if item.request.name not in names:
            names.append(item.request.name)
    return [
        {"source": "FromClass", "requests": names, **entry}
        for raw, names in classes.values()
        for entry in (raw.get("spec") or {}).get("config") or []
    ]


def _claim_configs(claim: Mapping[str, Any], chosen: Sequence[Chosen]) -> list[Json]:
    names = {item.request.name for item in chosen}
    names |= {name.partition("/")[0] for name in names}
    configs = ((claim.get("spec") or {}).get("devices") or {}).get("config") or []
    return [
        {"source": "FromClaim", **entry}
        for entry in configs
        if not entry.get("requests") or any(name in names for name in entry["requests"])
    ]


def _node_selector(chosen: Sequence[Chosen], node_name: str) -> Json | None:
    if any(item.device.node_name or item.device.binds_to_node for item in chosen):
        requirement = {"key": "metadata.name", "operator": "In", "values": [node_name]}
        return {"nodeSelectorTerms": [{"matchFields": [requirement]}]}
    term: dict[str, list[Any]] = {}
    for item in chosen:
        for source in (item.device.node_selector or {}).get("nodeSelectorTerms") or []:
            for kind in ("matchExpressions", "matchFields"):
                for requirement in source.get(kind) or []:
                    known = term.setdefault(kind, [])
                    if requirement not in known:
                        known.append(requirement)
    return {"nodeSelectorTerms": [term]} if term else None
