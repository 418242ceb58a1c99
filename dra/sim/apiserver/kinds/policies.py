"""ValidatingAdmissionPolicies and their bindings: defaults, and what is refused when one is written.

Source: pkg/apis/admissionregistration (defaults, validation) of Kubernetes 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.fields import bad, duplicate, forbidden, required, unsupported
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.cel import explain
from dra.sim.apiserver.kinds.base import Strategy
from dra.sim.apiserver.policy_expressions import expressions_of

Json = dict[str, Any]
_IDENTIFIER = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")
_ACTIONS = ("Audit", "Deny", "Warn")
_REASONS = ("Forbidden", "Invalid", "RequestEntityTooLarge")


class _Strategy(Strategy):
    """Both kinds are defaulted on each write."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default."""
        super().prepare_create(new, call)
        self.default(new, call)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Default."""
        super().prepare_update(new, old, call)
        self.default(new, call)

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check again."""
        return self.validate_create(new, call)


def _default_match(match: Json) -> None:
    match["matchPolicy"] = match.get("matchPolicy") or "Equivalent"
    for key in ("namespaceSelector", "objectSelector"):
        if match.get(key) is None:
            match[key] = {}
    for rule in [*(match.get("resourceRules") or []), *(match.get("excludeResourceRules") or [])]:
        rule["scope"] = rule.get("scope") or "*"


class PolicyStrategy(_Strategy):
    """Policies."""

    def default(self, new: Json, call: Call) -> None:
        """Say what failures mean and what is matched."""
        spec = new.setdefault("spec", {})
        spec["failurePolicy"] = spec.get("failurePolicy") or "Fail"
        if spec.get("matchConstraints") is not None:
            _default_match(spec["matchConstraints"])

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check what it matches, and compile its expressions."""
        return [*_policy(new["spec"])]


def _policy(spec: Json) -> Iterator[Cause]:
    if spec.get("failurePolicy") not in ("Fail", "Ignore"):
        yield unsupported("spec.failurePolicy", spec.get("failurePolicy"), ("Fail", "Ignore"))
    constraints = spec.get("matchConstraints")
    if constraints is None:
        yield required("spec.matchConstraints")
    elif not constraints.get("resourceRules"):
        yield required("spec.matchConstraints.resourceRules")
    if not spec.get("validations") and not spec.get("auditAnnotations"):
        for field in ("validations", "auditAnnotations"):
            yield required(f"spec.{field}", "validations or auditAnnotations must contain at least one item")
    for listed in ("matchConditions", "variables"):
        yield from _named(spec.get(listed) or [], f"spec.{listed}")
    for i, validation in enumerate(spec.get("validations") or []):
        yield from _validation(validation, f"spec.validations[{i}]")
    for at, source, error in expressions_of(spec).problems:
        if source.strip():
            yield bad(at, source, explain(error))


def _named(items: list[Json], at: str) -> Iterator[Cause]:
    seen: set[str] = set()
    for i, item in enumerate(items):
        name = item.get("name") or ""
        if not name:
            yield required(f"{at}[{i}].name")
        elif at == "spec.variables" and not _IDENTIFIER.fullmatch(name):
            yield bad(f"{at}[{i}].name", name, "must be a valid CEL identifier")
        elif name in seen:
            yield duplicate(f"{at}[{i}].name", name)
        seen.add(name)
        if not str(item.get("expression") or "").strip():
            yield required(f"{at}[{i}].expression", "expression is not specified")


def _validation(validation: Json, at: str) -> Iterator[Cause]:
    if not str(validation.get("expression") or "").strip():
        yield required(f"{at}.expression", "expression is not specified")
    message = str(validation.get("message") or "")
    if "\n" in message.strip():
        yield bad(f"{at}.message", message, "must not contain line breaks")
    if validation.get("reason") not in (None, "", *_REASONS):
        yield unsupported(f"{at}.reason", validation["reason"], _REASONS)


class BindingStrategy(_Strategy):
    """Bindings."""

    def default(self, new: Json, call: Call) -> None:
        """Say what is matched."""
        if (new.get("spec") or {}).get("matchResources") is not None:
            _default_match(new["spec"]["matchResources"])

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check policy, parameters and actions."""
        return [*_binding(new.get("spec") or {})]


def _binding(spec: Json) -> Iterator[Cause]:
    if not spec.get("policyName"):
        yield required("spec.policyName")
    ref = spec.get("paramRef")
    if ref is not None:
        if ref.get("name") and ref.get("selector") is not None:
            for key in ("name", "selector"):
                yield forbidden(f"spec.paramRef.{key}", "name and selector are mutually exclusive")
        if not ref.get("parameterNotFoundAction"):
            yield required("spec.paramRef.parameterNotFoundAction")
    actions = spec.get("validationActions") or []
    if not actions:
        yield required("spec.validationActions", "at least one validation action is required")
    for i, action in enumerate(actions):
        if action not in _ACTIONS:
            yield unsupported(f"spec.validationActions[{i}]", action, _ACTIONS)
        elif action in actions[:i]:
            yield duplicate(f"spec.validationActions[{i}]", action)
    if "Deny" in actions and "Warn" in actions:
        why = "must not contain both Deny and Warn (repeating the same validation failure information in the API response"
        yield bad("spec.validationActions", actions, f"{why} and headers serves no purpose)")
