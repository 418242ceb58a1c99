"""The ResourceClaim controller: claims from templates, reservations that end, deallocation, finalizers.

Source: kubelet-side life of a claim as kube-controller-manager does it (KEP-4381): a pod's template gives a claim
of its own; a reservation ends with its pod; an unreserved claim is deallocated, or deleted if it came from a template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dra.allocator.extended import owner_reference
from dra.allocator.pod_filters import is_done
from dra.sim.control.api import CLAIMS, PODS, TEMPLATES, CallFailed, ControlApi, Json

FINALIZER = "resource.kubernetes.io/delete-protection"
POD_CLAIM_ANNOTATION = "resource.kubernetes.io/pod-claim-name"


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


def plan_release(claim: Json, pods: Mapping[str, Json]) -> Json | None:
    """Give the status that a claim should have now; None if nothing changes.

    Reservations of pods that ended or vanished go; without any the allocation goes too.
    """
    status = claim.get("status") or {}
    reserved = status.get("reservedFor") or []
    kept = [
        entry
        for entry in reserved
        if entry.get("resource") != "pods" or (entry["uid"] in pods and not is_done(pods[entry["uid"]]))
    ]
    if len(kept) == len(reserved) and not (status.get("allocation") and not kept and reserved == []):
        return None
    fresh = {key: value for key, value in status.items() if key != "reservedFor"}
    if kept:
        fresh["reservedFor"] = kept
    else:
        fresh.pop("allocation", None)
        fresh.pop("devices", None)
    return fresh


class ClaimController:
    """One `sync` makes all claims what they should be now."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api

    def sync(self) -> None:
        """Do one round. A conflict is left to the next one."""
        pods = self._api.list(PODS)
        claims = self._api.list(CLAIMS)
        templates = {
            (item["metadata"]["namespace"], item["metadata"]["name"]): item
            for item in self._api.list(TEMPLATES)
        }
        for pod in pods:
            if not is_done(pod) and not pod["metadata"].get("deletionTimestamp"):
                self._guard(self._make_claims, pod, claims, templates)
        by_uid = {pod["metadata"]["uid"]: pod for pod in pods}
        for claim in claims:
            self._guard(self._release, claim, by_uid)

    @staticmethod
    def _guard(act: Any, *args: Any) -> None:
        try:
            act(*args)
        except CallFailed as error:
            # Somebody was faster, or the object went: the next round looks again.
            if error.status not in {404, 409}:
                raise

    def _make_claims(
        self, pod: Json, claims: Iterable[Json], templates: Mapping[tuple[str, str], Json]
    ) -> None:
        statuses = {
            entry["name"]: entry for entry in (pod.get("status") or {}).get("resourceClaimStatuses") or []
        }
        added = False
        for entry in (pod.get("spec") or {}).get("resourceClaims") or []:
            name = entry.get("resourceClaimTemplateName")
            if not name or entry["name"] in statuses:
                continue
            template = templates.get((pod["metadata"]["namespace"], name))
            if template is None:
                continue
            claim = _existing(pod, entry, claims) or self._api.create(
                CLAIMS, claim_from_template(pod, entry, template)
            )
            statuses[entry["name"]] = {"name": entry["name"], "resourceClaimName": claim["metadata"]["name"]}
            added = True
        if added:
            status = {**(pod.get("status") or {}), "resourceClaimStatuses": list(statuses.values())}
            self._api.replace(PODS, {**pod, "status": status}, subresource="status")

    def _release(self, claim: Json, pods: Mapping[str, Json]) -> None:
        status = plan_release(claim, pods)
        if status is not None:
            claim = self._api.replace(CLAIMS, {**claim, "status": status}, subresource="status")
        allocated = bool((claim.get("status") or {}).get("allocation"))
        owner = owner_pod(claim)
        if owner is not None and not claim["metadata"].get("deletionTimestamp"):
            pod = pods.get(owner["uid"])
            if (pod is None or is_done(pod)) and not (claim.get("status") or {}).get("reservedFor"):
                self._api.delete(CLAIMS, claim)
                return
        finalizers = claim["metadata"].get("finalizers") or []
        if FINALIZER in finalizers and not allocated:
            kept = [item for item in finalizers if item != FINALIZER]
            self._api.replace(CLAIMS, {**claim, "metadata": {**claim["metadata"], "finalizers": kept}})


def _existing(pod: Json, entry: Json, claims: Iterable[Json]) -> Json | None:
    for claim in claims:
        owner = owner_pod(claim)
        annotations = claim["metadata"].get("annotations") or {}
        if (
            owner
            and owner["uid"] == pod["metadata"]["uid"]
            and annotations.get(POD_CLAIM_ANNOTATION) == entry["name"]
        ):
            return claim
    return None
