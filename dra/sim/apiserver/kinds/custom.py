"""Custom resource definitions and the objects they define."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dra.api.rules.cause import Cause
from dra.api.rules.fields import bad
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.custom import CLEANUP, DEFINITIONS, Custom, resource_of
from dra.sim.apiserver.kinds.base import Strategy, keep
from dra.sim.apiserver.status import forbidden
from dra.sim.apiserver.storage import Change
from dra.sim.apiserver.validation.custom import validate_object
from dra.sim.apiserver.validation.custom_rules import MISSING, RuleTree
from dra.sim.apiserver.validation.definitions import validate_definition

if TYPE_CHECKING:
    from dra.sim.apiserver.registry import Registry

Json = dict[str, Any]


class DefinitionStrategy(Strategy):
    """CustomResourceDefinitions."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default names and conversion, forget the status."""
        self._default(new)
        new["status"] = {
            "conditions": None,
            "acceptedNames": {"plural": "", "kind": ""},
            "storedVersions": [
                v["name"] for v in (new.get("spec") or {}).get("versions") or [] if v.get("storage")
            ],
        }

    def _default(self, new: Json) -> None:
        spec = new.setdefault("spec", {})
        names = spec.setdefault("names", {})
        if names.get("kind"):
            names["singular"] = names.get("singular") or names["kind"].lower()
            names["listKind"] = names.get("listKind") or f"{names['kind']}List"
        spec.setdefault("conversion", {"strategy": "None"})

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Keep the status."""
        super().prepare_update(new, old, call)
        self._default(new)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check the definition."""
        return validate_definition(new)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check the definition, and what may not change."""
        return validate_definition(new, old=old)


_NO_RULES = RuleTree(None, {})


class CustomStrategy(Strategy):
    """Objects of a definition."""

    custom: Custom = Custom()

    def _check(self, new: Json, call: Call, old: Any = MISSING) -> list[Cause]:
        if new.get("kind") != call.resource.kind:
            return [bad("kind", new.get("kind"), f"must be {call.resource.kind}")]
        custom, version = self._of(call), call.version
        found, ratcheted = validate_object(
            new,
            custom.schemas.get(version, {}),
            custom.scales.get(version, {}),
            custom.rules.get(version, _NO_RULES),
            old=old,
        )
        for cause in ratcheted:
            call.warn(str(cause))
        return found

    @staticmethod
    def _of(call: Call) -> Custom:
        return call.resource.custom or Custom()

    def prepare_create(self, new: Json, call: Call) -> None:
        """Forget a status that has a subresource of its own."""
        if self._of(call).terminating:
            why = "create not allowed while custom resource definition is terminating"
            name = new["metadata"].get("name") or ""
            raise forbidden(call.resource.plural, call.resource.group, name, why)
        if "status" in call.resource.subresources:
            new.pop("status", None)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check against the schema."""
        return self._check(new, call)

    def _version_given(self, new: Json, call: Call) -> list[Cause]:
        given = call.request.method != "PUT" or call.version_given
        why = "must be specified for an update"
        return [] if given else [bad("metadata.resourceVersion", 0, why)]

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check against the schema; a PUT must name the version it replaces."""
        missing = self._version_given(new, call)
        if missing:
            return missing
        call.version_given = True
        return self._check(new, call, old)

    def prepare_status(self, new: Json, old: Json, call: Call) -> None:
        """Keep all but the status."""
        for key in {*new, *old} - {"status", "metadata", "kind", "apiVersion"}:
            keep(new, old, key)
        version = new["metadata"].get("resourceVersion")
        new["metadata"] = {**old["metadata"], "resourceVersion": version}

    def validate_status(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check against the schema."""
        return self.validate_update(new, old, call)


def follow_definitions(registry: Registry, resource: str, change: Change) -> None:
    """Serve what a stored definition says, and stop when it is gone."""
    if resource != DEFINITIONS:
        return
    if change.after is None:
        spec = (change.last or change.before or {}).get("spec") or {}
        registry.remove(spec["group"], spec["names"]["plural"])
    elif (change.after.get("status") or {}).get("conditions"):
        registry.add(resource_of(change.after))


def established(definition: Json, now: str) -> Json:
    """Give a definition as its controllers leave it: names accepted, established, with the clean-up finalizer."""
    names = definition["spec"]["names"]

    def condition(kind: str, reason: str, message: str) -> Json:
        return {
            "type": kind,
            "status": "True",
            "lastTransitionTime": now,
            "reason": reason,
            "message": message,
        }

    conditions = [
        condition("NamesAccepted", "NoConflicts", "no conflicts found"),
        condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
    ]
    status = {**(definition.get("status") or {}), "conditions": conditions, "acceptedNames": names}
    return {**definition, "status": status}


__all__ = [
    "CLEANUP",
    "DEFINITIONS",
    "CustomStrategy",
    "DefinitionStrategy",
    "established",
    "follow_definitions",
]
