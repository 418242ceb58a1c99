"""Deployments, ReplicaSets, Jobs and DaemonSets, as far as examples with claims need them.

Source: the controllers of kube-controller-manager 1.36. Not simulated: StatefulSets, CronJobs, adoption, roll-back,
indexed jobs, deadlines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dra.allocator.pod_filters import obstacles
from dra.sim.control.api import (
    DAEMON_SETS,
    DEPLOYMENTS,
    JOBS,
    NODES,
    PODS,
    REPLICA_SETS,
    Collection,
    ControlApi,
    Json,
)
from dra.sim.control.pod_sets import (
    PodSetWriter,
    condition,
    controlled,
    first_to_go,
    is_active,
    is_ready,
    pod_from_template,
    template_hash,
)
from dra.sim.control.rollout import HASH_LABEL, DeploymentController

_REVISION_LABEL = "controller-revision-hash"
# What the DaemonSet controller lets its pods tolerate.
_TOLERATED = (
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
)


class WorkloadControllers:
    """One `sync` does one round of all of them."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api
        self._deployments = DeploymentController(api)
        self._writers = {
            kind: PodSetWriter(api, f"{kind}-controller") for kind in ("replicaset", "job", "daemonset")
        }

    def sync(self) -> None:
        """Do one round."""
        sets = self._api.list(REPLICA_SETS)
        deployments, jobs, daemons = map(self._api.list, (DEPLOYMENTS, JOBS, DAEMON_SETS))
        if not (sets or deployments or jobs or daemons):
            return
        pods = controlled(self._api.list(PODS))
        owned = controlled(sets)
        for item in deployments:
            if not item["metadata"].get("deletionTimestamp"):
                mine = owned.get(item["metadata"]["uid"], [])
                self._api.attempt(self._deployments.sync, item, mine, pods)
        for collection, objects, act in (
            (REPLICA_SETS, sets, self._replica_set),
            (JOBS, jobs, self._job),
            (DAEMON_SETS, daemons, self._daemon_set),
        ):
            for item in objects:
                if not item["metadata"].get("deletionTimestamp"):
                    self._api.attempt(act, item, pods.get(item["metadata"]["uid"], []))
                    self._api.attempt(self._write_status, collection, item)

    def _write_status(self, collection: Collection, item: Json) -> None:
        """Write the status of an object as its pods are now."""
        metadata = item["metadata"]
        current = self._api.get(collection, metadata["name"], metadata["namespace"])
        if current is None or current["metadata"]["uid"] != metadata["uid"]:
            return
        pods = controlled(self._api.list(PODS)).get(metadata["uid"], [])
        if collection == REPLICA_SETS:
            status = replica_set_status(current, pods)
        elif collection == JOBS:
            status = job_status(current, pods, now=self._api.now())
        else:
            status = daemon_set_status(current, pods, wanted=len(self._wanted_nodes(current)))
        if status != (current.get("status") or {}):
            self._api.replace(collection, {**current, "status": status}, subresource="status")

    # -- one of each -------------------------------------------------------------------------------

    def _replica_set(self, item: Json, pods: Sequence[Json]) -> None:
        writer = self._writers["replicaset"]
        active = [pod for pod in pods if is_active(pod)]
        wanted = int(item["spec"].get("replicas", 1))
        labels = {
            key: value for key, value in (item["metadata"].get("labels") or {}).items() if key == HASH_LABEL
        }
        for _ in range(wanted - len(active)):
            writer.create(item, pod_from_template(item, item["spec"]["template"], labels=labels))
        for pod in first_to_go(active)[: max(0, len(active) - wanted)]:
            writer.delete(item, pod)

    def _job(self, item: Json, pods: Sequence[Json]) -> None:
        writer = self._writers["job"]
        active = [pod for pod in pods if is_active(pod)]
        wanted = plan_job(item, pods)
        for _ in range(wanted - len(active)):
            writer.create(item, pod_from_template(item, item["spec"]["template"]))
        for pod in first_to_go(active)[: max(0, len(active) - wanted)]:
            writer.delete(item, pod)

    def _daemon_set(self, item: Json, pods: Sequence[Json]) -> None:
        writer = self._writers["daemonset"]
        revision = template_hash(item["spec"]["template"])
        there = {target: pod for pod in pods if is_active(pod) and (target := target_of(pod))}
        wanted = self._wanted_nodes(item)
        for node in wanted:
            if node not in there:
                writer.create(item, daemon_pod(item, node, revision=revision))
        for node in set(there) - set(wanted):
            writer.delete(item, there[node])
        old = [
            pod
            for node, pod in there.items()
            if node in wanted and pod["metadata"]["labels"].get(_REVISION_LABEL) != revision
        ]
        # One after the other: the next old pod goes when all others are ready.
        if old and len(there) == len(wanted) and all(is_ready(pod) for pod in there.values()):
            writer.delete(item, old[0])

    def _wanted_nodes(self, item: Json) -> list[str]:
        template = item["spec"]["template"]
        probe = {"spec": {**template["spec"], "tolerations": _tolerations(template["spec"])}}
        return [
            node["metadata"]["name"] for node in self._api.list(NODES) if not obstacles(probe, node, None)
        ]


def plan_job(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> int:
    """Give how many pods of a job should be active now."""
    spec = job["spec"]
    succeeded, failed = _count(pods, "Succeeded"), _count(pods, "Failed")
    if spec.get("suspend") or failed > int(spec.get("backoffLimit", 6)) or _finished(job):
        return 0
    parallelism = int(spec.get("parallelism", 1))
    completions = spec.get("completions")
    if completions is None:
        # A work queue: once one pod has succeeded no new ones are made.
        active = sum(1 for pod in pods if is_active(pod))
        return active if succeeded else parallelism
    return min(parallelism, max(0, int(completions) - succeeded))


def _finished(job: Mapping[str, Any]) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(item["type"] in {"Complete", "Failed"} and item["status"] == "True" for item in conditions)


def _count(pods: Sequence[Mapping[str, Any]], phase: str) -> int:
    return sum(1 for pod in pods if (pod.get("status") or {}).get("phase") == phase)


def job_status(job: Json, pods: Sequence[Json], *, now: str) -> Json:
    """Give a job's status. Counted from the pods that are there; a finished job keeps its figures."""
    old = job.get("status") or {}
    if _finished(job):
        return {key: value for key, value in old.items() if key not in {"active", "ready"}}
    active = [pod for pod in pods if is_active(pod)]
    succeeded, failed = _count(pods, "Succeeded"), _count(pods, "Failed")
    status: Json = {"startTime": old.get("startTime", now), "ready": sum(map(is_ready, active))}
    for name, value in (("active", len(active)), ("succeeded", succeeded), ("failed", failed)):
        if value:
            status[name] = value
    conditions = old.get("conditions") or []
    completions = job["spec"].get("completions")
    if failed > int(job["spec"].get("backoffLimit", 6)):
        text = "Job has reached the specified backoff limit"
        status["conditions"] = [_job_condition("Failed", "BackoffLimitExceeded", text, conditions, now)]
    elif succeeded and (not active if completions is None else succeeded >= int(completions)):
        text = "Reached expected number of succeeded pods"
        status["conditions"] = [
            _job_condition(kind, "CompletionsReached", text, conditions, now)
            for kind in ("SuccessCriteriaMet", "Complete")
        ]
        status["completionTime"] = now
    return status


def _job_condition(kind: str, reason: str, message: str, old: Sequence[Json], now: str) -> Json:
    made = condition(kind, on=True, reason=reason, message=message, old=old, now=now)
    made["lastProbeTime"] = made.pop("lastUpdateTime")
    return made


def replica_set_status(item: Json, pods: Sequence[Json]) -> Json:
    """Give a ReplicaSet's status."""
    active = [pod for pod in pods if is_active(pod)]
    ready = sum(map(is_ready, active))
    status: Json = {"replicas": len(active), "observedGeneration": item["metadata"].get("generation", 1)}
    for name, value in (
        ("fullyLabeledReplicas", len(active)),
        ("readyReplicas", ready),
        ("availableReplicas", ready),
    ):
        if value:
            status[name] = value
    return status


def daemon_set_status(item: Json, pods: Sequence[Json], *, wanted: int) -> Json:
    """Give a DaemonSet's status."""
    active = [pod for pod in pods if is_active(pod)]
    ready = sum(map(is_ready, active))
    revision = template_hash(item["spec"]["template"])
    updated = sum(1 for pod in active if pod["metadata"]["labels"].get(_REVISION_LABEL) == revision)
    status: Json = {
        "desiredNumberScheduled": wanted,
        "currentNumberScheduled": len(active),
        "numberMisscheduled": 0,
        "numberReady": ready,
        "observedGeneration": item["metadata"].get("generation", 1),
    }
    for name, value in (
        ("updatedNumberScheduled", updated),
        ("numberAvailable", ready),
        ("numberUnavailable", wanted - ready),
    ):
        if value > 0:
            status[name] = value
    return status


def daemon_pod(item: Json, node: str, *, revision: str) -> Json:
    """Give the pod of a DaemonSet for a node: the scheduler may put it nowhere else."""
    pod = pod_from_template(item, item["spec"]["template"], labels={_REVISION_LABEL: revision})
    spec = pod["spec"]
    spec["tolerations"] = _tolerations(spec)
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": [{**term, "matchFields": [field]} for term in terms]
    }
    return pod


def target_of(pod: Mapping[str, Any]) -> str:
    """Give the node for which a DaemonSet made a pod."""
    spec = pod["spec"]
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    for term in affinity.get("nodeSelectorTerms") or []:
        for field in term.get("matchFields") or []:
            if field["key"] == "metadata.name":
                return str(field["values"][0])
    return ""


def _tolerations(spec: Mapping[str, Any]) -> list[Json]:
    more = [{"key": key, "operator": "Exists", "effect": effect} for key, effect in _TOLERATED]
    return [*(spec.get("tolerations") or []), *more]
