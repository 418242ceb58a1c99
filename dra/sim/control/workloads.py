"""All workload controllers together, and the small ones: ReplicaSets and DaemonSets.

Source: the controllers of kube-controller-manager 1.36. Not simulated: adoption, revisions of DaemonSets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dra.allocator.pod_filters import obstacles
from dra.sim.control.api import (
    CRON_JOBS,
    DAEMON_SETS,
    DEPLOYMENTS,
    JOBS,
    NODES,
    PODS,
    REPLICA_SETS,
    REVISIONS,
    STATEFUL_SETS,
    Collection,
    ControlApi,
    Json,
)
from dra.sim.control.cron_jobs import CronJobController
from dra.sim.control.jobs import JobController, job_status
from dra.sim.control.pod_sets import (
    PodSetWriter,
    controlled,
    first_to_go,
    is_active,
    is_ready,
    pod_from_template,
    template_hash,
)
from dra.sim.control.rollout import HASH_LABEL, DeploymentController
from dra.sim.control.stateful_sets import StatefulSetController

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
        self._jobs = JobController(api)
        self._cron_jobs = CronJobController(api)
        self._stateful_sets = StatefulSetController(api)
        self._writers = {
            kind: PodSetWriter(api, f"{kind}-controller") for kind in ("replicaset", "daemonset")
        }

    def sync(self) -> float | None:
        """Do one round; gives the seconds after which one must run again although nothing changed, None if never."""
        deployments, sets, stateful = map(self._living, (DEPLOYMENTS, REPLICA_SETS, STATEFUL_SETS))
        daemons, jobs, cron = map(self._living, (DAEMON_SETS, JOBS, CRON_JOBS))
        if not (sets or deployments or stateful or jobs or daemons or cron):
            return None
        pods = controlled(self._api.list(PODS))
        owned = controlled(self._api.list(REPLICA_SETS))
        revisions = controlled(self._api.list(REVISIONS)) if stateful else {}
        for item in deployments:
            self._api.attempt(self._deployments.sync, item, owned.get(item["metadata"]["uid"], []), pods)
        for item in stateful:
            uid = item["metadata"]["uid"]
            self._api.attempt(self._stateful_sets.sync, item, pods.get(uid, []), revisions.get(uid, []))
        for collection, objects, act in (
            (REPLICA_SETS, sets, self._replica_set),
            (JOBS, jobs, self._jobs.sync),
            (DAEMON_SETS, daemons, self._daemon_set),
        ):
            for item in objects:
                self._api.attempt(act, item, pods.get(item["metadata"]["uid"], []))
                self._api.attempt(self._write_status, collection, item)
        return self._times(jobs, cron)

    def _living(self, collection: Collection) -> list[Json]:
        return [item for item in self._api.list(collection) if not item["metadata"].get("deletionTimestamp")]

    def _times(self, jobs: Sequence[Json], cron: Sequence[Json]) -> float | None:
        """Do what the clock asks for; gives the seconds until it asks again."""
        due: list[float | None] = []
        for job in jobs:
            self._api.attempt(self._jobs.expire, job)
            due.append(self._jobs.due(job))
        if cron:
            made = controlled(self._api.list(JOBS))
            for item in cron:
                self._api.attempt(
                    lambda item=item: due.append(
                        self._cron_jobs.sync(item, made.get(item["metadata"]["uid"], []))
                    )
                )
        return min((each for each in due if each is not None), default=None)

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
