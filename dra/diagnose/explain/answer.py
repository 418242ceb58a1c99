"""From a subject to its explanation: the pod's own state first, then its claims, then all nodes."""

from __future__ import annotations

from collections.abc import Sequence

from dra.allocator.extended import extended_requests
from dra.allocator.model import Features
from dra.allocator.pod_filters import is_done
from dra.diagnose.explain.claims import PodClaims, claim_json, claims_of, is_special
from dra.diagnose.explain.cluster import (
    CLAIM,
    CLASS,
    EVENT,
    NODE,
    POD,
    SLICE,
    Cluster,
    Json,
    full_name,
    since_text,
)
from dra.diagnose.explain.flaws import flaws
from dra.diagnose.explain.model import Explanation, Reason
from dra.diagnose.explain.nodes import Surveyor, Wanted
from dra.diagnose.explain.prepare import event_text, events_of, why_not_running
from dra.diagnose.explain.subject import find_subject
from dra.diagnose.explain.summary import Summary

# Causes that come from a claim which is allocated already.
_BOUND = ("pod-unschedulable", "claim-elsewhere")
# What changes a decision if it could not be read, and what is then not known.
_MATTERS = {
    CLAIM: "devices that other claims hold may look free",
    SLICE: "no device is known",
    NODE: "node taints, labels, CPU and memory are not looked at",
    POD: "what other pods use of CPU and memory, and whether holders are still alive, is not known",
    EVENT: "failures that only Events tell are not seen",
}


def explain(
    cluster: Cluster, subject: str, *, namespace: str | None = None, features: Features | None = None
) -> Explanation:
    """Explain a pod or a claim.

    Args:
        cluster: what could be read.
        subject: `pod/NAME`, `claim/NAME` or `NAME`.
        namespace: where it is; None where only one has the name.
        features: the scheduler's gates; those of 1.36 by default.

    Raises:
        ConfigError: DRA-EXPLAIN-SUBJECT, DRA-EXPLAIN-NOT-FOUND, DRA-EXPLAIN-AMBIGUOUS.
    """
    kind, found = find_subject(subject, namespace, cluster)
    answer = (
        _pod(found, cluster, features=features) if kind == POD else _claim(found, cluster, features=features)
    )
    answer.unread = {
        name: f"{why}: {_MATTERS[name]}" for name, why in cluster.unread.items() if name in _MATTERS
    }
    return answer


# -- pods ------------------------------------------------------------------------------------------


def _pod(pod: Json, cluster: Cluster, *, features: Features | None) -> Explanation:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    claims = claims_of(pod, cluster)
    answer = Explanation("Pod", metadata["namespace"], metadata["name"], "pending", "")
    answer.claims = [claim_json(claim) for claim in claims.found]
    answer.scheduler_message = _scheduler_message(pod, cluster)
    if is_done(pod):
        answer.state, answer.verdict = "ended", f"it has ended: {status['phase']}"
    elif metadata.get("deletionTimestamp"):
        since = since_text(metadata["deletionTimestamp"], cluster.now)
        answer.reasons = [Reason("pod-deleting", f"it is being deleted{since}", "")]
    elif spec.get("nodeName"):
        _bound(pod, claims, cluster, answer)
    else:
        _unbound(pod, claims, cluster, answer, features=features)
    if answer.reasons and not answer.verdict:
        answer.verdict = answer.reasons[0].message
    return answer


def _bound(pod: Json, claims: PodClaims, cluster: Cluster, answer: Explanation) -> None:
    """The scheduler is done with it: it runs, or something keeps it from it."""
    status = pod.get("status") or {}
    node = pod["spec"]["nodeName"]
    if status.get("phase") == "Running":
        answer.state = "running"
        devices = _devices(claims.found)
        answer.verdict = f"it runs on node {node}" + (f" with {devices}" if devices else "")
        return
    answer.reasons = [*claims.faults, *why_not_running(pod, claims.found, cluster)]


def _unbound(
    pod: Json, claims: PodClaims, cluster: Cluster, answer: Explanation, *, features: Features | None
) -> None:
    spec = pod.get("spec") or {}
    gates = [str(item.get("name")) for item in spec.get("schedulingGates") or []]
    if gates:
        text = f"its scheduling gates are not lifted: {', '.join(gates)}"
        answer.reasons.append(Reason("scheduling-gated", text, "Whoever set a gate must remove it."))
    other = spec.get("schedulerName") or "default-scheduler"
    if other != "default-scheduler":
        answer.warnings.append(f"scheduler {other} places this pod; explain decides as kube-scheduler does")
    answer.reasons += claims.faults
    fresh = [claim for claim in claims.found if not _allocation(claim)]
    fixed = [claim for claim in claims.found if _allocation(claim)]
    surveyor = Surveyor(cluster, features=features)
    asks = extended_requests(pod, surveyor.by_resource)[0] if cluster.knows(CLASS) else []
    if not cluster.knows(SLICE) and (fresh or asks):
        answer.reasons.append(_unknown_slices(cluster))
        return
    if claims.faults and not claims.found:
        return
    survey = surveyor.look(Wanted(pod, fresh, fixed))
    answer.nodes = survey.nodes
    found = Summary(surveyor, survey, claims=is_anything(claims, asks)).reasons()
    if answer.reasons:
        # What is wrong before any node is looked at counts; that it would fit besides does not.
        found = [reason for reason in found if reason.code != "fits-now"]
    first = next((reason.code for reason in found if reason.code in _BOUND), "")
    answer.reasons += [_with_holders(reason, fixed) if reason.code == first else reason for reason in found]
    if not answer.reasons:
        answer.reasons.append(_nothing_found(cluster))
    if not is_anything(claims, asks):
        answer.warnings.append(
            "the pod has no claims and no extended resources that a DeviceClass stands for"
        )
    special = [{"metadata": {"name": ""}, "spec": {"devices": {"requests": asks}}}] if asks else []
    answer.warnings += flaws(cluster, [*fresh, *special], surveyor.holdings)
    answer.warnings += [*_stale_slices(cluster), *_not_judged(spec)]


def is_anything(claims: PodClaims, asks: Sequence[Json]) -> bool:
    """Whether a pod has to do with devices at all."""
    return bool(claims.found or claims.faults or asks)


def _with_holders(reason: Reason, fixed: Sequence[Json]) -> Reason:
    """Say which claim binds the pod to the node where it may not go, and who else uses it."""
    lines = []
    for claim in fixed:
        name = claim["metadata"]["name"]
        if reason.code == "claim-elsewhere" and reason.claim != name:
            continue
        users = [str(item.get("name")) for item in (claim.get("status") or {}).get("reservedFor") or []]
        used = f", reserved for pod {', '.join(users[:3])}" if users else ""
        lines.append(f"claim {name} is allocated already ({_devices([claim])}){used}")
    return Reason(
        reason.code, reason.message, reason.remedy, (*reason.details, *lines), reason.claim, reason.request,
        nodes=reason.nodes,
    )  # fmt: skip


def _nothing_found(cluster: Cluster) -> Reason:
    if not cluster.knows(NODE):
        return Reason(
            "not-read", f"no node is known: Nodes {cluster.unread[NODE]}", "Add kubectl get nodes -o yaml."
        )
    return Reason("no-nodes", "the cluster has no nodes", "Add a node.")


def _unknown_slices(cluster: Cluster) -> Reason:
    return Reason(
        "not-read",
        f"it cannot be told why: ResourceSlices {cluster.unread[SLICE]}",
        "Add the output of kubectl get resourceslices -o yaml, or the right to list resourceslices.",
    )


def _stale_slices(cluster: Cluster) -> list[str]:
    """Tell of slices whose node is gone: their devices look published and can never be used."""
    if not cluster.knows(NODE):
        return []
    names = {
        str(item["spec"]["nodeName"])
        for item in cluster.all(SLICE)
        if item["spec"].get("nodeName") and cluster.find(NODE, item["spec"]["nodeName"]) is None
    }
    if not names:
        return []
    shown = ", ".join(sorted(names)[:4])
    return [f"stale slices: {len(names)} of their nodes do not exist ({shown}); delete those ResourceSlices"]


def _not_judged(spec: Json) -> list[str]:
    affinity = spec.get("affinity") or {}
    found = [name for name in ("podAffinity", "podAntiAffinity") if affinity.get(name)]
    found += ["topologySpreadConstraints"] if spec.get("topologySpreadConstraints") else []
    if any(volume.get("persistentVolumeClaim") for volume in spec.get("volumes") or []):
        found.append("volumes")
    return [f"not looked at: {', '.join(found)} of the pod"] if found else []


def _scheduler_message(pod: Json, cluster: Cluster) -> str:
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return str(condition.get("message") or "")
    metadata = pod["metadata"]
    for event in events_of(str(metadata.get("uid") or ""), metadata["name"], metadata["namespace"], cluster):
        if event.get("reason") == "FailedScheduling":
            return event_text(event)
    return ""


# -- claims ----------------------------------------------------------------------------------------


def _claim(claim: Json, cluster: Cluster, *, features: Features | None) -> Explanation:
    metadata = claim["metadata"]
    answer = Explanation("ResourceClaim", metadata["namespace"], metadata["name"], "pending", "")
    users = _users(claim, cluster)
    if _allocation(claim):
        _allocated(claim, users, cluster, answer)
    else:
        waiting = [pod for pod in users if not is_done(pod)]
        if waiting:
            inner = _pod(waiting[0], cluster, features=features)
            answer.reasons, answer.nodes = inner.reasons, inner.nodes
            answer.warnings, answer.scheduler_message = inner.warnings, inner.scheduler_message
            others = f" (and {len(waiting) - 1} other pods)" if len(waiting) > 1 else ""
            answer.verdict = f"pod {waiting[0]['metadata']['name']}{others} waits with it: {inner.verdict}"
        else:
            _unused(claim, cluster, answer, features=features)
    answer.claims = [claim_json(claim)]
    return answer


def _unused(claim: Json, cluster: Cluster, answer: Explanation, *, features: Features | None) -> None:
    known = (
        "no pod uses it"
        if cluster.knows(POD)
        else f"no pod that uses it is known (Pods {cluster.unread[POD]})"
    )
    text = f"{known}; a claim is allocated when a pod that uses it is scheduled"
    answer.reasons = [Reason("no-consumer", text, "Create a pod that names the claim.")]
    answer.verdict = text
    if not cluster.knows(SLICE):
        answer.reasons.append(_unknown_slices(cluster))
        return
    surveyor = Surveyor(cluster, features=features)
    survey = surveyor.look(Wanted(None, [claim], []))
    answer.nodes = survey.nodes
    answer.reasons += Summary(surveyor, survey).reasons()
    answer.warnings += flaws(cluster, [claim], surveyor.holdings)


def _allocated(claim: Json, users: Sequence[Json], cluster: Cluster, answer: Explanation) -> None:
    status = claim.get("status") or {}
    reserved = [str(item.get("name")) for item in status.get("reservedFor") or []]
    whom = f", reserved for pod {', '.join(reserved[:4])}" if reserved else ", reserved for nobody"
    answer.state = "allocated"
    answer.verdict = f"it is allocated: {_devices([claim])}{whom}"
    for pod in users:
        bound = (pod.get("spec") or {}).get("nodeName")
        if bound and (pod.get("status") or {}).get("phase") in (None, "Pending"):
            problems = why_not_running(pod, claims_of(pod, cluster).found, cluster)
            if any(reason.code not in {"preparing", "not-devices"} for reason in problems):
                answer.state = "pending"
                answer.verdict = (
                    f"it is allocated ({_devices([claim])}), but pod {pod['metadata']['name']} does not start:"
                    f" {problems[0].message}"
                )
            answer.reasons += problems


def _users(claim: Json, cluster: Cluster) -> list[Json]:
    """Give the pods that use a claim, by name or by having been made for them."""
    namespace, name = claim["metadata"]["namespace"], claim["metadata"]["name"]
    found = []
    for pod in cluster.all(POD):
        if pod["metadata"]["namespace"] != namespace:
            continue
        status = pod.get("status") or {}
        names = [
            item.get("resourceClaimName") for item in (pod.get("spec") or {}).get("resourceClaims") or []
        ]
        names += [item.get("resourceClaimName") for item in status.get("resourceClaimStatuses") or []]
        if is_special(claim):
            names.append((status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName"))
        if name in names:
            found.append(pod)
    return found


def _allocation(claim: Json) -> Json | None:
    allocation: Json | None = (claim.get("status") or {}).get("allocation")
    return allocation


def _devices(claims: Sequence[Json]) -> str:
    """Write the devices of claims: `gpu-0, gpu-1 (shares 20) of n1`."""
    pools: dict[str, list[str]] = {}
    for claim in claims:
        for result in ((_allocation(claim) or {}).get("devices") or {}).get("results") or []:
            pools.setdefault(result["pool"], []).append(result["device"] + _share(result))
    return "; ".join(f"{', '.join(devices)} of {pool}" for pool, devices in pools.items()) or (
        "no devices" if claims and any(_allocation(claim) for claim in claims) else ""
    )


def _share(result: Json) -> str:
    """Write what a result takes of a shared device: ` (shares 20, memory 4Gi)`; empty for a whole one."""
    if not result.get("shareID"):
        return ""
    taken = {
        name.rpartition("/")[2]: amount
        for name, amount in (result.get("consumedCapacity") or {}).items()
        if str(amount) != "0"
    }
    words = ", ".join(f"{name} {amount}" for name, amount in sorted(taken.items(), reverse=True))
    return f" ({words or 'a share'})"


__all__ = ["explain", "full_name"]
