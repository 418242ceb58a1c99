"""Where a pod can go: nodes filtered, claims allocated. Nothing is written here.

Source: the DynamicResources and NodeResourcesFit plugins of kube-scheduler 1.36.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.allocate import Allocator, allocated_state
from dra.allocator.extended import extended_claim, extended_requests, plugin_resources
from dra.allocator.model import AllocatedState, AllocatorError
from dra.allocator.nodes import node_matches
from dra.allocator.pod_filters import NodeUse, is_done, obstacles, requests_of
from dra.values import Quantity

Json = dict[str, Any]
Key = tuple[str, str]

ELSEWHERE = "resourceclaim not available on the node"
# Alternatives of a `firstAvailable` request; the first one is worth most. Source: the plugin's Score.
_MAX_ALTERNATIVES = 8


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
    """The cluster as one round of scheduling sees it; it follows what the round itself writes.

    `ruled_out` remembers on which nodes requests of a kind had no place. While devices are only taken it stays
    true, so that a thousand equal pods ask a full node once.
    """

    nodes: list[Json]
    claims: dict[Key, Json]
    allocator: Allocator
    by_resource: Mapping[str, str]
    ruled_out: dict[tuple[str, str], str] = field(default_factory=dict)
    # Claims for extended resources of pods that are not on a node, by the pod's UID.
    leftovers: dict[str, Json] = field(default_factory=dict)
    _placed: dict[str, list[Json]] = field(default_factory=dict)
    _use: dict[str, NodeUse] = field(default_factory=dict)

    def load_pods(self, pods: Iterable[Json]) -> None:
        """Count the pods that are on nodes."""
        for pod in pods:
            node = (pod.get("spec") or {}).get("nodeName")
            if node and not is_done(pod):
                self.add_pod(node, pod)

    def add_pod(self, node: str, pod: Json) -> None:
        """Count a pod on a node."""
        self._placed.setdefault(node, []).append(pod)
        self._use.setdefault(node, NodeUse()).add(pod)

    def placed(self, node: str) -> Sequence[Json]:
        """Give the pods on a node."""
        return self._placed.get(node, ())

    def use(self, node: str) -> NodeUse:
        """Give what the pods on a node ask for."""
        return self._use.get(node) or NodeUse()

    def claim_written(self, claim: Json) -> None:
        """Take a claim as it was stored; its allocation holds devices from now on."""
        metadata = claim["metadata"]
        before = self.claims.get((metadata["namespace"], metadata["name"]))
        self.claims[metadata["namespace"], metadata["name"]] = claim
        if before is not None and (before.get("status") or {}).get("allocation"):
            if not (claim.get("status") or {}).get("allocation"):
                self.count_allocated()
                self.ruled_out.clear()
        elif (claim.get("status") or {}).get("allocation"):
            self.allocator.allocated = joined(self.allocator.allocated, allocated_state([claim]))

    def count_allocated(self) -> None:
        """Work out anew what claims hold."""
        self.allocator.allocated = allocated_state(self.claims.values())


def joined(first: AllocatedState, second: AllocatedState) -> AllocatedState:
    """Give what both hold."""
    capacity = {device: dict(used) for device, used in second.capacity.items()}
    for device, used in first.capacity.items():
        total = capacity.setdefault(device, {})
        for name, amount in used.items():
            total[name] = total.get(name, 0) + amount
    return AllocatedState(first.devices | second.devices, capacity, first.shared | second.shared)


@dataclass(slots=True)
class NoPlace:
    """Why a pod has no place: how many nodes have each reason, and on how many it would not help if other pods went."""

    reasons: Counter[str] = field(default_factory=Counter)
    fixed: int = 0

    def add(self, reason: str, pod: Json, node: Json) -> None:
        """Count a node."""
        self.reasons[reason] += 1
        self.fixed += not _others_hold(reason, pod, node)


def _others_hold(reason: str, pod: Json, node: Json) -> bool:
    """Whether a node would suit if other pods left it. Source: which plugins answer Unschedulable, and which
    UnschedulableAndUnresolvable, as DynamicResources always does.
    """
    resource = reason.removeprefix("Insufficient ")
    if resource == reason:
        return reason == "Too many pods"
    total = ((node.get("status") or {}).get("allocatable") or {}).get(resource)
    return total is not None and requests_of(pod, resource) <= Quantity.of(str(total)).nano


def choose_place(pod: Json, claims: Sequence[Json], world: World) -> Placement | NoPlace:
    """Give the best place for a pod, or why there is none.

    Nodes are tried in the order of their names; the first one wins, unless a `firstAvailable` request gets a better
    alternative elsewhere.

    Raises:
        AllocatorError: the attempt is over for all nodes.
    """
    nowhere = NoPlace()
    best: Placement | None = None
    highest = sum(map(_best_score, claims))
    key = _requests_key(claims)
    for node in world.nodes:
        # A full node is passed over before anything else is looked at.
        known = world.ruled_out.get((node["metadata"]["name"], key)) if claims else None
        placement = known or _try(pod, node, claims, world)
        if isinstance(placement, str):
            nowhere.add(placement, pod, node)
            continue
        if best is None or placement.score > best.score:
            best = placement
        if best.score >= highest:
            return best
    return best if best is not None else nowhere


def _try(pod: Json, node: Json, claims: Sequence[Json], world: World) -> Placement | str:
    name = node["metadata"]["name"]
    found = obstacles(pod, node, world.use(name))
    if found:
        return found[0].text
    served, reason = plugin_resources(pod, node, world.placed(name), world.by_resource)
    if reason is not None:
        return reason
    fresh: list[Json] = []
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation")
        if not allocation:
            fresh.append(claim)
        elif allocation.get("nodeSelector") and not node_matches(allocation["nodeSelector"], node):
            return ELSEWHERE
    requests, mappings = extended_requests(
        pod, {resource: name for resource, name in world.by_resource.items() if resource not in served}
    )
    special = extended_claim(pod, requests) if requests else None
    wanted = [*fresh, *([special] if special else [])]
    placement = Placement(node=name, reserve=[claim for claim in claims if claim not in fresh])
    if not wanted:
        return placement
    allocations = _allocate(node, wanted, world)
    if isinstance(allocations, str):
        return allocations
    placement.allocations = list(zip(fresh, allocations, strict=False))
    if special is not None:
        placement.extended = (special, allocations[-1], mappings)
    placement.score = sum(_score(claim, allocation) for claim, allocation in placement.allocations)
    return placement


def _allocate(node: Json, wanted: Sequence[Json], world: World) -> list[Json] | str:
    key = (node["metadata"]["name"], _requests_key(wanted))
    if key in world.ruled_out:
        return world.ruled_out[key]
    try:
        found = world.allocator.allocate(node, wanted)
    except AllocatorError as error:
        if not error.on_node_only:
            raise
        return error.message
    if found is None:
        world.ruled_out[key] = "cannot allocate all claims"
        return world.ruled_out[key]
    return found


def _requests_key(claims: Sequence[Json]) -> str:
    """Give a text that is equal for claims that ask for the same; empty if one of them is allocated."""
    if any((claim.get("status") or {}).get("allocation") for claim in claims):
        return ""
    return json.dumps([claim["spec"] for claim in claims], sort_keys=True)


def _score(claim: Json, allocation: Json) -> int:
    """Prefer nodes where `firstAvailable` requests get an early alternative: 8 minus its position each."""
    chosen = {result["request"] for result in allocation["devices"]["results"]}
    return sum(
        _MAX_ALTERNATIVES - position
        for request in claim["spec"]["devices"].get("requests") or []
        for position, alternative in enumerate(request.get("firstAvailable") or [])
        if f"{request['name']}/{alternative['name']}" in chosen
    )


def _best_score(claim: Json) -> int:
    if (claim.get("status") or {}).get("allocation"):
        return 0
    requests = claim["spec"]["devices"].get("requests") or []
    return sum(_MAX_ALTERNATIVES for request in requests if request.get("firstAvailable"))


def pod_claims(pod: Mapping[str, Any], claims: Mapping[Key, Json]) -> tuple[list[Json], str]:
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
        if claim not in found:
            found.append(claim)
    return found, ""


def unschedulable_text(pod: Json, nowhere: NoPlace, *, claims: bool, freed: bool = False) -> str:
    """Give the text of kube-scheduler: why each node is out, and that preemption changes nothing.

    `0/2 nodes are available: 2 cannot allocate all claims. still not schedulable, preemption: 0/2 nodes are available: 2
    Preemption is not helpful for scheduling.`

    Args:
        pod: the pod that waits.
        nowhere: why.
        claims: whether it has claims.
        freed: whether one of them was deallocated, so that it may get another place.

    Source: framework.FitError, and the PostFilter of DynamicResources and DefaultPreemption.
    """
    reasons = nowhere.reasons
    total = sum(reasons.values())
    if not total:
        return "no nodes available to schedule pods"
    before = "still not schedulable" if claims else "no new claims to deallocate"
    if freed:
        before = "deallocation of ResourceClaim completed"
    if (pod.get("spec") or {}).get("preemptionPolicy") == "Never":
        after = "not eligible due to preemptionPolicy=Never."
    else:
        helpless = {
            "Preemption is not helpful for scheduling": nowhere.fixed,
            "No preemption victims found for incoming pod": total - nowhere.fixed,
        }
        after = _histogram(total, {text: count for text, count in helpless.items() if count})
    return f"{_histogram(total, reasons)} {before}, preemption: {after}"


def _histogram(total: int, reasons: Mapping[str, int]) -> str:
    parts = sorted(f"{count} {reason}" for reason, count in reasons.items())
    return f"0/{total} nodes are available: {', '.join(parts)}."
