"""CEL rules of custom resources (`x-kubernetes-validations`), with the project's own CEL.

Not simulated: the equality of lists of type `set` and `map` without regard to their order. The cost at run time is limited as on a
real server, and estimated when a definition is created (`custom_costs`).
Source: k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel (rules, ratcheting, messages), k8s.io/apiserver/pkg/cel/common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.fields import bad, duplicate
from dra.cel import CelCompileError, CelEvalError
from dra.cel import types as t
from dra.cel.expression import Expression, compile_expression, escape, native
from dra.cel.types import CelType
from dra.cel.values import NONE, some

Json = dict[str, Any]
RULES = "x-kubernetes-validations"
# What all rules of one request may cost together.
BUDGET = 10_000_000
_LONGEST_MESSAGE = 5 * 1024
MISSING: Any = object()


class Types:
    """The types of a schema, each object a struct of its own."""

    def __init__(self) -> None:
        self.structs: dict[str, dict[str, CelType]] = {}

    def of(self, schema: Json, *, root: bool = False) -> CelType | None:
        """Give the type of values that a schema describes; None where expressions cannot see them."""
        if schema.get("x-kubernetes-int-or-string"):
            return t.DYN
        match schema.get("type"):
            case "object":
                return self._object(schema, root=root or bool(schema.get("x-kubernetes-embedded-resource")))
            case "array":
                items = self.of(schema.get("items") or {})
                return None if items is None else t.list_of(items)
            case "string":
                return _FORMATS.get(schema.get("format", ""), t.STRING)
            case "boolean":
                return t.BOOL
            case "integer":
                return t.INT
            case "number":
                return t.DOUBLE
        return None

    def _object(self, schema: Json, *, root: bool) -> CelType | None:
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            inner = self.of(extra)
            return None if inner is None else t.map_of(t.STRING, inner)
        fields: dict[str, CelType] = {}
        for name, known in (schema.get("properties") or {}).items():
            kind = self.of(known)
            if kind is not None and escape(name):
                fields[escape(name)] = kind
        if root:
            fields |= {"apiVersion": t.STRING, "kind": t.STRING, "metadata": self._struct(_METADATA)}
        return self._struct(fields)

    def _struct(self, fields: dict[str, CelType]) -> CelType:
        made = CelType("struct", f"object.{len(self.structs)}")
        self.structs[made.name] = fields
        return made


_FORMATS = {"byte": t.BYTES, "duration": t.DURATION, "date": t.TIMESTAMP, "date-time": t.TIMESTAMP}
_METADATA = {"name": t.STRING, "generateName": t.STRING}


@dataclass(slots=True)
class Rule:
    """One rule: `check` is what it compiles to, or why it does not."""

    raw: Json
    check: Expression | CelCompileError
    message: Expression | CelCompileError | None = None

    @property
    def uses_old(self) -> bool:
        """Whether the rule compares with the object before."""
        return isinstance(self.check, Expression) and "oldSelf" in self.check.names

    @property
    def optional_old(self) -> bool:
        """Whether the rule is evaluated even if there was nothing before."""
        return bool(self.raw.get("optionalOldSelf"))

    def text(self) -> str:
        """Give what the rule says of itself."""
        return str(self.raw.get("message") or self.raw.get("rule") or "").strip()


@dataclass(slots=True)
class Node:
    """A schema with its rules, and those below it. Only what has rules is there."""

    kind: CelType
    schema: Json = field(default_factory=dict)
    list_keys: tuple[str, ...] | None = None
    rules: list[Rule] = field(default_factory=list)
    properties: dict[str, Node] = field(default_factory=dict)
    items: Node | None = None
    additional: Node | None = None
    all_of: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class RuleTree:
    """All rules of one version of a definition."""

    root: Node | None
    structs: dict[str, dict[str, CelType]]


def compile_rules(schema: Json) -> RuleTree:
    """Compile the rules of a schema; one that does not compile is kept with its error."""
    types = Types()
    return RuleTree(_node(schema, types, types.of(schema, root=True)), types.structs)


def _node(schema: Json, types: Types, kind: CelType | None) -> Node | None:
    if kind is None:
        return None
    node = Node(kind, schema)
    if schema.get("x-kubernetes-list-type") == "map":
        node.list_keys = tuple(schema.get("x-kubernetes-list-map-keys") or ())
    node.rules = [_rule(raw, kind, types) for raw in schema.get(RULES) or [] if isinstance(raw, dict)]
    fields = types.structs.get(kind.name, {}) if kind.kind == "struct" else {}
    for name, known in (schema.get("properties") or {}).items():
        below = _node(known, types, fields.get(escape(name)) if escape(name) else types.of(known))
        if below is not None:
            node.properties[name] = below
    inner = kind.params[-1] if kind.params else None
    if kind.kind == "list":
        node.items = _node(schema.get("items") or {}, types, inner)
    if kind.kind == "map" and isinstance(schema.get("additionalProperties"), dict):
        node.additional = _node(schema["additionalProperties"], types, inner)
    for each in schema.get("allOf") or []:
        below = _node(each, types, kind)
        if below is not None:
            node.all_of.append(below)
    parts = (node.rules, node.properties, node.items, node.additional, node.all_of)
    return node if any(parts) else None


def _rule(raw: Json, kind: CelType, types: Types) -> Rule:
    old = t.optional_of(kind) if raw.get("optionalOldSelf") else kind
    variables = {"self": kind, "oldSelf": old}

    def compiled(source: str, result: CelType) -> Expression | CelCompileError:
        try:
            return compile_expression(source, variables, structs=types.structs, results=(result,))
        except CelCompileError as error:
            return error

    message = raw.get("messageExpression")
    return Rule(
        raw,
        compiled(str(raw.get("rule") or ""), t.BOOL),
        compiled(str(message), t.STRING) if message else None,
    )


class _OutOfBudget(Exception):  # noqa: N818
    """No further rules are evaluated."""


class RuleCheck:
    """Evaluates the rules on one object.

    Args:
        old: the object before, or MISSING.

    `ratcheted` holds what is wrong but was so before: a warning.
    """

    def __init__(self, tree: RuleTree, old: Any = MISSING) -> None:
        self._tree, self._old = tree, old
        self._left = BUDGET
        self.ratcheted: list[Cause] = []

    def findings(self, obj: Json) -> list[Cause]:
        """Give what the rules find wrong."""
        found: list[Cause] = []
        if self._tree.root is not None:
            with suppress(_OutOfBudget):
                self._visit(self._tree.root, obj, self._old, "", found, same=False)
        return found

    def _visit(self, node: Node, new: Any, old: Any, path: str, found: list[Cause], *, same: bool) -> None:
        """Walk a value. `same`: the nearest value that can be compared with an earlier one has not changed."""
        if new is None:
            return
        if old is not MISSING:
            same = old == new
        if node.rules:
            self._rules(node, new, old, path, found, same=same)
        for each in node.all_of:
            self._visit(each, new, old, path, found, same=False)
        if isinstance(new, list) and node.items is not None:
            for index, (item, before) in enumerate(_pairs(node, new, old)):
                self._visit(node.items, item, before, f"{path}[{index}]", found, same=same)
        if isinstance(new, dict):
            for key, value in new.items():
                below = node.properties.get(key) or node.additional
                if below is None:
                    continue
                before = old.get(key, MISSING) if isinstance(old, dict) else MISSING
                prefix = f"{path}.{key}" if path else key
                at = prefix if key in node.properties else f"{path}[{key}]"
                self._visit(below, value, before, at, found, same=same)

    def _rules(self, node: Node, new: Any, old: Any, path: str, found: list[Cause], *, same: bool) -> None:
        structs = self._tree.structs
        has_old = old is not MISSING and old is not None
        values = {"self": native(new, node.kind, structs)}
        before = native(old, node.kind, structs) if has_old else None
        for rule in node.rules:
            if isinstance(rule.check, CelCompileError):
                found.append(_failed(path, node, f"rule compile error: {rule.check.message}"))
                continue
            if rule.uses_old and not has_old and not rule.optional_old:
                continue
            values["oldSelf"] = (some(before) if has_old else NONE) if rule.optional_old else before
            cause = self._one(rule, node, values, path, new, found)
            if cause is None:
                continue
            if same and not rule.uses_old:
                self.ratcheted.append(cause)
            else:
                found.append(cause)

    def _one(
        self, rule: Rule, node: Node, values: dict[str, Any], path: str, new: Any, found: list[Cause]
    ) -> Cause | None:
        """Evaluate one rule; gives the finding if it is not met."""
        assert isinstance(rule.check, Expression)
        try:
            value, cost = rule.check.evaluate(values)
        except CelEvalError as error:
            if error.error_class == "cost_limit":
                text = f"'{error.message}': no further validation rules will be run due to call cost exceeds limit for rule"
                found.append(_failed(path, node, f"{text}: {rule.text()}"))
                raise _OutOfBudget from error
            if error.message.startswith("no such overload"):
                text = f"'{error.message}': call arguments did not match a supported operator, function or macro signature"
                found.append(_failed(path, node, f"{text} for rule: {rule.text()}"))
            else:
                found.append(_failed(path, node, f"{error.message} evaluating rule: {rule.text()}"))
            return None
        self._pay(cost, path, node, found)
        if value is True:
            return None
        at = path + rule.raw["fieldPath"] if rule.raw.get("fieldPath") else path
        return _reasoned(
            at.lstrip("."), new, self._message(rule, node, values, path, found), rule.raw.get("reason")
        )

    def _pay(self, cost: int, path: str, node: Node, found: list[Cause]) -> None:
        self._left -= cost
        if self._left < 0:
            text = (
                "validation failed due to running out of cost budget, no further validation rules will be run"
            )
            found.append(_failed(path, node, text))
            raise _OutOfBudget

    def _message(self, rule: Rule, node: Node, values: dict[str, Any], path: str, found: list[Cause]) -> str:
        if isinstance(rule.message, Expression):
            try:
                value, cost = rule.message.evaluate(values)
            except CelEvalError:
                value, cost = None, 0
            self._pay(cost, path, node, found)
            if isinstance(value, str):
                text = value.strip()
                if text and "\n" not in text and len(text.encode()) <= _LONGEST_MESSAGE:
                    return text
        return rule.text() if rule.raw.get("message") else f"failed rule: {rule.text()}"


def _pairs(node: Node, new: list[Any], old: Any) -> Iterator[tuple[Any, Any]]:
    """Give each item with the one it was before: only lists of type `map` tell which that is."""
    earlier: dict[tuple[str, ...], Any] = {}
    keys = node.list_keys

    def identity(item: Any) -> tuple[str, ...]:
        return tuple(repr(item.get(key)) for key in keys or ()) if isinstance(item, dict) else ()

    if keys and isinstance(old, list):
        earlier = {identity(item): item for item in old}
    for item in new:
        yield item, earlier.get(identity(item), MISSING) if keys else MISSING


def _failed(path: str, node: Node, detail: str) -> Cause:
    """A rule could not be evaluated: the type of the value stands where the value would."""
    return bad(path or "<nil>", node.schema.get("type") or "", detail)


def _invalid(path: str, value: Any, detail: str) -> Cause:
    """A value is wrong; lists and objects are not shown."""
    if isinstance(value, (dict, list)):
        return Cause("FieldValueInvalid", path or "<nil>", f"Invalid value: {detail}")
    return bad(path or "<nil>", value, detail)


def _reasoned(path: str, value: Any, detail: str, reason: str | None) -> Cause:
    match reason:
        case "FieldValueForbidden":
            return Cause(reason, path or "<nil>", f"Forbidden: {detail}")
        case "FieldValueRequired":
            return Cause(reason, path or "<nil>", f"Required value: {detail}")
        case "FieldValueDuplicate":
            return duplicate(path or "<nil>", value)
    return _invalid(path, value, detail)
