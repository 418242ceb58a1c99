"""A scheduler for pods with claims: chooses a place, writes allocations and reservations, binds.

Source: the DynamicResources plugin of kube-scheduler 1.36. Not simulated: preemption, spreading, waiting for binding
conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dra.allocator.allocate import Allocator
from dra.allocator.extended import EXTENDED_CLAIM_ANNOTATION, classes_by_resource
from dra.allocator.model import AllocatedState, CompileSelector, Features
from dra.allocator.pod_filters import is_done
from dra.errors import DraError
from dra.sim.apiserver.storage import Change
from dra.sim.control.api import (
    CLAIMS,
    CLASSES,
    NODES,
    PODS,
    SLICES,
    TAINT_RULES,
    CallFailed,
    ControlApi,
    Json,
)
from dra.sim.control.claims import FINALIZER, owner_pod, with_reservation
from dra.sim.control.placement import (
    ELSEWHERE,
    Placement,
    World,
    choose_place,
    pod_claims,
    unschedulable_text,
)
from dra.sim.control.taints import tainted_slices

_COMPONENT = "default-scheduler"


class Scheduler:
    """One `sync` places every pod that can be placed.

    A pod without a place is tried again when it changes, or when something happened that could give it one.

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
        # Moves with each change that could give a waiting pod a place.
        self._chances = 0
        self._ruled_out: dict[tuple[str, str], str] = {}
        self._ruled_out_at = -1
        # (resourceVersion, chances) with which a pod was tried in vain, by UID.
        self._parked: dict[str, tuple[str, int]] = {}
        self._allocator: Allocator | None = None
        self._allocator_key: tuple[tuple[str, str], ...] = ()

    def noticed(self, resource: str, change: Change) -> None:
        """Take a write to the API; quick, from any thread."""
        if could_help(resource, change):
            self._chances += 1

    def sync(self) -> None:
        """Do one round over the pods that wait: high priority first, then the oldest."""
        chances = self._chances
        pods = self._api.list(PODS)
        waiting = [pod for pod in pods if _waits(pod)]
        uids = {pod["metadata"]["uid"] for pod in waiting}
        self._parked = {uid: seen for uid, seen in self._parked.items() if uid in uids}
        todo = [pod for pod in waiting if self._parked.get(pod["metadata"]["uid"]) != _seen(pod, chances)]
        if not todo:
            return
        world = self._look(pods, chances)
        for pod in sorted(todo, key=_rank):
            self._api.attempt(self._schedule, pod, world, chances)

    def _look(self, pods: list[Json], chances: int) -> World:
        if self._ruled_out_at != chances:
            self._ruled_out, self._ruled_out_at = {}, chances
        classes = self._api.list(CLASSES)
        claims = self._api.list(CLAIMS)
        world = World(
            nodes=self._api.list(NODES),
            claims={(item["metadata"]["namespace"], item["metadata"]["name"]): item for item in claims},
            allocator=self._allocator_for(classes),
            by_resource=classes_by_resource(classes),
            ruled_out=self._ruled_out,
            leftovers=_extended_by_pod(claims),
        )
        world.load_pods(pods)
        world.count_allocated()
        return world

    def _allocator_for(self, classes: list[Json]) -> Allocator:
        """Give the allocator for the slices and classes of now; parsed slices and verdicts are kept while they stay."""
        slices, rules = self._api.list(SLICES), self._api.list(TAINT_RULES)
        key = tuple(
            (item["metadata"]["uid"], item["metadata"]["resourceVersion"])
            for item in (*slices, *classes, *rules)
        )
        if self._allocator is None or key != self._allocator_key:
            self._allocator_key = key
            self._allocator = Allocator(
                slices=tainted_slices(slices, rules),
                classes=classes,
                allocated=AllocatedState(),
                compile_selector=self._compile,
                features=self._features,
            )
        return self._allocator

    def _schedule(self, pod: Json, world: World, chances: int) -> None:
        self._drop_leftover(pod, world)
        claims, missing = pod_claims(pod, world.claims)
        if missing:
            self._park(pod, missing, chances)
            return
        try:
            place = choose_place(pod, claims, world)
        except DraError as error:
            self._park(pod, f'running Filter plugin "DynamicResources": {error.message}', chances)
            return
        if isinstance(place, Placement):
            self._bind(pod, place, world)
            return
        # The scheduler finds out about extended resources late: a claim made for them counts as one.
        asks = bool(claims) or "cannot allocate all claims" in place.reasons
        freed = ELSEWHERE in place.reasons and self._give_up_claim(pod, claims, world)
        self._park(pod, unschedulable_text(pod, place, claims=asks, freed=freed), chances)

    def _give_up_claim(self, pod: Json, claims: Sequence[Json], world: World) -> bool:
        """Deallocate a claim that nobody else uses: it may fit where the pod can go. Source: PostFilter.

        Gives whether there was one.
        """
        uid = pod["metadata"]["uid"]
        for claim in claims:
            status = claim.get("status") or {}
            if status.get("allocation") and all(
                user.get("uid") == uid for user in status.get("reservedFor") or []
            ):
                world.claim_written(self._deallocate(claim))
                return True
        return False

    # -- writing -----------------------------------------------------------------------------------

    def _bind(self, pod: Json, place: Placement, world: World) -> None:
        for claim, allocation in place.allocations:
            self._write_claim(claim, pod, allocation, world)
        for claim in place.reserve:
            self._write_claim(claim, pod, None, world)
        if place.extended is not None:
            pod = self._write_extended(pod, place.extended, world)
        self._api.bind(pod, place.node)
        self._parked.pop(pod["metadata"]["uid"], None)
        world.add_pod(place.node, pod)
        target = f"{pod['metadata']['namespace']}/{pod['metadata']['name']} to {place.node}"
        self._event(pod, "Normal", "Scheduled", f"Successfully assigned {target}")

    def _write_claim(self, claim: Json, pod: Json, allocation: Json | None, world: World) -> None:
        try:
            status = with_reservation(claim, pod)
        except ValueError as error:
            raise CallFailed("PUT", claim["metadata"]["name"], 409, {"message": str(error)}) from error
        if allocation is not None:
            finalizers = claim["metadata"].get("finalizers") or []
            if FINALIZER not in finalizers:
                metadata = {**claim["metadata"], "finalizers": [*finalizers, FINALIZER]}
                claim = self._api.replace(CLAIMS, {**claim, "metadata": metadata})
            status = {**(status or claim.get("status") or {}), "allocation": allocation}
        if status is not None:
            stored = self._api.replace(CLAIMS, {**claim, "status": status}, subresource="status")
            world.claim_written(stored)

    def _write_extended(self, pod: Json, extended: tuple[Json, Json, list[Json]], world: World) -> Json:
        """Make the claim for a pod's extended resources and name it in the pod's status; gives the pod."""
        claim, allocation, mappings = extended
        body = {**claim, "metadata": {k: v for k, v in claim["metadata"].items() if k != "name"}}
        made = self._api.create(CLAIMS, body)
        self._write_claim(made, pod, allocation, world)
        about = {"resourceClaimName": made["metadata"]["name"], "requestMappings": mappings}
        status = {**(pod.get("status") or {}), "extendedResourceClaimStatus": about}
        return self._api.replace(PODS, {**pod, "status": status}, subresource="status")

    def _drop_leftover(self, pod: Json, world: World) -> None:
        """Delete the extended-resource claim that an earlier attempt at this pod made and did not finish."""
        claim = world.leftovers.pop(pod["metadata"]["uid"], None)
        if claim is None:
            return
        freed = self._deallocate(claim)
        world.claim_written(freed)
        self._api.delete(CLAIMS, freed)

    def _deallocate(self, claim: Json) -> Json:
        status = {
            key: value
            for key, value in (claim.get("status") or {}).items()
            if key not in {"allocation", "reservedFor", "devices"}
        }
        return self._api.replace(CLAIMS, {**claim, "status": status}, subresource="status")

    def _park(self, pod: Json, message: str, chances: int) -> None:
        """Say why a pod waits, and leave it until something changes."""
        status = dict(pod.get("status") or {})
        others = [item for item in status.get("conditions") or [] if item["type"] != "PodScheduled"]
        old = [item for item in status.get("conditions") or [] if item["type"] == "PodScheduled"]
        if not (old and old[0].get("message") == message and old[0].get("status") == "False"):
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
                "lastTransitionTime": self._api.now(),
            }
            status["conditions"] = [*others, condition]
            status.setdefault("phase", "Pending")
            pod = self._api.replace(PODS, {**pod, "status": status}, subresource="status")
            self._event(pod, "Warning", "FailedScheduling", message)
        self._parked[pod["metadata"]["uid"]] = _seen(pod, chances)

    def _event(self, pod: Json, kind: str, reason: str, message: str) -> None:
        self._api.event(pod, kind, reason=reason, message=message, component=_COMPONENT)


_ALWAYS = frozenset(collection.key for collection in (NODES, CLASSES, SLICES, TAINT_RULES))


def could_help(resource: str, change: Change) -> bool:
    """Tell whether a write may give a pod that waits a place. A pod's own changes are seen by its version."""
    if resource in _ALWAYS:
        return True
    before, after = change.before, change.after
    if resource == PODS.key:
        return after is None or (is_done(after) and not (before is not None and is_done(before)))
    if resource != CLAIMS.key:
        return False
    if before is None or after is None:
        # A claim made for a pod helps that pod only, and the pod's status will name it.
        return after is None or owner_pod(after) is None
    if bool(before["metadata"].get("deletionTimestamp")) != bool(after["metadata"].get("deletionTimestamp")):
        return True
    had, has = (bool((item.get("status") or {}).get("allocation")) for item in (before, after))
    return (had and not has) or (has and not had and owner_pod(after) is None)


def _extended_by_pod(claims: Iterable[Json]) -> dict[str, Json]:
    """Index the claims for extended resources by the UID of their pod."""
    found: dict[str, Json] = {}
    for claim in claims:
        metadata = claim["metadata"]
        made = EXTENDED_CLAIM_ANNOTATION in (metadata.get("annotations") or {})
        owner = owner_pod(claim) if made else None
        if owner is not None and not metadata.get("deletionTimestamp"):
            found[owner["uid"]] = claim
    return found


def _seen(pod: Mapping[str, Any], chances: int) -> tuple[str, int]:
    return pod["metadata"]["resourceVersion"], chances


def _waits(pod: Mapping[str, Any]) -> bool:
    spec = pod.get("spec") or {}
    return not (
        spec.get("nodeName")
        or spec.get("schedulingGates")
        or is_done(pod)
        or pod["metadata"].get("deletionTimestamp")
        or (spec.get("schedulerName") or _COMPONENT) != _COMPONENT
    )


def _rank(pod: Mapping[str, Any]) -> tuple[int, str, str]:
    # Times have whole seconds; the revision at which a pod was made is not kept, so the name breaks ties.
    metadata = pod["metadata"]
    priority = int((pod.get("spec") or {}).get("priority") or 0)
    return -priority, metadata.get("creationTimestamp") or "", metadata["name"]
