"""Filters of the scheduler that have nothing to do with claims: does a node suit a pod. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dra.allocator.nodes import node_matches
from dra.values import Quantity


def tolerates_node(taint: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a pod may be placed on a node with this taint."""
    if taint.get("effect") not in {"NoSchedule", "NoExecute"}:
        return True
    for toleration in tolerations:
        if toleration.get("effect") and toleration["effect"] != taint["effect"]:
            continue
        if toleration.get("key") and toleration["key"] != taint["key"]:
            continue
        operator = toleration.get("operator") or "Equal"
        if operator == "Exists":
            return True
        if toleration.get("key") and (toleration.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def requests_of(pod: Mapping[str, Any], resource: str) -> int:
    """Give what a pod asks of `cpu` or `memory`, in billionths: the sum of containers, or the largest init container."""
    spec = pod.get("spec") or {}

    def amount(container: Mapping[str, Any]) -> int:
        resources = container.get("resources") or {}
        value = (resources.get("requests") or {}).get(
            resource, (resources.get("limits") or {}).get(resource, "0")
        )
        return Quantity.of(str(value)).nano

    total = sum(amount(container) for container in spec.get("containers") or [])
    return max([total, *[amount(container) for container in spec.get("initContainers") or []]])


def why_not(
    pod: Mapping[str, Any], node: Mapping[str, Any], placed: Sequence[Mapping[str, Any]]
) -> str | None:
    """Give the scheduler's reason why a node does not suit a pod, None if it does."""
    spec, node_spec = pod.get("spec") or {}, node.get("spec") or {}
    labels = (node.get("metadata") or {}).get("labels") or {}
    if node_spec.get("unschedulable"):
        return "node(s) were unschedulable"
    for taint in node_spec.get("taints") or []:
        if not tolerates_node(taint, spec.get("tolerations") or []):
            return f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity and not node_matches(affinity, node):
        return "node(s) didn't match Pod's node affinity/selector"
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    for resource in ("cpu", "memory"):
        if resource not in allocatable:
            continue
        used = sum(requests_of(other, resource) for other in placed)
        if used + requests_of(pod, resource) > Quantity.of(str(allocatable[resource])).nano:
            return f"Insufficient {resource}"
    limit = allocatable.get("pods")
    if limit is not None and len(placed) >= Quantity.of(str(limit)).value:
        return "Too many pods"
    return None
