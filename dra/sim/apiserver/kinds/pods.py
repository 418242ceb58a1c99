"""Pods: defaults, what admission adds, and what may change after creation.

Source: pkg/apis/core/v1/defaults, pkg/registry/core/pod and the default admission plug-ins of Kubernetes 1.36.
"""

from __future__ import annotations

import secrets
from typing import Any

from dra.api.rules import pods
from dra.api.rules.cause import Cause
from dra.api.rules.pod_defaults import FILE_MODE, containers, default_spec
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds.base import Strategy
from dra.sim.apiserver.status import forbidden
from dra.values import Quantity

Json = dict[str, Any]

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


def qos_class(spec: Json) -> str:
    """Give the quality of service class."""
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}
    guaranteed = True
    for container in containers(spec):
        resources = container.get("resources") or {}
        for kind, totals in (("requests", requests), ("limits", limits)):
            for name in ("cpu", "memory"):
                amount = Quantity.parse(str((resources.get(kind) or {}).get(name, "0")))
                if amount.nano:
                    totals[name] = totals.get(name, Quantity(0)) + amount
        given = {n for n in ("cpu", "memory") if (resources.get("limits") or {}).get(n)}
        guaranteed = guaranteed and given == {"cpu", "memory"}
    if not requests and not limits:
        return "BestEffort"
    return "Guaranteed" if guaranteed and requests == limits else "Burstable"


class PodStrategy(Strategy):
    """Pods."""

    def default(self, new: Json, call: Call) -> None:
        """Default the spec."""
        spec = new.setdefault("spec", {})
        default_spec(spec)
        if spec.get("enableServiceLinks") is None:
            spec["enableServiceLinks"] = True

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default the spec and start in Pending."""
        self.default(new, call)
        spec = new["spec"]
        new["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}
        if spec.get("schedulingGates"):
            why = "Scheduling is blocked due to non-empty scheduling gates"
            gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": why}
            new["status"]["conditions"] = [gated]

    def admit_create(self, new: Json, call: Call) -> bool:
        """Add service account, token, priority and the usual tolerations.

        Raises:
            ApiFailure: 403, the account or the priority class is not there.
        """
        spec = new["spec"]
        namespace = new["metadata"].get("namespace") or ""
        name = spec.get("serviceAccountName") or "default"
        account = self.rules.read("/serviceaccounts", (namespace, name))
        if account is None:
            why = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
            raise forbidden("pods", "", new["metadata"].get("name") or "", why)
        spec["serviceAccountName"] = spec["serviceAccount"] = name
        mount = spec.get("automountServiceAccountToken")
        if mount is None:
            mount = account.get("automountServiceAccountToken", True)
        if mount:
            _mount_token(spec)
        self._priority(new, spec)
        if spec.get("nodeName") is None:
            spec.pop("nodeName", None)
        tolerations = spec.setdefault("tolerations", [])
        for taint in ("not-ready", "unreachable"):
            key = f"node.kubernetes.io/{taint}"
            if not any(
                t.get("key") in (key, None, "") and t.get("effect") in ("NoExecute", None, "")
                for t in tolerations
            ):
                entry = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
                tolerations.append(entry)
        return True

    def _priority(self, new: Json, spec: Json) -> None:
        name = spec.get("priorityClassName") or ""
        value, policy = 0, "PreemptLowerPriority"
        if name in {"system-node-critical", "system-cluster-critical"}:
            value = 2_000_001_000 if name == "system-node-critical" else 2_000_000_000
        elif name:
            found = self.rules.read("scheduling.k8s.io/priorityclasses", ("", name))
            if found is None:
                pod = new["metadata"].get("name") or ""
                raise forbidden("pods", "", pod, f"no PriorityClass with name {name} was found")
            value, policy = found.get("value", 0), found.get("preemptionPolicy") or policy
        spec["priority"] = value
        spec["preemptionPolicy"] = spec.get("preemptionPolicy") or policy

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the spec."""
        return pods.validate_spec(new.get("spec") or {}, "spec")

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Default again and keep the status."""
        new["status"] = old.get("status") or {}
        spec = new.setdefault("spec", {})
        default_spec(spec)
        if spec.get("enableServiceLinks") is None:
            spec["enableServiceLinks"] = True

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Only images, the deadline, the grace period and more tolerations."""
        found = pods.validate_spec(new.get("spec") or {}, "spec")
        return [*found, *pods.validate_change(new.get("spec") or {}, old.get("spec") or {})]

    def prepare_status(self, new: Json, old: Json, call: Call) -> None:
        """Keep the spec; labels and annotations may change with the status."""
        new["spec"] = old.get("spec") or {}
        new["metadata"]["ownerReferences"] = old["metadata"].get("ownerReferences") or []
        if not new["metadata"]["ownerReferences"]:
            del new["metadata"]["ownerReferences"]
        status = new.setdefault("status", {})
        if not status.get("qosClass"):
            status["qosClass"] = (old.get("status") or {}).get("qosClass") or qos_class(new["spec"])

    def validate_status(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Claim statuses must name claims of the spec."""
        return pods.validate_status(new)


def _mount_token(spec: Json) -> None:
    """Add the volume with the service account's token, as the ServiceAccount admission plug-in does."""
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    name = f"kube-api-access-{''.join(secrets.choice(_ALPHABET) for _ in range(5))}"
    root = {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": root},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]
    used = False
    for container in containers(spec):
        mounts = container.setdefault("volumeMounts", [])
        if not any(mount.get("mountPath") == path for mount in mounts):
            mounts.append({"name": name, "readOnly": True, "mountPath": path})
            used = True
    if used:
        volume = {"name": name, "projected": {"sources": sources, "defaultMode": FILE_MODE}}
        spec.setdefault("volumes", []).append(volume)
