"""Filters of the scheduler that have nothing to do with claims: does a node suit a pod. Pure.

Source: kube-scheduler's plugins NodeUnschedulable, NodeName, TaintToleration, NodeAffinity and NodeResourcesFit. Not
looked at: ports, volumes, affinity between pods, spreading, preemption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.nodes import node_matches
from dra.values import Quantity

# Resources of a node that the filters compare; extended ones have rules of their own.
RESOURCES = ("cpu", "memory", "ephemeral-storage")
_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True)
class PodObstacle:
    """Why a node does not suit a pod.

    Attributes:
        kind: `unschedulable`, `node-name`, `taint`, `node-selector`, `resource`, `pods`, `plugin-short` or `no-class`.
        text: the scheduler's words.
        detail: the taint, label or amounts that are in the way.
    """

    kind: str
    text: str
    detail: str


@dataclass(slots=True)
class NodeUse:
    """What the pods on a node ask for: amounts in billionths by resource, and how many pods they are."""

    amounts: dict[str, int] = field(default_factory=dict)
    pods: int = 0

    def add(self, pod: Mapping[str, Any]) -> None:
        """Count a pod in."""
        self.pods += 1
        for resource in RESOURCES:
            amount = requests_of(pod, resource)
            if amount:
                self.amounts[resource] = self.amounts.get(resource, 0) + amount


def is_done(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has ended for good."""
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


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
    """Give what a pod asks of a resource, in billionths.

    The sum of its containers and sidecars, or the largest init container with the sidecars before it; plus the
    overhead. A request of the pod itself replaces all but the overhead. Source: KEP-753, KEP-2837.
    """
    spec = pod.get("spec") or {}
    whole = _amount(spec, resource)
    if whole is None:
        sidecars = largest = 0
        for container in spec.get("initContainers") or []:
            amount = _amount(container, resource) or 0
            if container.get("restartPolicy") == "Always":
                sidecars += amount
                largest = max(largest, sidecars)
            else:
                largest = max(largest, sidecars + amount)
        running = sum(_amount(container, resource) or 0 for container in spec.get("containers") or [])
        whole = max(running + sidecars, largest)
    return whole + Quantity.of(str((spec.get("overhead") or {}).get(resource, "0"))).nano


def _amount(holder: Mapping[str, Any], resource: str) -> int | None:
    resources = holder.get("resources") or {}
    value = (resources.get("requests") or {}).get(resource, (resources.get("limits") or {}).get(resource))
    return None if value is None else Quantity.of(str(value)).nano


def obstacles(pod: Mapping[str, Any], node: Mapping[str, Any], use: NodeUse | None) -> list[PodObstacle]:
    """Give all that keeps a pod from a node, in the scheduler's order; `use` None leaves resources out."""
    spec = pod.get("spec") or {}
    found = [
        *_cordon(spec, node),
        *_taints(spec, node),
        *_selection(spec, node),
    ]
    if use is not None:
        found += _resources(pod, node, use)
    return found


def _cordon(spec: Mapping[str, Any], node: Mapping[str, Any]) -> list[PodObstacle]:
    if not (node.get("spec") or {}).get("unschedulable"):
        return []
    if tolerates_node(_UNSCHEDULABLE, spec.get("tolerations") or []):
        return []
    return [PodObstacle("unschedulable", "node(s) were unschedulable", "the node is cordoned")]


def _taints(spec: Mapping[str, Any], node: Mapping[str, Any]) -> list[PodObstacle]:
    found = []
    for taint in (node.get("spec") or {}).get("taints") or []:
        if taint["key"] == _UNSCHEDULABLE["key"] and (node.get("spec") or {}).get("unschedulable"):
            continue  # the cordon says it
        if not tolerates_node(taint, spec.get("tolerations") or []):
            value = taint.get("value") or ""
            text = f"node(s) had untolerated taint(s) {{{taint['key']}: {value}}}"
            shown = f"{taint['key']}{'=' + value if value else ''}:{taint['effect']}"
            found.append(PodObstacle("taint", text, f"node taint {shown} is not tolerated"))
    return found


def _selection(spec: Mapping[str, Any], node: Mapping[str, Any]) -> list[PodObstacle]:
    text = "node(s) didn't match Pod's node affinity/selector"
    labels = (node.get("metadata") or {}).get("labels") or {}
    found = []
    for key, value in (spec.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            seen = f"the node has {labels[key]!r}" if key in labels else "the node has no such label"
            found.append(PodObstacle("node-selector", text, f"nodeSelector wants {key}={value}, {seen}"))
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity and not node_matches(affinity, node):
        found.append(
            PodObstacle("node-selector", text, "the required node affinity does not match its labels")
        )
    return found


def _resources(pod: Mapping[str, Any], node: Mapping[str, Any], use: NodeUse) -> list[PodObstacle]:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    found = []
    limit = allocatable.get("pods")
    if limit is not None and use.pods >= Quantity.of(str(limit)).value:
        found.append(PodObstacle("pods", "Too many pods", f"the node runs {use.pods} of {limit} pods"))
    for resource in RESOURCES:
        asked = requests_of(pod, resource)
        if not asked or resource not in allocatable:
            continue
        total = Quantity.of(str(allocatable[resource]))
        left = total.nano - use.amounts.get(resource, 0)
        if asked > left:
            form = total.format
            detail = (
                f"the pod asks {Quantity(asked, form)} {resource},"
                f" {Quantity(max(left, 0), form)} of {total} is free"
            )
            found.append(PodObstacle("resource", f"Insufficient {resource}", detail))
    return found
