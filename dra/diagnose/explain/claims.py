"""The claims of a pod: which there are, and why one of them is missing or cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.extended import EXTENDED_CLAIM_ANNOTATION
from dra.api.fractions import CLAIM_PREFIX
from dra.diagnose.explain.cluster import CLAIM, NAMESPACE, TEMPLATE, Cluster, Json, since_text
from dra.diagnose.explain.model import Reason
from dra.diagnose.explain.prepare import event_text, events_of

ADMIN_LABEL = "resource.kubernetes.io/admin-access"
# Consumers of one claim (resource.k8s.io ResourceClaimReservedForMaxSize).
MAX_CONSUMERS = 256


@dataclass(slots=True)
class PodClaims:
    """A pod's claims in its order; `faults` keep the scheduler from even trying."""

    found: list[Json] = field(default_factory=list)
    faults: list[Reason] = field(default_factory=list)


def claims_of(pod: Json, cluster: Cluster) -> PodClaims:
    """Look up the claims that a pod names, from templates too."""
    result = PodClaims()
    namespace = pod["metadata"]["namespace"]
    status = pod.get("status") or {}
    made = {item["name"]: item for item in status.get("resourceClaimStatuses") or []}
    for entry in (pod.get("spec") or {}).get("resourceClaims") or []:
        name = entry.get("resourceClaimName")
        if not name and entry["name"] in made:
            name = made[entry["name"]].get("resourceClaimName")
            if not name:
                continue  # the template made none, on purpose
        if not name:
            result.faults.append(_not_created(pod, entry, cluster))
            continue
        claim = cluster.find(CLAIM, name, namespace)
        if claim is None:
            result.faults.append(_missing(name, cluster))
            continue
        result.found.append(claim)
        result.faults += _unusable(pod, entry, claim, cluster)
    special = (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    if special and (claim := cluster.find(CLAIM, special, namespace)) is not None:
        result.found.append(claim)
    return result


def is_special(claim: Mapping[str, Any]) -> bool:
    """Whether the scheduler made a claim for extended resources."""
    return (claim["metadata"].get("annotations") or {}).get(EXTENDED_CLAIM_ANNOTATION) == "true"


def claim_json(claim: Json) -> dict[str, Any]:
    """Give a claim's state for the JSON form."""
    status = claim.get("status") or {}
    allocation = status.get("allocation")
    results = ((allocation or {}).get("devices") or {}).get("results") or []
    return {
        "namespace": claim["metadata"].get("namespace", ""),
        "name": claim["metadata"]["name"],
        "allocated": allocation is not None,
        "devices": [
            {
                key: item.get(key)
                for key in ("request", "driver", "pool", "device", "shareID")
                if item.get(key)
            }
            for item in results
        ],
        "reservedFor": [str(item.get("name")) for item in status.get("reservedFor") or []],
    }


def _missing(name: str, cluster: Cluster) -> Reason:
    if not cluster.knows(CLAIM):
        return Reason(
            "not-read",
            f"claim {name} is not known: ResourceClaims {cluster.unread[CLAIM]}",
            "Add the output of kubectl get resourceclaims -o yaml, or the right to list resourceclaims.",
            claim=name,
        )
    return Reason(
        "claim-missing", f"claim {name} does not exist", "Create it in the pod's namespace.", claim=name
    )


def _not_created(pod: Json, entry: Json, cluster: Cluster) -> Reason:
    """Say why a claim was not made from its template yet."""
    metadata, template_name = pod["metadata"], entry.get("resourceClaimTemplateName") or ""
    namespace = metadata["namespace"]
    template = cluster.find(TEMPLATE, template_name, namespace)
    if template is None and cluster.knows(TEMPLATE):
        return Reason(
            "template-missing",
            f"claim {entry['name']} is to be made from template {template_name}, which does not exist in {namespace}",
            "dra fleet makes it of what the pod asks for, within seconds; if not, check that it runs and look at its log."
            if entry["name"].startswith(CLAIM_PREFIX)
            else "Create the ResourceClaimTemplate; the claim is made a moment later.",
            claim=entry["name"],
        )
    unlabelled = _admin_unlabelled(template, namespace, cluster)
    if unlabelled:
        return Reason(
            "admin-namespace",
            f"template {template_name} asks for admin access, which namespace {namespace} is not labelled for, so"
            " that its claim is refused",
            f"An administrator may label it: kubectl label namespace {namespace} {ADMIN_LABEL}=true",
            claim=entry["name"],
        )
    events = events_of(str(metadata.get("uid") or ""), metadata["name"], namespace, cluster)
    failed = next((item for item in events if item.get("reason") == "FailedResourceClaimCreation"), None)
    if failed is not None:
        text = event_text(failed)
        code = "admin-namespace" if ADMIN_LABEL in text else "claim-not-created"
        remedy = (
            f"An administrator may label it: kubectl label namespace {namespace} {ADMIN_LABEL}=true"
            if code == "admin-namespace"
            else "Correct the template; a pod keeps the claims that it has."
        )
        return Reason(code, f"claim {entry['name']} could not be made: {text}", remedy, claim=entry["name"])
    return Reason(
        "claim-not-created",
        f"claim {entry['name']} was not made from template {template_name} yet",
        "kube-controller-manager makes it within seconds; if not, check that it runs with DynamicResourceAllocation.",
        claim=entry["name"],
    )


def _admin_unlabelled(template: Json | None, namespace: str, cluster: Cluster) -> bool:
    known = cluster.find(NAMESPACE, namespace)
    if template is None or known is None:
        return False
    devices = ((template["spec"].get("spec") or {}).get("devices")) or {}
    wants = any(
        body.get("adminAccess")
        for request in devices.get("requests") or []
        for body in request.get("firstAvailable") or [request.get("exactly") or {}]
    )
    return wants and (known["metadata"].get("labels") or {}).get(ADMIN_LABEL) != "true"


def _unusable(pod: Json, entry: Json, claim: Json, cluster: Cluster) -> list[Reason]:
    metadata, name = claim["metadata"], claim["metadata"]["name"]
    if metadata.get("deletionTimestamp"):
        reserved = [str(item.get("name")) for item in (claim.get("status") or {}).get("reservedFor") or []]
        since = since_text(metadata["deletionTimestamp"], cluster.now)
        holders = f"; pod {', '.join(reserved)} still uses it" if reserved else ""
        text = f"claim {name} is being deleted{since}{holders}"
        return [Reason("claim-deleting", text, "Wait until it is gone and create it again.", claim=name)]
    uid = pod["metadata"].get("uid")
    owner = next((item for item in metadata.get("ownerReferences") or [] if item.get("controller")), None)
    if entry.get("resourceClaimTemplateName") and (owner is None or owner.get("uid") != uid):
        whose = f"belongs to {owner['kind']} {owner['name']}" if owner else "belongs to nobody"
        text = f"claim {name} was not made for this pod: it {whose}"
        return [
            Reason("claim-foreign", text, "Delete the pod, so that it gets a claim of its own.", claim=name)
        ]
    reserved_for = (claim.get("status") or {}).get("reservedFor") or []
    if len(reserved_for) >= MAX_CONSUMERS and all(item.get("uid") != uid for item in reserved_for):
        text = f"claim {name} is reserved for {len(reserved_for)} pods already, more are not possible"
        return [Reason("claim-full", text, "Make another claim for further pods.", claim=name)]
    return []
