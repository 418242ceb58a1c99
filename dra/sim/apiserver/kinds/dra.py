"""The kinds of resource.k8s.io: defaults, fields that a gate that is off drops, what may change.

Source: pkg/registry/resource and pkg/apis/resource/v1/defaults of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra.api.rules import claim_status, claims, slices
from dra.api.rules.cause import Cause
from dra.api.rules.decode import same_meaning
from dra.api.rules.defaults import default_claim, exact_requests
from dra.api.rules.fields import immutable
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds.base import Strategy

Json = dict[str, Any]


class DraStrategy(Strategy):
    """What all kinds of the group share."""

    def drop(self, items: Iterator[Json] | list[Json], gate: str, *keys: str) -> None:
        """Remove fields whose gate is off."""
        if not self.rules.on(gate):
            for item in items:
                for key in keys:
                    item.pop(key, None)

    def drop_claim(self, spec: Json) -> None:
        """Remove what a claim spec has for gates that are off."""
        requests = (spec.get("devices") or {}).get("requests") or []
        self.drop(requests, "DRAPrioritizedList", "firstAvailable")
        exact = list(exact_requests(spec))
        self.drop(exact, "DRAAdminAccess", "adminAccess")
        self.drop(exact, "DRADeviceTaints", "tolerations")
        self.drop(exact, "DRAConsumableCapacity", "capacity")
        constraints = (spec.get("devices") or {}).get("constraints") or []
        self.drop(constraints, "DRAConsumableCapacity", "distinctAttribute")


class SliceStrategy(DraStrategy):
    """ResourceSlices."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Drop and default."""
        self._prepare(new, None)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Drop and default; what the old object uses is kept."""
        self._prepare(new, old)

    def _prepare(self, new: Json, old: Json | None) -> None:
        spec = new.get("spec") or {}
        devices = spec.get("devices") or []
        self.drop(devices, "DRADeviceTaints", "taints")
        self.drop([spec], "DRAPartitionableDevices", "sharedCounters", "perDeviceNodeSelection")
        per_device = ("consumesCounters", "nodeName", "nodeSelector", "allNodes")
        self.drop(devices, "DRAPartitionableDevices", *per_device)
        binding = ("bindsToNode", "bindingConditions", "bindingFailureConditions")
        self.drop(devices, "DRADeviceBindingConditions", *binding)
        self.drop(devices, "DRAConsumableCapacity", "allowMultipleAllocations")
        self.drop(devices, "DRANodeAllocatableResources", "nodeAllocatableResourceMappings")
        for device in devices:
            self.drop(list((device.get("capacity") or {}).values()), "DRAConsumableCapacity", "requestPolicy")
            attributes = list((device.get("attributes") or {}).values())
            self.drop(attributes, "DRAListTypeAttributes", *slices.LISTS)
            for taint in device.get("taints") or []:
                if not taint.get("timeAdded"):
                    taint["timeAdded"] = self.rules.now()

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check everything."""
        return slices.validate(new, self.rules)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check everything, and what may not change."""
        return slices.validate(new, self.rules, old)

    def warnings(self, new: Json, old: Json | None, call: Call) -> list[str]:
        """Warn of drivers in upper case."""
        driver = (new.get("spec") or {}).get("driver") or ""
        if driver == driver.lower():
            return []
        return [f'spec.driver: driver names should be lowercase; "{driver}" contains uppercase characters']


class ClaimStrategy(DraStrategy):
    """ResourceClaims."""

    def _namespace(self, obj: Json) -> Json | None:
        return self.rules.read("/namespaces", ("", obj["metadata"].get("namespace") or ""))

    def default(self, new: Json, call: Call) -> None:
        """Default the requests."""
        default_claim(new.setdefault("spec", {}))

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default, drop, forget the status."""
        new["status"] = {}
        spec = new.setdefault("spec", {})
        self.drop_claim(spec)
        default_claim(spec)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Keep the status."""
        new["status"] = old.get("status") or {}
        spec = new.setdefault("spec", {})
        self.drop_claim(spec)
        default_claim(spec)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the spec."""
        return [
            *claims.validate_admin(new.get("spec") or {}, self._namespace(new)),
            *claims.validate_claim_spec(new.get("spec") or {}, "spec", self.rules),
        ]

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """The spec never changes."""
        return (
            [immutable("spec", new.get("spec"))] if not same_meaning(new.get("spec"), old.get("spec")) else []
        )

    def prepare_status(self, new: Json, old: Json, call: Call) -> None:
        """Keep the rest; forget device status of devices that are no longer allocated."""
        super().prepare_status(new, old, call)
        status = new.setdefault("status", {})
        self.drop([status], "DRAResourceClaimDeviceStatus", "devices")
        before = claim_status.allocated_keys((old.get("status") or {}).get("allocation"))
        gone = before - claim_status.allocated_keys(status.get("allocation"))
        if gone and status.get("devices"):
            status["devices"] = [d for d in status["devices"] if claim_status.device_key(d) not in gone]

    def validate_status(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check allocation, reservation and device status."""
        return claim_status.validate(new, old, self._namespace(new))


class TemplateStrategy(DraStrategy):
    """ResourceClaimTemplates."""

    def default(self, new: Json, call: Call) -> None:
        """Default the requests."""
        default_claim(new.setdefault("spec", {}).setdefault("spec", {}))

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default and drop."""
        spec = new.setdefault("spec", {}).setdefault("spec", {})
        self.drop_claim(spec)
        default_claim(spec)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Default and drop."""
        self.prepare_create(new, call)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the template."""
        namespace = self.rules.read("/namespaces", ("", new["metadata"].get("namespace") or ""))
        inner = (new.get("spec") or {}).get("spec") or {}
        return [*claims.validate_admin(inner, namespace), *claims.validate_template(new, self.rules)]

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """The spec never changes."""
        return (
            [immutable("spec", new.get("spec"))] if not same_meaning(new.get("spec"), old.get("spec")) else []
        )


class ClassStrategy(DraStrategy):
    """DeviceClasses."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Drop."""
        self.drop([new.setdefault("spec", {})], "DRAExtendedResource", "extendedResourceName")

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Drop."""
        self.prepare_create(new, call)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the class."""
        return claims.validate_class(new, self.rules)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check the class."""
        return claims.validate_class(new, self.rules)


class TaintRuleStrategy(DraStrategy):
    """DeviceTaintRules."""

    def _default(self, new: Json) -> None:
        taint = new.setdefault("spec", {}).setdefault("taint", {})
        if not taint.get("timeAdded"):
            taint["timeAdded"] = self.rules.now()

    def prepare_create(self, new: Json, call: Call) -> None:
        """Set the time, forget the status."""
        new["status"] = {}
        self._default(new)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Keep the status; a new effect starts its own time."""
        new["status"] = old.get("status") or {}
        before = (old.get("spec") or {}).get("taint") or {}
        taint = new.setdefault("spec", {}).setdefault("taint", {})
        if taint.get("effect") != before.get("effect") and taint.get("timeAdded") == before.get("timeAdded"):
            taint["timeAdded"] = self.rules.now()
        self._default(new)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the rule."""
        return claims.validate_taint_rule(new, self.rules)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check the rule."""
        return claims.validate_taint_rule(new, self.rules)

    def validate_status(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check the conditions."""
        from dra.api.rules.parts import conditions

        return conditions((new.get("status") or {}).get("conditions") or [], "status.conditions")
