"""A scheduler for pods with claims: filters nodes, allocates with `dra.allocator`, reserves, binds.

Source: the DynamicResources plugin of kube-scheduler 1.36. Not simulated: preemption, priorities, spreading.
Nodes are tried in the order of their names; the first that fits, with the least-favoured alternative of a
`firstAvailable` request avoided, gets the pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.allocate import Allocator, allocated_state
from dra.allocator.extended import classes_by_resource, extended_claim, extended_requests, plugin_resources
from dra.allocator.model import AllocatorError, CompileSelector, Features
from dra.allocator.nodes import node_matches
from dra.allocator.pod_filters import is_done, why_not
from dra.errors import DraError
from dra.sim.control.api import (
    CLAIMS,
    CLASSES,
    EVENTS,
    NODES,
    PODS,
    SLICES,
    CallFailed,
    ControlApi,
    Json,
    path_of,
)
from dra.sim.control.claims import FINALIZER


@dataclass(slots=True)
class Placement:
    """Where a pod goes: the node, the claims to write with their allocations, and the extended-resource claim."""

    node: str
    allocations: list[tuple[Json, Json]] = field(default_factory=list)
    reserve: list[Json] = field(default_factory=list)
    extended: tuple[Json, Json, list[Json]] | None = None
    score: int = 0


@dataclass(slots=True)
class World:
    """The cluster as one round of scheduling sees it."""

    nodes: list[Json]
    pods: list[Json]
    claims: dict[tuple[str, str], Json]
    classes: list[Json]
    allocator: Allocator
    by_resource: dict[str, str]


class Scheduler:
    """One `sync` places every pod that can be placed.

    Args:
        compile_selector: the CEL compiler.
        features: the allocator's gates.
    """

    def __init__(
        self, api: ControlApi, compile_selector: CompileSelector, *, features: Features | None = None
    ) -> None:
        self._api = api
        self._compile = compile_selector
        self._features = features or Features()
        self._events: Counter[str] = Counter()

    def sync(self) -> None:
        """Do one round over the pods that wait, oldest first."""
        pods = self._api.list(PODS)
        waiting = [pod for pod in pods if _waits(pod)]
        for pod in sorted(waiting, key=_age):
            try:
                self._schedule(pod, self._look(pods))
            except CallFailed as error:
                if error.status not in {404, 409}:
                    raise
            pods = self._api.list(PODS)

    def _look(self, pods: list[Json]) -> World:
        claims = self._api.list(CLAIMS)
        classes = self._api.list(CLASSES)
        allocator = Allocator(
            slices=self._api.list(SLICES),
            classes=classes,
            allocated=allocated_state(claims),
            compile_selector=self._compile,
            features=self._features,
        )
        return World(
            nodes=sorted(self._api.list(NODES), key=lambda node: str(node["metadata"]["name"])),
            pods=pods,
            claims={(item["metadata"]["namespace"], item["metadata"]["name"]): item for item in claims},
            classes=classes,
            allocator=allocator,
            by_resource=classes_by_resource(classes),
        )

    def _schedule(self, pod: Json, world: World) -> None:
        claims, missing = pod_claims(pod, world.claims)
        if missing:
            self._unschedulable(pod, missing)
            return
        reasons: Counter[str] = Counter()
        best: Placement | None = None
        try:
            for node in world.nodes:
                placement = self._try(pod, node, claims, world)
                if isinstance(placement, str):
                    reasons[placement] += 1
                elif best is None or placement.score > best.score:
                    best = placement
        except DraError as error:
            self._unschedulable(pod, f'running Filter plugin "DynamicResources": {error.message}')
            return
        if best is None:
            self._unschedulable(pod, unschedulable_text(len(world.nodes), reasons))
        else:
            self._bind(pod, best)

    def _try(self, pod: Json, node: Json, claims: Sequence[Json], world: World) -> Placement | str:
        name = node["metadata"]["name"]
        placed = [
            other
            for other in world.pods
            if (other.get("spec") or {}).get("nodeName") == name and not is_done(other)
        ]
        reason = why_not(pod, node, placed)
        if reason is not None:
            return reason
        served, reason = plugin_resources(pod, node, placed, world.by_resource)
        if reason is not None:
            return reason
        fresh: list[Json] = []
        for claim in claims:
            allocation = (claim.get("status") or {}).get("allocation")
            if not allocation:
                fresh.append(claim)
            elif allocation.get("nodeSelector") and not node_matches(allocation["nodeSelector"], node):
                return "resourceclaim not available on the node"
        requests, mappings = extended_requests(
            pod, {k: v for k, v in world.by_resource.items() if k not in served}
        )
        special = extended_claim(pod, requests) if requests else None
        wanted_claims = [*fresh, *([special] if special else [])]
        if not wanted_claims:
            return Placement(node=name, reserve=list(claims))
        try:
            found = world.allocator.allocate(node, wanted_claims)
        except AllocatorError as error:
            if error.on_node_only:
                return error.message
            raise
        if found is None:
            return "cannot allocate all claims"
        placement = Placement(node=name, reserve=[claim for claim in claims if claim not in fresh])
        placement.allocations = list(zip(fresh, found, strict=False))
        if special is not None:
            placement.extended = (special, found[-1], mappings)
        placement.score = sum(_score(claim, allocation) for claim, allocation in placement.allocations)
        return placement

    # -- writing -----------------------------------------------------------------------------------

    def _bind(self, pod: Json, placement: Placement) -> None:
        for claim, allocation in placement.allocations:
            self._write_claim(claim, pod, allocation)
        for claim in placement.reserve:
            self._write_claim(claim, pod, None)
        if placement.extended is not None:
            claim, allocation, mappings = placement.extended
            body = {**claim, "metadata": {k: v for k, v in claim["metadata"].items() if k != "name"}}
            made = self._api.create(CLAIMS, body)
            self._write_claim(made, pod, allocation)
            status = {
                **(pod.get("status") or {}),
                "extendedResourceClaimStatus": {
                    "resourceClaimName": made["metadata"]["name"],
                    "requestMappings": mappings,
                },
            }
            pod = self._api.replace(PODS, {**pod, "status": status}, subresource="status")
        path = f"{path_of(PODS, pod)}/{pod['metadata']['name']}/binding"
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]},
            "target": {"kind": "Node", "name": placement.node},
        }
        self._api.call("POST", path, body)
        target = f"{pod['metadata']['namespace']}/{pod['metadata']['name']} to {placement.node}"
        self._event(pod, "Normal", "Scheduled", f"Successfully assigned {target}")

    def _write_claim(self, claim: Json, pod: Json, allocation: Json | None) -> None:
        status = dict(claim.get("status") or {})
        if allocation is not None:
            finalizers = claim["metadata"].get("finalizers") or []
            if FINALIZER not in finalizers:
                metadata = {**claim["metadata"], "finalizers": [*finalizers, FINALIZER]}
                claim = self._api.replace(CLAIMS, {**claim, "metadata": metadata})
            status["allocation"] = allocation
        consumer = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        reserved = status.get("reservedFor") or []
        if all(entry.get("uid") != consumer["uid"] for entry in reserved):
            reserved = [*reserved, consumer]
        elif allocation is None:
            return
        status["reservedFor"] = reserved
        self._api.replace(CLAIMS, {**claim, "status": status}, subresource="status")

    def _unschedulable(self, pod: Json, message: str) -> None:
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": self._api.server.api.now(),
        }
        status = dict(pod.get("status") or {})
        others = [item for item in status.get("conditions") or [] if item["type"] != "PodScheduled"]
        old = [item for item in status.get("conditions") or [] if item["type"] == "PodScheduled"]
        if old and old[0].get("message") == message and old[0].get("status") == "False":
            return
        status["conditions"] = [*others, condition]
        status.setdefault("phase", "Pending")
        self._api.replace(PODS, {**pod, "status": status}, subresource="status")
        self._event(pod, "Warning", "FailedScheduling", message)

    def _event(self, pod: Json, kind: str, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        self._events[metadata["uid"]] += 1
        now = self._api.server.api.now()
        self._api.create(
            EVENTS,
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
                "involvedObject": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
                "type": kind,
                "reason": reason,
                "message": message,
                "source": {"component": "default-scheduler"},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            },
        )


def _waits(pod: Mapping[str, Any]) -> bool:
    spec = pod.get("spec") or {}
    return not (
        spec.get("nodeName")
        or spec.get("schedulingGates")
        or is_done(pod)
        or pod["metadata"].get("deletionTimestamp")
        or (spec.get("schedulerName") or "default-scheduler") != "default-scheduler"
    )


def _age(pod: Mapping[str, Any]) -> tuple[str, int, str]:
    # Times have whole seconds; the revision at which a pod was made is not kept, so the uid breaks ties.
    metadata = pod["metadata"]
    return (
        metadata.get("creationTimestamp") or "",
        -(int((pod.get("spec") or {}).get("priority") or 0)),
        metadata["name"],
    )


def pod_claims(pod: Mapping[str, Any], claims: Mapping[tuple[str, str], Json]) -> tuple[list[Json], str]:
    """Give a pod's claims in its order, and why one of them is missing (empty if none is)."""
    namespace = pod["metadata"]["namespace"]
    statuses = {
        entry["name"]: entry.get("resourceClaimName")
        for entry in (pod.get("status") or {}).get("resourceClaimStatuses") or []
    }
    found: list[Json] = []
    for entry in (pod.get("spec") or {}).get("resourceClaims") or []:
        name = entry.get("resourceClaimName")
        if not name:
            if entry["name"] not in statuses:
                return [], f'pod "{namespace}/{pod["metadata"]["name"]}": ResourceClaim not created yet'
            name = statuses[entry["name"]]
            if not name:
                continue
        claim = claims.get((namespace, name))
        if claim is None:
            return [], f'resourceclaim "{name}" not found'
        if claim["metadata"].get("deletionTimestamp"):
            return [], f'resourceclaim "{name}" is being deleted'
        found.append(claim)
    return found, ""


def _score(claim: Json, allocation: Json) -> int:
    """Prefer nodes where `firstAvailable` requests get an early alternative: 8 minus its position each."""
    total = 0
    chosen = {result["request"] for result in allocation["devices"]["results"]}
    for request in claim["spec"]["devices"].get("requests") or []:
        for position, alternative in enumerate(request.get("firstAvailable") or []):
            if f"{request['name']}/{alternative['name']}" in chosen:
                total += 8 - position
    return total


def unschedulable_text(total: int, reasons: Mapping[str, int]) -> str:
    """Give the text of kube-scheduler: `0/2 nodes are available: 2 cannot allocate all claims.`"""
    if not total:
        return "no nodes available to schedule pods"
    parts = sorted(f"{count} {reason}" for reason, count in reasons.items())
    return f"0/{total} nodes are available: {', '.join(parts)}."
