"""Deployments, replica sets, daemon sets, stateful sets and jobs.

Source: pkg/registry/apps and pkg/registry/batch of Kubernetes 1.36.
"""

from __future__ import annotations

from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import same_meaning
from dra.api.rules.fields import immutable
from dra.api.rules.workloads import default_workload, validate_cron_job, validate_workload
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds.base import Strategy

Json = dict[str, Any]


class WorkloadStrategy(Strategy):
    """Kinds with a pod template."""

    def default(self, new: Json, call: Call) -> None:
        """Default the spec and its template."""
        default_workload(new.setdefault("spec", {}), call.resource.kind)

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default, forget the status."""
        self.reset_status(new, call)
        self.default(new, call)
        if call.resource.kind == "Job":
            _default_job(new)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Default, keep the status."""
        super().prepare_update(new, old, call)
        self.default(new, call)
        if call.resource.kind == "Job":
            for key in ("selector", "parallelism", "completions"):
                if new["spec"].get(key) is None and key in old["spec"]:
                    new["spec"][key] = old["spec"][key]

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check selector and template."""
        return validate_workload(new, call.resource.kind)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check again; the selector never changes, nor does a job's template."""
        found = self.validate_create(new, call)
        fixed = ["selector", "template", "completions"] if call.resource.kind == "Job" else ["selector"]
        return found + [
            immutable(f"spec.{key}", new["spec"].get(key))
            for key in fixed
            if not same_meaning(new["spec"].get(key), old["spec"].get(key))
        ]


class CronJobStrategy(WorkloadStrategy):
    """CronJobs."""

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check schedule, policy and template."""
        return validate_cron_job(new)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check again; all may change."""
        return self.validate_create(new, call)


def _default_job(new: Json) -> None:
    spec, meta = new["spec"], new["metadata"]
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = spec["parallelism"] = 1
    if spec.get("parallelism") is None:
        spec["parallelism"] = 1
    labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    uid, name = meta.get("uid", ""), meta.get("name", "")
    for prefix in ("", "batch.kubernetes.io/"):
        labels.setdefault(f"{prefix}controller-uid", uid)
        labels.setdefault(f"{prefix}job-name", name)
    if not spec.get("manualSelector"):
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
