"""Jobs: pods until enough have succeeded, numbered or not, with deadline and time to live.

Source: the Job and TTL controllers of kube-controller-manager 1.36. Not simulated: pod failure and success policies, back-off
delays, limits per index. Counted from the pods that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dra.sim.control.api import JOBS, ControlApi, Json
from dra.sim.control.pod_sets import (
    PodSetWriter,
    condition,
    first_to_go,
    is_active,
    is_ready,
    pod_from_template,
)

INDEX = "batch.kubernetes.io/job-completion-index"


class JobController:
    """Keeps the pods of Jobs."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api
        self._writer = PodSetWriter(api, "job-controller")

    def sync(self, item: Json, pods: Sequence[Json]) -> None:
        """Make and delete the pods of one Job. Raises CallFailed."""
        active = [pod for pod in pods if is_active(pod)]
        wanted = 0 if deadline_over(item, self._api.clock()) else plan_job(item, pods)
        if indexed(item):
            for index in next_indexes(item, pods)[: max(0, wanted - len(active))]:
                self._writer.create(item, indexed_pod(item, index))
        else:
            for _ in range(wanted - len(active)):
                self._writer.create(item, pod_from_template(item, item["spec"]["template"]))
        for pod in first_to_go(active)[: max(0, len(active) - wanted)]:
            self._writer.delete(item, pod)

    def due(self, item: Json) -> float | None:
        """Give the seconds until a Job must be looked at again without any change, None if never."""
        now, status = self._api.clock(), item.get("status") or {}
        limit, ttl = item["spec"].get("activeDeadlineSeconds"), item["spec"].get("ttlSecondsAfterFinished")
        if finished(item):
            end = _finished_at(item)
            return None if ttl is None or end is None else max(0.05, end + float(ttl) - now)
        if limit is None or not status.get("startTime"):
            return None
        return max(0.05, _seconds(status["startTime"]) + float(limit) - now)

    def expire(self, item: Json) -> None:
        """Delete a Job whose time to live is over. Raises CallFailed."""
        ttl, end = item["spec"].get("ttlSecondsAfterFinished"), _finished_at(item)
        if ttl is not None and end is not None and end + float(ttl) <= self._api.clock():
            self._api.delete(JOBS, item)


def indexed(job: Mapping[str, Any]) -> bool:
    """Whether the pods of a Job have numbers."""
    return bool(job["spec"].get("completionMode") == "Indexed")


def _index_of(pod: Mapping[str, Any]) -> int:
    text = (pod["metadata"].get("annotations") or {}).get(INDEX, "")
    return int(text) if text.isdecimal() else -1


def next_indexes(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[int]:
    """Give the numbers that no pod runs for and none has succeeded with, lowest first."""
    taken = {_index_of(pod) for pod in pods if is_active(pod) or _phase(pod) == "Succeeded"}
    return [index for index in range(int(job["spec"].get("completions") or 0)) if index not in taken]


def indexed_pod(job: Json, index: int) -> Json:
    """Give the pod with a number."""
    pod = pod_from_template(job, job["spec"]["template"], labels={INDEX: str(index)})
    meta, spec = pod["metadata"], pod["spec"]
    meta["annotations"] = {**meta["annotations"], INDEX: str(index)}
    meta["generateName"] = f"{job['metadata']['name']}-{index}-"
    spec.setdefault("hostname", f"{job['metadata']['name']}-{index}")
    source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    for container in (*(spec.get("initContainers") or []), *spec["containers"]):
        names = {entry.get("name") for entry in container.get("env") or []}
        if "JOB_COMPLETION_INDEX" not in names:
            container["env"] = [
                *(container.get("env") or []),
                {"name": "JOB_COMPLETION_INDEX", "valueFrom": source},
            ]
    return pod


def plan_job(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> int:
    """Give how many pods of a job should be active now."""
    spec = job["spec"]
    if spec.get("suspend") or _count(pods, "Failed") > int(spec.get("backoffLimit", 6)) or finished(job):
        return 0
    parallelism = int(spec.get("parallelism", 1))
    completions = spec.get("completions")
    succeeded = _succeeded(job, pods)
    if completions is None:
        # A work queue: once one pod has succeeded no new ones are made.
        active = sum(1 for pod in pods if is_active(pod))
        return active if succeeded else parallelism
    return min(parallelism, max(0, int(completions) - succeeded))


def finished(job: Mapping[str, Any]) -> bool:
    """Whether a Job has come to its end, good or bad."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(item["type"] in {"Complete", "Failed"} and item["status"] == "True" for item in conditions)


def _finished_at(job: Mapping[str, Any]) -> float | None:
    for item in (job.get("status") or {}).get("conditions") or []:
        if item["type"] in {"Complete", "Failed"} and item["status"] == "True":
            return _seconds(item["lastTransitionTime"])
    return None


def _seconds(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


def deadline_over(job: Mapping[str, Any], now: float) -> bool:
    """Whether a Job has run longer than it may."""
    limit = job["spec"].get("activeDeadlineSeconds")
    start = str((job.get("status") or {}).get("startTime") or "")
    if limit is None or not start or job["spec"].get("suspend"):
        return False
    return now - _seconds(start) >= float(limit)


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _count(pods: Iterable[Mapping[str, Any]], phase: str) -> int:
    return sum(1 for pod in pods if _phase(pod) == phase)


def _succeeded(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> int:
    if not indexed(job):
        return _count(pods, "Succeeded")
    return len({_index_of(pod) for pod in pods if _phase(pod) == "Succeeded"})


def spans(numbers: Iterable[int]) -> str:
    """Give numbers as `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def job_status(job: Json, pods: Sequence[Json], *, now: str) -> Json:
    """Give a job's status; a finished job keeps its figures."""
    old, spec = job.get("status") or {}, job["spec"]
    if finished(job):
        return {key: value for key, value in old.items() if key not in {"active", "ready"}}
    active = [pod for pod in pods if is_active(pod)]
    succeeded, failed = _succeeded(job, pods), _count(pods, "Failed")
    status: Json = {"ready": sum(map(is_ready, active))}
    if not spec.get("suspend"):
        status["startTime"] = old.get("startTime", now)
    for name, value in (("active", len(active)), ("succeeded", succeeded), ("failed", failed)):
        if value:
            status[name] = value
    if indexed(job) and succeeded:
        status["completedIndexes"] = spans({_index_of(pod) for pod in pods if _phase(pod) == "Succeeded"})
    conditions = old.get("conditions") or []
    ended = _ending(job, active, succeeded, failed, now)
    if ended is not None:
        kinds, reason, text = ended
        status["conditions"] = [_job_condition(kind, reason, text, conditions, now) for kind in kinds]
        if "Complete" in kinds:
            status["completionTime"] = now
    elif spec.get("suspend"):
        status["conditions"] = [_job_condition("Suspended", "JobSuspended", "Job suspended", conditions, now)]
    return status


def _ending(
    job: Json, active: Sequence[Json], succeeded: int, failed: int, now: str
) -> tuple[tuple[str, ...], str, str] | None:
    """Give conditions, reason and message of a Job that ends now."""
    completions = job["spec"].get("completions")
    if failed > int(job["spec"].get("backoffLimit", 6)):
        text = "Job has reached the specified backoff limit"
        return ("FailureTarget", "Failed"), "BackoffLimitExceeded", text
    if deadline_over(job, _seconds(now)):
        return (
            ("FailureTarget", "Failed"),
            "DeadlineExceeded",
            "Job was active longer than specified deadline",
        )
    if completions == 0 or (
        succeeded and (not active if completions is None else succeeded >= int(completions))
    ):
        return (
            ("SuccessCriteriaMet", "Complete"),
            "CompletionsReached",
            "Reached expected number of succeeded pods",
        )
    return None


def _job_condition(kind: str, reason: str, message: str, old: Sequence[Json], now: str) -> Json:
    made = condition(kind, on=True, reason=reason, message=message, old=old, now=now)
    made["lastProbeTime"] = made.pop("lastUpdateTime")
    return made
