"""Deployments, replica sets, daemon sets, stateful sets and jobs: defaults and the rules that examples run into.

Source: pkg/apis/apps/v1 and pkg/apis/batch/v1 defaults, pkg/apis/apps/validation of Kubernetes 1.36.
"""

from __future__ import annotations

from typing import Any

from dra.api.rules import pods
from dra.api.rules.cause import Cause
from dra.api.rules.decode import same_meaning
from dra.api.rules.fields import bad, immutable, required, show
from dra.api.rules.pod_defaults import default_spec
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds.base import Strategy

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
}


class WorkloadStrategy(Strategy):
    """Kinds with a pod template."""

    def _default(self, new: Json, call: Call) -> None:
        spec = new.setdefault("spec", {})
        for key, value in _DEFAULTS.get(call.resource.kind, {}).items():
            if spec.get(key) in (None, {}):
                spec[key] = dict(value) if isinstance(value, dict) else value
        template = spec.setdefault("template", {}).setdefault("spec", {})
        default_spec(template)

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default, forget the status."""
        self.reset_status(new, call)
        self._default(new, call)
        if call.resource.kind == "Job":
            _default_job(new)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Default, keep the status."""
        super().prepare_update(new, old, call)
        self._default(new, call)
        if call.resource.kind == "Job":
            for key in ("selector", "parallelism", "completions"):
                if new["spec"].get(key) is None and key in old["spec"]:
                    new["spec"][key] = old["spec"][key]

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check selector and template."""
        spec = new.get("spec") or {}
        template = spec.get("template") or {}
        found: list[Cause] = []
        labels = (template.get("metadata") or {}).get("labels") or {}
        selector = spec.get("selector")
        if call.resource.kind != "Job":
            if not selector:
                found.append(required("spec.selector"))
            elif any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
                why = "`selector` does not match template `labels`"
                found.append(bad("spec.template.metadata.labels", labels, why))
        found += pods.validate_spec(template.get("spec") or {}, "spec.template.spec")
        policy = (template.get("spec") or {}).get("restartPolicy")
        allowed = ["OnFailure", "Never"] if call.resource.kind == "Job" else ["Always"]
        if policy not in allowed:
            listed = ", ".join(show(one) for one in allowed)
            detail = f"Unsupported value: {show(policy)}: supported values: {listed}"
            if call.resource.kind == "Job":
                detail = f"Required value: valid values: {', '.join(show(one) for one in allowed)}"
            found.append(Cause("FieldValueNotSupported", "spec.template.spec.restartPolicy", detail))
        return found

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check again; the selector never changes, nor does a job's template."""
        found = self.validate_create(new, call)
        fixed = ["selector", "template", "completions"] if call.resource.kind == "Job" else ["selector"]
        return found + [
            immutable(f"spec.{key}", new["spec"].get(key))
            for key in fixed
            if not same_meaning(new["spec"].get(key), old["spec"].get(key))
        ]


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


__all__ = ["WorkloadStrategy"]
