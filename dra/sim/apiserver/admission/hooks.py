"""Which webhooks a request must pass.

Source: k8s.io/apiserver/pkg/admission/plugin/webhook (rules, selectors, match policy, match conditions, order).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dra.cel import CelCompileError, CelEvalError
from dra.cel.expression import compile_untyped, native
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.convert import from_storage
from dra.sim.apiserver.state import ServerState

Json = dict[str, Any]

ADMISSION = "admissionregistration.k8s.io"
MUTATING = f"{ADMISSION}/mutatingwebhookconfigurations"
VALIDATING = f"{ADMISSION}/validatingwebhookconfigurations"
# What decides about requests is never asked about itself.
_EXEMPT = frozenset(
    {MUTATING, VALIDATING}
    | {f"{ADMISSION}/{kind}" for kind in ("validatingadmissionpolicies", "validatingadmissionpolicybindings")}
)


@dataclass(frozen=True, slots=True)
class Hook:
    """One webhook that a request must pass, and the version in which it wants the objects."""

    name: str
    config: Json
    version: str
    mutating: bool

    @property
    def ignores_failures(self) -> bool:
        """Whether the request goes on if the webhook cannot be asked."""
        return self.config.get("failurePolicy") == "Ignore"


class ConditionError(Exception):
    """A match condition could not be evaluated."""


def hooks_for(api: ServerState, call: Call, operation: str, *, mutating: bool) -> list[Hook]:
    """Give the webhooks whose rules fit, in the order in which they are called: by configuration, then as listed."""
    resource = call.resource
    if resource.key in _EXEMPT or call.subresource not in {"", "status"} or resource.verbs == ("create",):
        return []
    found: list[Hook] = []
    key = MUTATING if mutating else VALIDATING
    for configuration in api.storage.snapshot(key)[1].values():
        for config in configuration.get("webhooks") or []:
            version = rules_version(config.get("rules"), config, call, operation)
            if version is not None:
                found.append(Hook(config["name"], config, version, mutating))
    return found


def rules_version(rules: list[Json] | None, config: Json, call: Call, operation: str) -> str | None:
    """Give the version in which who has these rules wants to see the object, None if they do not fit.

    Args:
        rules: those of a webhook, or the resource rules of a policy.
        config: where its `matchPolicy` stands.
        call: the request.
        operation: CREATE, UPDATE or DELETE.
    """
    if any(_rule_fits(rule, call, operation, call.version) for rule in rules or []):
        return call.version
    if config.get("matchPolicy") == "Exact":
        return None
    for version in call.resource.versions:
        if any(_rule_fits(rule, call, operation, version) for rule in rules or []):
            return version
    return None


def excluded(config: Json, call: Call, operation: str, version: str) -> bool:
    """Whether the exclude rules of a policy or binding take a request out again."""
    return any(
        _rule_fits(rule, call, operation, version) for rule in config.get("excludeResourceRules") or []
    )


def _rule_fits(rule: Json, call: Call, operation: str, version: str) -> bool:
    resource = call.resource
    scope = rule.get("scope") or "*"
    wanted = f"{resource.plural}/{call.subresource}" if call.subresource else resource.plural
    names = rule.get("resourceNames")
    return (
        (not names or call.name in names)
        and (scope == "*" or (scope == "Namespaced") == resource.namespaced)
        and _among(operation, rule.get("operations"))
        and _among(resource.group, rule.get("apiGroups"))
        and _among(version, rule.get("apiVersions"))
        and any(_resource_fits(pattern, wanted) for pattern in rule.get("resources") or [])
    )


def _among(value: str, listed: Iterable[str] | None) -> bool:
    return any(item in ("*", value) for item in listed or ())


def _resource_fits(pattern: str, wanted: str) -> bool:
    if pattern in {"*/*", wanted}:
        return True
    plural, _, subresource = wanted.partition("/")
    if "/" not in pattern:
        return pattern == "*" and not subresource
    left, _, right = pattern.partition("/")
    return left in {"*", plural} and (right == "*" or (right == subresource and bool(subresource)))


def selectors_fit(api: ServerState, config: Json, call: Call, objects: Iterable[Json | None]) -> bool:
    """Whether the selectors of a webhook or policy take an object (any of the new and the old one)."""
    present = [obj for obj in objects if obj is not None]
    wanted = config.get("objectSelector") or {}
    if not any(labels_fit(wanted, _labels(obj)) for obj in present):
        return False
    wanted = config.get("namespaceSelector") or {}
    if call.resource.key == "/namespaces":
        return any(labels_fit(wanted, _labels(obj)) for obj in present)
    if not call.resource.namespaced:
        return True
    namespace = api.storage.get("/namespaces", ("", call.namespace))
    return labels_fit(wanted, _labels(namespace or {}))


def _labels(obj: Json) -> Json:
    return (obj.get("metadata") or {}).get("labels") or {}


def labels_fit(selector: Json, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    return all(_term_fits(term, labels) for term in selector.get("matchExpressions") or [])


def _term_fits(term: Json, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(term["key"]), term.get("values") or []
    match term.get("operator"):
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
    return value is None


def conditions_met(hook: Hook, request: Json) -> bool:
    """Whether all match conditions of a webhook are true for an AdmissionRequest.

    Raises:
        ConditionError: none is false, and one could not be evaluated.
    """
    conditions = hook.config.get("matchConditions") or []
    if not conditions:
        return True
    names = ("object", "oldObject", "request")
    about = {key: value for key, value in request.items() if key not in {"object", "oldObject"}}
    values = {
        "object": native(request.get("object")),
        "oldObject": native(request.get("oldObject")),
        "request": native(about),
    }
    failed = ""
    for condition in conditions:
        try:
            value, _ = compile_untyped(condition["expression"], names).evaluate(values)
        except (CelCompileError, CelEvalError) as error:
            failed = failed or f'condition "{condition["name"]}": {error.message}'
            continue
        if value is not True:
            return False
    if failed:
        raise ConditionError(failed)
    return True


def as_seen(call: Call, version: str, obj: Json | None) -> Json | None:
    """Give a stored object in the version that a webhook wants."""
    if obj is None:
        return None
    shown = from_storage(call.resource, version, obj)
    return {"kind": shown["kind"], "apiVersion": shown["apiVersion"], **shown}
