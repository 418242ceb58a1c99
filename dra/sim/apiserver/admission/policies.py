"""ValidatingAdmissionPolicies: which ones a request must pass, and what they say to it.

Not there: `authorizer`, audit annotations (there is no audit log, so the action Audit does nothing), type checking in the
status. The order of several policies is that of their names; a real server has none.
Source: k8s.io/apiserver/pkg/admission/plugin/policy/{generic,matching,validating}.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dra.cel import CelCompileError, CelEvalError
from dra.cel.errors import Failure
from dra.cel.expression import native
from dra.sim.apiserver.admission.hooks import (
    ADMISSION,
    excluded,
    labels_fit,
    rules_version,
    selectors_fit,
)
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.policy_expressions import (
    NAMESPACE,
    STRUCTS,
    Compiled,
    PolicyExpressions,
    Validation,
    expressions_of,
    variables_in,
)
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import ApiFailure, forbidden

Json = dict[str, Any]

POLICIES = f"{ADMISSION}/validatingadmissionpolicies"
BINDINGS = f"{ADMISSION}/validatingadmissionpolicybindings"
# What one policy may cost for one request. Source: RuntimeCELCostBudget.
BUDGET = 10_000_000
_LONGEST_MESSAGE = 5 * 1024
_CODES = {"Forbidden": 403, "RequestEntityTooLarge": 413, "Unauthorized": 401}


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy whose rules fit a request, its bindings, and the version in which it sees the objects."""

    name: str
    spec: Json
    bindings: tuple[Json, ...]
    version: str


class Denial(NamedTuple):
    """A validation that is not met, or an error that counts as one. `binding` is empty for an error of the policy."""

    policy: str
    binding: str
    message: str
    reason: str = "Invalid"


class _Config(Exception):  # noqa: N818 - its argument is the denial that it comes to
    """A policy or a binding cannot be used as it stands."""


def policies_for(api: ServerState, call: Call, operation: str) -> list[Policy]:
    """Give the policies with a binding whose rules fit a request."""
    resource = call.resource
    if resource.key in {POLICIES, BINDINGS} or call.subresource not in {"", "status"}:
        return []
    if resource.verbs == ("create",):
        return []
    bound: dict[str, list[Json]] = {}
    for binding in api.storage.snapshot(BINDINGS)[1].values():
        bound.setdefault(binding["spec"].get("policyName") or "", []).append(binding)
    found = []
    for policy in api.storage.snapshot(POLICIES)[1].values():
        name, spec = policy["metadata"]["name"], policy["spec"]
        constraints = spec.get("matchConstraints") or {}
        version = rules_version(constraints.get("resourceRules"), constraints, call, operation)
        if name in bound and version is not None and not excluded(constraints, call, operation, version):
            found.append(Policy(name, spec, tuple(bound[name]), version))
    return found


def check(
    api: ServerState, call: Call, policy: Policy, request: Json, objects: tuple[Json | None, Json | None]
) -> list[Denial]:
    """Let a policy judge a request; gives what denies it, and adds the warnings of its bindings to the call.

    `request` is the AdmissionRequest, with `object` and `oldObject` in the policy's version; `objects` are the new and the
    old object as stored.
    """
    if not selectors_fit(api, policy.spec.get("matchConstraints") or {}, call, objects):
        return []
    denied: list[Denial] = []
    for binding in policy.bindings:
        spec, name = binding["spec"], binding["metadata"]["name"]
        limits = spec.get("matchResources") or {}
        rules = limits.get("resourceRules")
        fits = not rules or rules_version(rules, limits, call, request["operation"]) is not None
        if not fits or excluded(limits, call, request["operation"], policy.version):
            continue
        if not selectors_fit(api, limits, call, objects):
            continue
        try:
            found = [
                each
                for params in _params(api, call, policy, binding)
                for each in _Judgement(policy, name, _values(api, call, request, params)).denials()
            ]
        except _Config as error:
            if policy.spec.get("failurePolicy") != "Ignore":
                denied.append(error.args[0])
            continue
        actions = spec.get("validationActions") or []
        for each in found:
            if "Deny" in actions:
                denied.append(each)
            if "Warn" in actions:
                call.warn(
                    f"Validation failed for ValidatingAdmissionPolicy '{policy.name}' with binding '{name}': {each.message}"
                )
    return denied


def failure_of(call: Call, name: str, denial: Denial) -> ApiFailure:
    """Give the answer to a request that a policy denies."""
    bound = f" with binding '{denial.binding}'" if denial.binding else ""
    text = f"ValidatingAdmissionPolicy '{denial.policy}'{bound} denied request: {denial.message}"
    failure = forbidden(call.resource.plural, call.resource.group, name, text)
    failure.code, failure.reason = _CODES.get(denial.reason, 422), denial.reason
    assert failure.details is not None
    failure.details["causes"] = [{"message": text}]
    return failure


def _values(api: ServerState, call: Call, request: Json, params: Json | None) -> Json:
    about = {key: value for key, value in request.items() if key not in {"object", "oldObject", "uid"}}
    namespace = api.storage.get("/namespaces", ("", call.namespace)) if call.resource.namespaced else None
    return {
        "object": native(request.get("object")),
        "oldObject": native(request.get("oldObject")),
        "request": native(about),
        "namespaceObject": None if namespace is None else native(namespace, NAMESPACE, STRUCTS),
        "params": native(params),
    }


def _params(api: ServerState, call: Call, policy: Policy, binding: Json) -> list[Json | None]:
    """Give the parameter objects with which a binding has its policy evaluated; one None where it has none.

    Raises:
        _Config: there are none and must be, or their kind is unknown.
    """
    kind, ref = policy.spec.get("paramKind"), binding["spec"].get("paramRef")
    if not kind:
        return [None]
    group, _, version = kind["apiVersion"].rpartition("/")
    resource = api.registry.by_kind(group, kind["kind"])
    if resource is None or version not in resource.versions:
        shown = f"{group}/{version}, Kind={kind['kind']}"
        text = f"failed to configure policy: failed to find resource referenced by paramKind: '{shown}'"
        raise _Config(Denial(policy.name, "", text))
    if not ref:
        return [None]
    within = (ref.get("namespace") or call.namespace) if resource.namespaced else ""
    listed = [obj for key, obj in api.storage.snapshot(resource.key)[1].items() if key[0] == within]
    if ref.get("name"):
        found = [obj for obj in listed if obj["metadata"]["name"] == ref["name"]]
    else:
        labels = [(obj, (obj["metadata"].get("labels") or {})) for obj in listed]
        found = [obj for obj, own in labels if labels_fit(ref.get("selector") or {}, own)]
    if not found and ref.get("parameterNotFoundAction") == "Deny":
        text = "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction"
        raise _Config(Denial(policy.name, binding["metadata"]["name"], text))
    return list(found)


@dataclass(slots=True)
class _Judgement:
    """One evaluation of a policy: its variables are worked out when an expression first reads them."""

    policy: Policy
    binding: str
    values: Json
    left: int = BUDGET
    _variables: Json = field(default_factory=dict)

    def denials(self) -> Iterator[Denial]:
        """Give what is not met; nothing where a match condition leaves the request out."""
        expressions = expressions_of(self.policy.spec)
        self.values["variables"] = self._variables
        matched = self._matches(expressions)
        if matched is not True:
            if matched:
                yield from self._error(matched)
            return
        for validation in expressions.validations:
            try:
                met = self._evaluate(validation.check, expressions)
            except (CelEvalError, CelCompileError) as error:
                text = str(validation.raw.get("expression") or "")
                yield from self._error(f"expression '{text}' resulted in error: {error.message}")
                continue
            if met is not True:
                reason = validation.raw.get("reason") or "Invalid"
                yield Denial(self.policy.name, self.binding, self._message(validation, expressions), reason)

    def _matches(self, expressions: PolicyExpressions) -> bool | str:
        """Tell whether all match conditions are true; the error of the first that fails where none is false."""
        failed = ""
        for raw, condition in zip(
            self.policy.spec.get("matchConditions") or [], expressions.conditions, strict=True
        ):
            try:
                if self._evaluate(condition.check, expressions) is not True:
                    return False
            except (CelEvalError, CelCompileError) as error:
                failed = failed or f"expression '{raw['expression']}' resulted in error: {error.message}"
        return failed or True

    def _error(self, text: str) -> Iterator[Denial]:
        if self.policy.spec.get("failurePolicy") != "Ignore":
            yield Denial(self.policy.name, self.binding, text)

    def _message(self, validation: Validation, expressions: PolicyExpressions) -> str:
        if validation.message is not None:
            try:
                value = self._evaluate(validation.message, expressions)
            except (CelEvalError, CelCompileError):
                value = None
            if isinstance(value, str):
                text = value.strip()
                if text and "\n" not in text and len(text.encode()) <= _LONGEST_MESSAGE:
                    return text
        message = str(validation.raw.get("message") or "").strip()
        return message or f"failed expression: {str(validation.raw.get('expression') or '').strip()}"

    def _evaluate(self, compiled: Compiled, expressions: PolicyExpressions) -> Any:
        """Give the value of an expression.

        Raises:
            CelCompileError, CelEvalError: it does not compile, or fails.
        """
        if isinstance(compiled, CelCompileError):
            raise compiled
        for name in variables_in(compiled):
            self._work_out(name, expressions)
        value, cost = compiled.evaluate(self.values)
        self.left -= cost
        if self.left < 0:
            text = (
                "validation failed due to running out of cost budget, no further validation rules will be run"
            )
            raise CelEvalError(text, error_class="cost_limit")
        return value

    def _work_out(self, name: str, expressions: PolicyExpressions) -> None:
        if name in self._variables or name not in expressions.variables:
            return
        try:
            self._variables[name] = self._evaluate(expressions.variables[name].check, expressions)
        except (CelEvalError, CelCompileError) as error:
            text = f'composited variable "{name}" fails to evaluate: {error.message}'
            self._variables[name] = Failure("variable", text)
