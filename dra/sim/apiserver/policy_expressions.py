"""The expressions of a ValidatingAdmissionPolicy, compiled in the environment that a real server gives them.

Not there: `authorizer`. Source: k8s.io/apiserver/pkg/admission/plugin/cel (variables, their types, composition).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dra.cel import CelCompileError
from dra.cel import types as t
from dra.cel.checker import every_node
from dra.cel.expression import Expression, compile_expression
from dra.cel.tree import Ident, Select
from dra.cel.types import CelType, declared_name

Json = dict[str, Any]
Compiled = Expression | CelCompileError


def _struct(name: str) -> CelType:
    return CelType("struct", f"kubernetes.{name}")


_STRINGS = t.map_of(t.STRING, t.STRING)
_LISTED = t.list_of(t.STRING)
STRUCTS: Mapping[str, Mapping[str, CelType]] = {
    "kubernetes.GroupVersionKind": {"group": t.STRING, "version": t.STRING, "kind": t.STRING},
    "kubernetes.GroupVersionResource": {"group": t.STRING, "version": t.STRING, "resource": t.STRING},
    "kubernetes.UserInfo": {
        "username": t.STRING, "uid": t.STRING, "groups": _LISTED, "extra": t.map_of(t.STRING, _LISTED),
    },
    "kubernetes.AdmissionRequest": {
        "kind": _struct("GroupVersionKind"), "resource": _struct("GroupVersionResource"), "subResource": t.STRING,
        "requestKind": _struct("GroupVersionKind"), "requestResource": _struct("GroupVersionResource"),
        "requestSubResource": t.STRING, "name": t.STRING, "namespace": t.STRING,
        "operation": t.STRING, "userInfo": _struct("UserInfo"), "dryRun": t.BOOL, "options": t.DYN,
    },
    "kubernetes.NamespaceMetadata": {
        "name": t.STRING, "generateName": t.STRING, "namespace": t.STRING, "labels": _STRINGS, "annotations": _STRINGS,
        "UID": t.STRING, "creationTimestamp": t.TIMESTAMP, "deletionGracePeriodSeconds": t.INT,
        "deletionTimestamp": t.TIMESTAMP, "generation": t.INT, "resourceVersion": t.STRING, "finalizers": _LISTED,
    },
    "kubernetes.NamespaceSpec": {"finalizers": _LISTED},
    "kubernetes.NamespaceStatus": {"phase": t.STRING},
    "kubernetes.Namespace": {
        "metadata": _struct("NamespaceMetadata"), "spec": _struct("NamespaceSpec"), "status": _struct("NamespaceStatus"),
    },
}  # fmt: skip
REQUEST, NAMESPACE, VARIABLES = _struct("AdmissionRequest"), _struct("Namespace"), _struct("variables")


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a policy, or a match condition: its name and what it compiles to."""

    name: str
    check: Compiled


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation: its text, what it and its messageExpression compile to."""

    raw: Json
    check: Compiled
    message: Compiled | None


@dataclass(slots=True)
class PolicyExpressions:
    """All expressions of a policy."""

    conditions: list[Variable] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    validations: list[Validation] = field(default_factory=list)
    # What cannot be compiled: its field, its text, why.
    problems: list[tuple[str, str, CelCompileError]] = field(default_factory=list)


def expressions_of(spec: Json) -> PolicyExpressions:
    """Compile the expressions of a policy's spec; once for each content."""
    return _compiled(json.dumps(spec, sort_keys=True))


@lru_cache(maxsize=256)
def _compiled(text: str) -> PolicyExpressions:
    spec: Json = json.loads(text)
    found = PolicyExpressions()
    names: dict[str, CelType] = {
        "object": t.DYN, "oldObject": t.DYN, "request": REQUEST, "namespaceObject": NAMESPACE,
    }  # fmt: skip
    if spec.get("paramKind"):
        names["params"] = t.DYN
    declared: dict[str, CelType] = {}
    structs = {**STRUCTS, VARIABLES.name: declared}

    def compiled(at: str, source: str, wanted: CelType | None) -> Compiled:
        try:
            return _one(source, names, structs, wanted)
        except CelCompileError as error:
            found.problems.append((at, source, error))
            return error

    for i, each in enumerate(spec.get("matchConditions") or []):
        check = compiled(f"spec.matchConditions[{i}].expression", each.get("expression") or "", t.BOOL)
        found.conditions.append(Variable(each.get("name") or "", check))
    if spec.get("variables"):
        names["variables"] = VARIABLES
    for i, each in enumerate(spec.get("variables") or []):
        name = each.get("name") or ""
        check = compiled(f"spec.variables[{i}].expression", each.get("expression") or "", None)
        found.variables[name] = Variable(name, check)
        declared[name] = check.kind if isinstance(check, Expression) else t.DYN
    for i, each in enumerate(spec.get("validations") or []):
        at = f"spec.validations[{i}]"
        check = compiled(f"{at}.expression", each.get("expression") or "", t.BOOL)
        text = each.get("messageExpression")
        message = compiled(f"{at}.messageExpression", text, t.STRING) if text else None
        found.validations.append(Validation(each, check, message))
    return found


def _one(
    source: str,
    names: Mapping[str, CelType],
    structs: Mapping[str, Mapping[str, CelType]],
    wanted: CelType | None,
) -> Expression:
    made = compile_expression(source, names, structs=structs, results=None)
    if wanted is not None and made.kind != wanted:
        raise CelCompileError(
            f"must evaluate to {declared_name(wanted)} but got {declared_name(made.kind)}", source=source
        )
    return made


def variables_in(expression: Expression) -> Iterator[str]:
    """Give the names of the policy's variables that an expression reads, in the order in which they stand there."""
    for node in every_node(expression.root):
        if isinstance(node, Select) and isinstance(node.operand, Ident) and node.operand.name == "variables":
            yield node.field
