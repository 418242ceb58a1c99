"""Namespaces, nodes, events and the small kinds of the core group that have rules of their own."""

from __future__ import annotations

from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.fields import bad, duplicate, forbidden, immutable, required, unsupported
from dra.api.rules.meta import qualified_name_errors
from dra.api.rules.pods import is_extended
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds.base import Strategy
from dra.values import Quantity

Json = dict[str, Any]


class NamespaceStrategy(Strategy):
    """Namespaces are labels, carry their name as a label and a finalizer that waits for their content."""

    def __post_init__(self) -> None:
        self.name_check = "label"

    def prepare_create(self, new: Json, call: Call) -> None:
        """Set phase, finalizer and label."""
        finalizers = list((new.get("spec") or {}).get("finalizers") or [])
        if "kubernetes" not in finalizers:
            finalizers.append("kubernetes")
        new["spec"] = {**(new.get("spec") or {}), "finalizers": finalizers}
        new["status"] = {"phase": "Active"}
        self._label(new)

    def _label(self, new: Json) -> None:
        name = new["metadata"].get("name")
        if name:
            labels = new["metadata"].get("labels") or {}
            new["metadata"]["labels"] = {**labels, "kubernetes.io/metadata.name": name}

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Finalizers of the spec change through the subresource `finalize` only."""
        super().prepare_update(new, old, call)
        new["spec"] = {
            **(new.get("spec") or {}),
            "finalizers": (old.get("spec") or {}).get("finalizers") or [],
        }
        self._label(new)


class NodeStrategy(Strategy):
    """Nodes: a status may come with the creation; labels may change with the status."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Leave all as it is."""
        if self.rules.node_lifecycle:
            taints = new.setdefault("spec", {}).setdefault("taints", [])
            taints.append({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"})
        self._allocatable(new)

    def _allocatable(self, new: Json) -> None:
        status = new.setdefault("status", {})
        if status.get("capacity") and not status.get("allocatable"):
            status["allocatable"] = dict(status["capacity"])

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check taints and capacity."""
        return [*self._taints(new), *self._capacity(new)]

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check taints and what may not change."""
        found = self._taints(new) * 2
        before, after = ((o.get("spec") or {}).get("providerID") or "" for o in (old, new))
        if before and before != after:
            found.append(
                forbidden("spec.providerID", 'node updates may not change providerID except from "" to valid')
            )
        return found

    def prepare_status(self, new: Json, old: Json, call: Call) -> None:
        """Keep the spec."""
        new["spec"] = old.get("spec") or {}
        self._allocatable(new)

    def validate_status(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Extended resources are whole numbers."""
        return self._capacity(new)

    def _capacity(self, new: Json) -> list[Cause]:
        found: list[Cause] = []
        for key in ("capacity", "allocatable"):
            for name, amount in sorted(((new.get("status") or {}).get(key) or {}).items()):
                if is_extended(name) and not Quantity.parse(str(amount)).is_integer:
                    found.append(bad(f"status.{key}.{name}", amount, "must be an integer"))
        return found[:1]

    def _taints(self, new: Json) -> list[Cause]:
        found: list[Cause] = []
        seen: set[tuple[str, str]] = set()
        effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"]
        for i, taint in enumerate((new.get("spec") or {}).get("taints") or []):
            at = f"metadata.taints[{i}]"
            key, effect = taint.get("key") or "", taint.get("effect") or ""
            found += [bad(f"{at}.key", key, why) for why in qualified_name_errors(key)]
            if not effect:
                found.append(required(f"{at}.effect"))
            elif effect not in effects:
                found.append(unsupported(f"{at}.effect", effect, effects))
            if (key, effect) in seen:
                shown = {"Key": key, "Value": taint.get("value") or "", "Effect": effect, "TimeAdded": None}
                cause = duplicate(at, shown)
                why = f"{cause.detail}: taints must be unique by key and effect pair"
                found.append(Cause(cause.reason, at, why))
            seen.add((key, effect))
        return found


class EventStrategy(Strategy):
    """Events may be made by a PUT; those written through events.k8s.io are checked strictly."""

    def __post_init__(self) -> None:
        self.create_on_put = True
        self.name_check = "path"

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the object's namespace, and a new event's form."""
        namespace = new["metadata"].get("namespace")
        regarding = (new.get("involvedObject") or {}).get("namespace") or ""
        found: list[Cause] = []
        strict = call.resource.group == "events.k8s.io"
        if not regarding:
            if namespace != "default":
                found.append(bad("involvedObject.namespace", "", "does not match event.namespace"))
        elif not strict and regarding != namespace:
            found.append(bad("involvedObject.namespace", regarding, "does not match event.namespace"))
        return [*self._strict(new), *found] if strict else found

    def _strict(self, new: Json) -> list[Cause]:
        found: list[Cause] = []
        if not new.get("eventTime"):
            found.append(required("eventTime"))
        controller = new.get("reportingComponent") or ""
        if not controller:
            found.append(required("reportingController"))
        found += [bad("reportingController", controller, why) for why in qualified_name_errors(controller)]
        for key in ("reportingInstance", "action", "reason"):
            if not new.get(key):
                found.append(required(key))
            elif len(new[key]) > 128:
                found.append(bad(key, "", "can have at most 128 characters"))
        if len(new.get("message") or "") > 1024:
            found.append(bad("message", "", "can have at most 1024 characters"))
        if new.get("type") not in {"Normal", "Warning"}:
            found.append(bad("type", "", f"has invalid value: {new.get('type') or ''}"))
        for key in ("count", "firstTimestamp", "lastTimestamp"):
            if new.get(key):
                found.append(bad(key, "", "needs to be unset"))
        series = new.get("series")
        if series is not None and (series.get("count") or 0) < 2:
            found.append(bad("series.count", "", "should be at least 2"))
        return found

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Through events.k8s.io only the series may change."""
        if call.resource.group != "events.k8s.io":
            return []
        fixed = ("involvedObject", "reason", "message", "type", "action", "eventTime", "reportingInstance")
        return [immutable(key, new.get(key)) for key in fixed if new.get(key) != old.get(key)]


class ConfigMapStrategy(Strategy):
    """ConfigMaps and Secrets may be frozen."""

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Refuse changes of an immutable object."""
        if not old.get("immutable"):
            return []
        found: list[Cause] = []
        if not new.get("immutable"):
            found.append(forbidden("immutable", "field is immutable when `immutable` is set"))
        return found + [
            forbidden(key, "field is immutable when `immutable` is set")
            for key in ("data", "binaryData")
            if new.get(key) != old.get(key)
        ]


class SecretStrategy(ConfigMapStrategy):
    """Secrets: text becomes data, the type is Opaque by default."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Fold stringData into data."""
        from base64 import b64encode

        new["type"] = new.get("type") or "Opaque"
        for key, value in (new.pop("stringData", None) or {}).items():
            new.setdefault("data", {})[key] = b64encode(value.encode()).decode()

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Fold stringData into data."""
        self.prepare_create(new, call)


class LeaseStrategy(Strategy):
    """Leases."""

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the duration."""
        duration = (new.get("spec") or {}).get("leaseDurationSeconds")
        if duration is not None and duration <= 0:
            return [bad("spec.leaseDurationSeconds", duration, "must be greater than 0")]
        return []

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check the duration."""
        return self.validate_create(new, call)
