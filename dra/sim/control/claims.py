"""The ResourceClaim controller: claims from templates, reservations that end, deallocation, finalizers.

Source: the resourceclaim controller of kube-controller-manager 1.36 (KEP-4381): a pod's template gives a claim of its
own; a reservation ends with its pod; the last reservation takes the allocation with it; a claim from a template goes
when its pod will not run (again).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dra.allocator.extended import owner_reference
from dra.allocator.pod_filters import is_done
from dra.sim.control.api import CLAIMS, PODS, TEMPLATES, CallFailed, ControlApi, Json

FINALIZER = "resource.kubernetes.io/delete-protection"
POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"
# resource.k8s.io: ResourceClaimReservedForMaxSize.
MAX_RESERVATIONS = 256


def owner_pod(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Give the owner reference to the pod for which a claim was made."""
    for reference in claim["metadata"].get("ownerReferences") or []:
        if reference.get("kind") == "Pod" and reference.get("controller"):
            return dict(reference)
    return None


def claim_from_template(pod: Json, entry: Json, template: Json) -> Json:
    """Give the claim that a pod's entry asks for."""
    spec = template["spec"]
    metadata = spec.get("metadata") or {}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "generateName": f"{pod['metadata']['name']}-{entry['name']}-",
            "namespace": pod["metadata"]["namespace"],
            "labels": metadata.get("labels") or {},
            "annotations": {**(metadata.get("annotations") or {}), POD_CLAIM_ANNOTATION: entry["name"]},
            "ownerReferences": [owner_reference(pod)],
        },
        "spec": spec["spec"],
    }


def uses_no_claims(pod: Mapping[str, Any]) -> bool:
    """Whether a pod needs its claims no longer: it has ended, or was deleted before it came to a node."""
    never = pod["metadata"].get("deletionTimestamp") and not (pod.get("spec") or {}).get("nodeName")
    return bool(never) or is_done(pod)


def plan_release(claim: Json, pods: Mapping[str, Json]) -> Json | None:
    """Give the status that a claim should have now; None if nothing changes.

    Reservations of pods that ended or vanished go, and with the last one the allocation. A claim that was
    allocated and never reserved keeps its allocation until it is deleted.
    """
    status = claim.get("status") or {}
    reserved = status.get("reservedFor") or []
    kept = [
        entry
        for entry in reserved
        if entry.get("resource") != "pods"
        or (entry["uid"] in pods and not uses_no_claims(pods[entry["uid"]]))
    ]
    unused = status.get("allocation") and not kept and claim["metadata"].get("deletionTimestamp")
    if len(kept) == len(reserved) and not unused:
        return None
    fresh = {key: value for key, value in status.items() if key != "reservedFor"}
    if kept:
        fresh["reservedFor"] = kept
    else:
        fresh.pop("allocation", None)
        fresh.pop("devices", None)
    return fresh


def with_reservation(claim: Json, pod: Json) -> Json | None:
    """Give a claim's status with a reservation for a pod; None if it has one. Raises ValueError if there are too many."""
    status = claim.get("status") or {}
    reserved = status.get("reservedFor") or []
    uid = pod["metadata"]["uid"]
    if any(entry.get("uid") == uid for entry in reserved):
        return None
    if len(reserved) >= MAX_RESERVATIONS:
        raise ValueError(f"resourceclaim {claim['metadata']['name']} has {len(reserved)} users already")
    entry = {"resource": "pods", "name": pod["metadata"]["name"], "uid": uid}
    return {**status, "reservedFor": [*reserved, entry]}


class ClaimController:
    """One `sync` makes all claims what they should be now."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api
        # (pod, template, server's words) that were told already.
        self._told: set[tuple[str, str]] = set()

    def sync(self) -> None:
        """Do one round. A conflict is left to the next one."""
        pods = self._api.list(PODS)
        alive = {pod["metadata"]["uid"] for pod in pods}
        self._told = {(uid, text) for uid, text in self._told if uid in alive}
        templates = {
            (item["metadata"]["namespace"], item["metadata"]["name"]): item
            for item in self._api.list(TEMPLATES)
        }
        claims = self._api.list(CLAIMS)
        made = _made_for_pods(claims)
        for pod in pods:
            if not is_done(pod) and not pod["metadata"].get("deletionTimestamp"):
                self._api.attempt(self._make_claims, pod, made, templates)
        by_uid = {pod["metadata"]["uid"]: pod for pod in pods}
        for claim in claims:
            self._api.attempt(self._release, claim, by_uid)
        for pod in pods:
            if pod["spec"].get("nodeName") and pod["spec"].get("resourceClaims") and not uses_no_claims(pod):
                self._api.attempt(self._reserve, pod)

    def _make_claims(
        self,
        pod: Json,
        made: Mapping[tuple[str, str], Json],
        templates: Mapping[tuple[str, str], Json],
    ) -> None:
        statuses = {
            entry["name"]: entry for entry in (pod.get("status") or {}).get("resourceClaimStatuses") or []
        }
        added = False
        for entry in (pod.get("spec") or {}).get("resourceClaims") or []:
            name = entry.get("resourceClaimTemplateName")
            if not name or entry["name"] in statuses:
                continue
            claim = made.get((pod["metadata"]["uid"], entry["name"]))
            template = templates.get((pod["metadata"]["namespace"], name))
            if claim is None and template is None:
                self._tell(pod, entry, f'resourceclaimtemplates.resource.k8s.io "{name}" not found')
                continue
            if claim is None and template is not None:
                try:
                    claim = self._api.create(CLAIMS, claim_from_template(pod, entry, template))
                except CallFailed as error:
                    self._tell(pod, entry, error.message)
                    continue
            if claim is not None:
                statuses[entry["name"]] = {
                    "name": entry["name"],
                    "resourceClaimName": claim["metadata"]["name"],
                }
                added = True
        if added:
            status = {**(pod.get("status") or {}), "resourceClaimStatuses": list(statuses.values())}
            self._api.replace(PODS, {**pod, "status": status}, subresource="status")

    def _tell(self, pod: Json, entry: Json, problem: str) -> None:
        text = f"PodResourceClaim {entry['name']}: {problem}"
        if (pod["metadata"]["uid"], text) in self._told:
            return
        self._told.add((pod["metadata"]["uid"], text))
        self._api.event(
            pod, "Warning", reason="FailedResourceClaimCreation", message=text, component="resource_claim"
        )

    def _release(self, claim: Json, pods: Mapping[str, Json]) -> None:
        status = plan_release(claim, pods)
        if status is not None:
            claim = self._api.replace(CLAIMS, {**claim, "status": status}, subresource="status")
        owner = owner_pod(claim)
        if owner is not None and not claim["metadata"].get("deletionTimestamp"):
            pod = pods.get(owner["uid"])
            gone = pod is None or uses_no_claims(pod)
            if gone and not (claim.get("status") or {}).get("reservedFor"):
                self._api.delete(CLAIMS, claim)
                current = self._api.get(CLAIMS, claim["metadata"]["name"], claim["metadata"]["namespace"])
                if current is None:
                    return
                claim = current
        finalizers = claim["metadata"].get("finalizers") or []
        if FINALIZER in finalizers and not (claim.get("status") or {}).get("allocation"):
            kept = [item for item in finalizers if item != FINALIZER]
            self._api.replace(CLAIMS, {**claim, "metadata": {**claim["metadata"], "finalizers": kept}})

    def _reserve(self, pod: Json) -> None:
        """Reserve allocated claims for a pod that somebody else than the scheduler put on its node."""
        for name in claim_names(pod):
            claim = self._api.get(CLAIMS, name, pod["metadata"]["namespace"])
            if claim is None or not (claim.get("status") or {}).get("allocation"):
                continue
            owner = owner_pod(claim)
            if claim["metadata"].get("deletionTimestamp") or (
                owner is not None and owner["uid"] != pod["metadata"]["uid"]
            ):
                continue
            try:
                status = with_reservation(claim, pod)
            except ValueError:
                continue
            if status is not None:
                self._api.replace(CLAIMS, {**claim, "status": status}, subresource="status")


def claim_names(pod: Mapping[str, Any]) -> list[str]:
    """Give the names of the claims that a pod's entries stand for, as far as they were made."""
    status = pod.get("status") or {}
    made = {
        entry["name"]: entry.get("resourceClaimName") for entry in status.get("resourceClaimStatuses") or []
    }
    entries = (pod.get("spec") or {}).get("resourceClaims") or []
    names = [entry.get("resourceClaimName") or made.get(entry["name"]) for entry in entries]
    return [name for name in names if name]


def _made_for_pods(claims: Iterable[Json]) -> dict[tuple[str, str], Json]:
    """Index the claims that came from templates by (UID of the pod, entry of the pod)."""
    found: dict[tuple[str, str], Json] = {}
    for claim in claims:
        owner = owner_pod(claim)
        entry = (claim["metadata"].get("annotations") or {}).get(POD_CLAIM_ANNOTATION)
        if owner is not None and entry is not None and not claim["metadata"].get("deletionTimestamp"):
            found.setdefault((owner["uid"], entry), claim)
    return found
