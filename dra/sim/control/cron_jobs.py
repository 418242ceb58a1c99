"""CronJobs: a Job whenever the schedule says so, and the tidying of old ones.

Source: the CronJob controller of kube-controller-manager 1.36.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from dra.api.rules.cron import Schedule, ScheduleError, parse_schedule
from dra.sim.control.api import CRON_JOBS, JOBS, ControlApi, Json

_COMPONENT = "cronjob-controller"
_SCHEDULED = "batch.kubernetes.io/cronjob-scheduled-timestamp"
# After a long sleep only the last time counts; so many missed ones are looked at.
_MOST_MISSED = 100_000


class CronJobController:
    """Makes and tidies the Jobs of CronJobs."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api

    def sync(self, item: Json, jobs: Sequence[Json]) -> float | None:
        """Do what is due for one CronJob. Gives the seconds until the next time, None if there is none.

        Raises:
            CallFailed: the server refused something.
        """
        spec = item["spec"]
        active, item = self._noted(item, jobs)
        self._tidy(spec, jobs)
        if spec.get("suspend"):
            return None
        try:
            schedule = parse_schedule(spec["schedule"], spec.get("timeZone"))
        except ScheduleError as error:
            self._event(
                item, "Warning", "UnparseableSchedule", f"unparseable schedule {spec['schedule']!r}: {error}"
            )
            return None
        now = self._api.clock()
        due = last_due(schedule, _since(item), now)
        deadline = spec.get("startingDeadlineSeconds")
        if due is not None and (deadline is None or now - due <= float(deadline)):
            self._run(item, due, active)
        following = schedule.after(now)
        return None if following is None else max(0.05, following - now)

    def _run(self, item: Json, due: float, active: Sequence[Json]) -> None:
        policy = item["spec"].get("concurrencyPolicy", "Allow")
        if policy == "Forbid" and active:
            text = "Not starting job because prior execution is running and concurrency policy is Forbid"
            self._event(item, "Normal", "JobAlreadyActive", text)
            self._write(item, {**(item.get("status") or {}), "lastScheduleTime": _stamp(due)})
            return
        if policy == "Replace":
            for job in active:
                self._api.delete(JOBS, job)
                self._event(item, "Normal", "SuccessfulDelete", f"Deleted job {job['metadata']['name']}")
            active = []
        made = self._api.create(JOBS, job_of(item, due))
        self._event(item, "Normal", "SuccessfulCreate", f"Created job {made['metadata']['name']}")
        status = {
            **(item.get("status") or {}),
            "active": [_reference(job) for job in (*active, made)],
            "lastScheduleTime": _stamp(due),
        }
        self._write(item, status)

    def _noted(self, item: Json, jobs: Sequence[Json]) -> tuple[list[Json], Json]:
        """Note which jobs run and when one last succeeded; gives the running ones and the item as stored."""
        active = [job for job in jobs if not _outcome(job)]
        status = dict(item.get("status") or {})
        status.pop("active", None)
        if active:
            status["active"] = [_reference(job) for job in active]
        ends = [job["status"]["completionTime"] for job in jobs if _outcome(job) == "Complete"]
        if ends:
            status["lastSuccessfulTime"] = max([*ends, status.get("lastSuccessfulTime") or ""])
        return active, self._write(item, status)

    def _write(self, item: Json, status: Json) -> Json:
        if status == (item.get("status") or {}):
            return item
        return self._api.replace(CRON_JOBS, {**item, "status": status}, subresource="status")

    def _tidy(self, spec: Json, jobs: Sequence[Json]) -> None:
        for outcome, limit in (
            ("Complete", spec.get("successfulJobsHistoryLimit", 3)),
            ("Failed", spec.get("failedJobsHistoryLimit", 1)),
        ):
            done = [job for job in jobs if _outcome(job) == outcome]
            done.sort(key=lambda job: (job.get("status") or {}).get("startTime") or "")
            for job in done[: max(0, len(done) - int(limit))]:
                self._api.attempt(self._api.delete, JOBS, job)

    def _event(self, item: Json, kind: str, reason: str, message: str) -> None:
        self._api.event(item, kind, reason=reason, message=message, component=_COMPONENT)


def last_due(schedule: Schedule, since: float, now: float) -> float | None:
    """Give the last time of a schedule after `since` that has come."""
    found = None
    for count, moment in enumerate(schedule.between(since, now)):
        found = moment
        if count > _MOST_MISSED:
            break
    return found


def _since(item: Json) -> float:
    status = item.get("status") or {}
    text = status.get("lastScheduleTime") or item["metadata"]["creationTimestamp"]
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _outcome(job: Json) -> str:
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition["type"] in {"Complete", "Failed"} and condition["status"] == "True":
            return str(condition["type"])
    return ""


def _reference(job: Json) -> Json:
    meta = job["metadata"]
    return {
        "apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "namespace": meta["namespace"],
        "uid": meta["uid"], "resourceVersion": meta["resourceVersion"],
    }  # fmt: skip


def job_of(item: Json, due: float) -> Json:
    """Give the Job that a CronJob makes for a scheduled time."""
    template = json.loads(json.dumps(item["spec"]["jobTemplate"]))
    meta = template.get("metadata") or {}
    owner = item["metadata"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{owner['name']}-{int(due // 60)}",
            "namespace": owner["namespace"],
            "labels": meta.get("labels") or {},
            "annotations": {**(meta.get("annotations") or {}), _SCHEDULED: _stamp(due)},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1", "kind": "CronJob", "name": owner["name"], "uid": owner["uid"],
                    "controller": True, "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": template["spec"],
    }  # fmt: skip
