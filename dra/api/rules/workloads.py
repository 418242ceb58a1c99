"""Deployments, replica sets, stateful sets, daemon sets and jobs: defaults and the rules that examples run into.

Source: pkg/apis/apps/v1 and pkg/apis/batch/v1 defaults, pkg/apis/apps/validation of Kubernetes 1.36.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from dra.api.rules import pods
from dra.api.rules.cause import Cause
from dra.api.rules.cron import ScheduleError, parse_schedule
from dra.api.rules.fields import bad, required, show, unsupported
from dra.api.rules.pod_defaults import default_spec

Json = dict[str, Any]

_ROLLING = {"maxUnavailable": "25%", "maxSurge": "25%"}
_DEFAULTS: dict[str, Json] = {
    "Deployment": {
        "replicas": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _ROLLING},
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
    },
    "ReplicaSet": {"replicas": 1},
    "StatefulSet": {
        "replicas": 1,
        "podManagementPolicy": "OrderedReady",
        "revisionHistoryLimit": 10,
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
    },
    "DaemonSet": {
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
        "revisionHistoryLimit": 10,
    },
    "Job": {
        "backoffLimit": 6,
        "completionMode": "NonIndexed",
        "suspend": False,
        "podReplacementPolicy": "TerminatingOrFailed",
        "manualSelector": False,
    },
    "CronJob": {
        "concurrencyPolicy": "Allow",
        "suspend": False,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 1,
    },
}


def default_workload(spec: Json, kind: str) -> None:
    """Fill in the spec of a kind with a pod template, and the template."""
    _fill(spec, _DEFAULTS.get(kind, {}))
    if kind == "CronJob":
        default_spec(
            spec.setdefault("jobTemplate", {})
            .setdefault("spec", {})
            .setdefault("template", {})
            .setdefault("spec", {})
        )
        return
    default_spec(spec.setdefault("template", {}).setdefault("spec", {}))


def _fill(spec: Json, defaults: Json) -> None:
    for key, value in defaults.items():
        if isinstance(value, dict) and isinstance(spec.get(key), dict):
            # A strategy of another type has no settings of this one.
            if spec[key].get("type") in (None, value.get("type")):
                _fill(spec[key], value)
        elif spec.get(key) is None:
            spec[key] = copy.deepcopy(value)


def validate_workload(obj: Json, kind: str) -> list[Cause]:
    """Find what is wrong with selector and template."""
    spec = obj.get("spec") or {}
    template = spec.get("template") or {}
    found: list[Cause] = []
    labels = (template.get("metadata") or {}).get("labels") or {}
    selector = spec.get("selector")
    if kind != "Job":
        if not selector:
            found.append(required("spec.selector"))
        elif any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
            why = "`selector` does not match template `labels`"
            found.append(bad("spec.template.metadata.labels", labels, why))
    found += pods.validate_spec(template.get("spec") or {}, "spec.template.spec")
    policy = (template.get("spec") or {}).get("restartPolicy")
    allowed = ["OnFailure", "Never"] if kind == "Job" else ["Always"]
    if policy not in allowed:
        listed = ", ".join(show(one) for one in allowed)
        detail = f"Unsupported value: {show(policy)}: supported values: {listed}"
        if kind == "Job":
            detail = f"Required value: valid values: {', '.join(show(one) for one in allowed)}"
        found.append(Cause("FieldValueNotSupported", "spec.template.spec.restartPolicy", detail))
    return found


_POLICIES = ("Allow", "Forbid", "Replace")
# A job's name has eleven characters more, and names a pod and a label.
_LONGEST_CRON = 52


def validate_cron_job(obj: Json) -> list[Cause]:
    """Find what is wrong with schedule, policy and job template of a defaulted CronJob."""
    spec = obj.get("spec") or {}
    found: list[Cause] = []
    if not spec.get("schedule"):
        found.append(required("spec.schedule"))
    else:
        try:
            parse_schedule(str(spec["schedule"]))
        except ScheduleError as error:
            found.append(bad("spec.schedule", spec["schedule"], str(error)))
    try:
        parse_schedule("@daily", spec.get("timeZone"))
    except ScheduleError as error:
        found.append(bad("spec.timeZone", spec["timeZone"], str(error)))
    if spec.get("concurrencyPolicy") not in _POLICIES:
        found.append(unsupported("spec.concurrencyPolicy", spec.get("concurrencyPolicy"), _POLICIES))
    name = (obj.get("metadata") or {}).get("name") or ""
    if len(name) > _LONGEST_CRON:
        found.append(bad("metadata.name", name, f"must be no more than {_LONGEST_CRON} characters"))
    found += [
        bad(f"spec.{key}", spec[key], "must be greater than or equal to 0")
        for key in ("successfulJobsHistoryLimit", "failedJobsHistoryLimit", "startingDeadlineSeconds")
        if int(spec.get(key) or 0) < 0
    ]
    job = {"spec": (spec.get("jobTemplate") or {}).get("spec") or {}}
    return found + [
        replace(cause, field=cause.field.replace("spec.", "spec.jobTemplate.spec.", 1))
        for cause in validate_workload(job, "Job")
    ]
