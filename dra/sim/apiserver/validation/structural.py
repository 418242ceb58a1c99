"""Schemas of custom resources: whether they are structural, their defaults and their rules.

Source: k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation and pkg/apiserver/schema (structural schemas).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import Findings
from dra.api.rules.fields import bad, duplicate, forbidden, required, unsupported
from dra.cel import CelCompileError
from dra.cel.expression import Expression
from dra.cel.regex import RegexProblem, compile_pattern
from dra.sim.apiserver.cel import explain
from dra.sim.apiserver.custom import prune
from dra.sim.apiserver.validation.custom import validate_value
from dra.sim.apiserver.validation.custom_costs import Costs, children_factor, sized
from dra.sim.apiserver.validation.custom_rules import RULES, Node, Rule, compile_rules

Json = dict[str, Any]

_TYPES = ("array", "boolean", "integer", "number", "object", "string")
_WORD_LIST = (
    "$ref $schema additionalItems additionalProperties allOf anyOf default definitions dependencies description enum example"
    " exclusiveMaximum exclusiveMinimum externalDocs format id items maxItems maxLength maxProperties maximum minItems"
    " minLength minProperties minimum multipleOf not nullable oneOf pattern patternProperties properties required title type"
    " uniqueItems x-kubernetes-embedded-resource x-kubernetes-int-or-string x-kubernetes-list-map-keys"
    " x-kubernetes-list-type x-kubernetes-map-type x-kubernetes-preserve-unknown-fields x-kubernetes-validations"
)
_WORDS = frozenset(_WORD_LIST.split())
_RULE_WORDS = frozenset({"rule", "message", "messageExpression", "reason", "fieldPath", "optionalOldSelf"})
_NEVER = ("$ref", "definitions", "dependencies", "patternProperties", "additionalItems", "id", "$schema")
_LIST_TYPES, _MAP_TYPES = ("atomic", "set", "map"), ("atomic", "granular")
_REASONS = ("FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired")


def unknown_words(definition: Any, findings: Findings) -> None:
    """Find words in the schemas of a definition that no schema has."""
    spec = definition.get("spec") if isinstance(definition, dict) else None
    versions = spec.get("versions") if isinstance(spec, dict) else None
    for i, version in enumerate(versions if isinstance(versions, list) else []):
        schema = version.get("schema") if isinstance(version, dict) else None
        if isinstance(schema, dict):
            path = f"spec.versions[{i}].schema.openAPIV3Schema"
            _unknown(schema.get("openAPIV3Schema"), path, findings)


def _unknown(schema: Any, path: str, findings: Findings) -> None:
    if not isinstance(schema, dict):
        return
    for word in schema:
        if word not in _WORDS:
            findings.unknown(f"{path}.{word}")
    for i, rule in enumerate(schema.get(RULES) or []):
        for word in rule if isinstance(rule, dict) else ():
            if word not in _RULE_WORDS:
                findings.unknown(f"{path}.{RULES}[{i}].{word}")
    for below, at in _below(schema, path, dotted=True):
        _unknown(below, at, findings)


def _below(schema: Json, path: str, *, dotted: bool = False) -> Iterator[tuple[Any, str]]:
    """Give the schemas inside a schema, with their paths."""
    properties = schema.get("properties")
    for name, known in properties.items() if isinstance(properties, dict) else ():
        yield known, f"{path}.properties.{name}" if dotted else f"{path}.properties[{name}]"
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            yield schema[word], f"{path}.{word}"


def schema_findings(schema: Json, path: str) -> list[Cause]:
    """Find what is wrong with a schema."""
    found = list(_structural(schema, path, root=True))
    return found or list(_rules(schema, path))


def _structural(schema: Json, path: str, *, root: bool = False) -> Iterator[Cause]:
    """Find where a schema is not structural."""
    kind = schema.get("type") or ""
    loose = schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
    if not kind and not loose:
        word = "at the root" if root else "for specified object fields"
        yield required(f"{path}.type", f"must not be empty {word}")
    elif kind and kind not in _TYPES:
        yield unsupported(f"{path}.type", kind, _TYPES)
    if root and kind and kind != "object":
        yield bad(f"{path}.type", kind, "must be object at the root")
    for word in _NEVER:
        if schema.get(word):
            yield forbidden(f"{path}.{word}", f"{word} is not supported")
    if schema.get("uniqueItems"):
        yield forbidden(
            f"{path}.uniqueItems",
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        )
    if schema.get("properties") and isinstance(schema.get("additionalProperties"), dict):
        yield forbidden(
            f"{path}.additionalProperties", "additionalProperties and properties are mutual exclusive"
        )
    if root and schema.get("additionalProperties"):
        yield forbidden(f"{path}.additionalProperties", "must not be used at the root")
    yield from _list_schema(schema, path)
    if schema.get("x-kubernetes-embedded-resource"):
        yield from _embedded(schema, path)
    yield from _conditions(schema, path)
    if schema.get("x-kubernetes-map-type") not in (None, *_MAP_TYPES):
        yield unsupported(f"{path}.x-kubernetes-map-type", schema["x-kubernetes-map-type"], _MAP_TYPES)
    if root and isinstance((schema.get("properties") or {}).get("metadata"), dict):
        yield from _metadata(schema["properties"]["metadata"], f"{path}.properties[metadata]")
    if isinstance(schema.get("pattern"), str):
        try:
            compile_pattern(schema["pattern"])
        except RegexProblem as error:
            yield bad(
                f"{path}.pattern",
                schema["pattern"],
                f"must be a valid regular expression, but isn't: {error}",
            )
    yield from _default(schema, path)
    for below, at in _below(schema, path):
        if not isinstance(below, dict):
            yield bad(at, below, "must be an object")
        else:
            yield from _structural(below, at)


def _list_schema(schema: Json, path: str) -> Iterator[Cause]:
    items, keys = schema.get("items"), schema.get("x-kubernetes-list-map-keys") or []
    list_type, kind = schema.get("x-kubernetes-list-type"), schema.get("type") or ""
    if isinstance(items, list):
        yield forbidden(f"{path}.items", "items must be a schema object and not an array")
        return
    if kind == "array" and not isinstance(items, dict):
        yield required(f"{path}.items", "must be specified")
        return
    if list_type not in (None, *_LIST_TYPES):
        yield unsupported(f"{path}.x-kubernetes-list-type", list_type, _LIST_TYPES)
    elif list_type and kind != "array":
        yield bad(f"{path}.type", kind, "must be array if x-kubernetes-list-type is specified")
    if list_type != "map" and keys:
        why = "must be map if x-kubernetes-list-map-keys is non-empty"
        yield required(f"{path}.x-kubernetes-list-type", why)
    if list_type == "map":
        yield from _map_list(items, keys, path)
    if list_type == "set" and isinstance(items, dict):
        atomic = (
            items.get("x-kubernetes-map-type") == "atomic" or items.get("x-kubernetes-list-type") == "atomic"
        )
        word = {"object": "map", "array": "list"}.get(items.get("type") or "")
        if word and not atomic:
            why = "must be atomic as item of a list with x-kubernetes-list-type=set"
            given = items.get(f"x-kubernetes-{word}-type")
            yield bad(f"{path}.items.x-kubernetes-{word}-type", given, why)


def _map_list(items: Any, keys: list[str], path: str) -> Iterator[Cause]:
    if not keys:
        yield required(
            f"{path}.x-kubernetes-list-map-keys", "must not be empty if x-kubernetes-list-type is map"
        )
    if not isinstance(items, dict):
        yield required(f"{path}.items", "must have a schema if x-kubernetes-list-type is map")
        return
    if items.get("type") != "object":
        why = "must be object if parent array's x-kubernetes-list-type is map"
        yield bad(f"{path}.items.type", items.get("type") or "", why)
    properties, needed = items.get("properties") or {}, items.get("required") or []
    if any(key not in properties for key in keys):
        yield bad(f"{path}.x-kubernetes-list-map-keys", keys, "entries must all be names of item properties")
    for i, key in enumerate(keys):
        if keys.index(key) != i:
            yield duplicate(f"{path}.x-kubernetes-list-map-keys[{i}]", key)
        if key in properties and key not in needed and "default" not in properties[key]:
            why = "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property"
            yield required(f"{path}.items.properties[{key}].default", why)


def _embedded(schema: Json, path: str) -> Iterator[Cause]:
    if not schema.get("properties") and not schema.get("x-kubernetes-preserve-unknown-fields"):
        why = (
            "must not be empty if x-kubernetes-embedded-resource is true without "
            "x-kubernetes-preserve-unknown-fields"
        )
        yield required(f"{path}.properties", why)


# What may stand in `anyOf` and its like only at the place itself: there are conditions alone.
_SHAPE = ("type", "default", "title", "description", "nullable", RULES)


def _conditions(schema: Json, path: str) -> Iterator[Cause]:
    both = [{"type": "integer"}, {"type": "string"}]
    for word in ("allOf", "anyOf", "oneOf"):
        for i, each in enumerate(schema.get(word) or []):
            if not isinstance(each, dict):
                yield bad(f"{path}.{word}[{i}]", each, "must be an object")
                continue
            allowed = schema.get("x-kubernetes-int-or-string") and schema[word] == both
            for name in _SHAPE:
                if (
                    each.get(name)
                    and not (allowed and name == "type")
                    and not (word == "allOf" and name == RULES)
                ):
                    yield forbidden(f"{path}.{word}[{i}].{name}", "must be empty to be structural")
    inner = schema.get("not")
    for name in _SHAPE:
        if isinstance(inner, dict) and inner.get(name):
            yield forbidden(f"{path}.not.{name}", "must be empty to be structural")


def _metadata(schema: Json, path: str) -> Iterator[Cause]:
    for word in schema:
        if word not in {"type", "description", "properties"}:
            yield forbidden(
                path,
                "must not specify anything other than name and generateName, but metadata is implicitly specified",
            )
            return
    for name in schema.get("properties") or {}:
        if name not in {"name", "generateName"}:
            yield forbidden(
                path,
                "must not specify anything other than name and generateName, but metadata is implicitly specified",
            )
            return


def _default(schema: Json, path: str) -> Iterator[Cause]:
    if "default" not in schema:
        return
    without = {key: value for key, value in schema.items() if key != "default"}
    unknown = Findings()
    shaped = prune(schema["default"], without, unknown)
    if unknown.problems:
        yield bad(f"{path}.default", schema["default"], "must not have unknown fields")
        return
    for cause in validate_value(shaped, without):
        yield Cause(cause.reason, f"{path}.default{'.' + cause.field if cause.field else ''}", cause.detail)


# -- rules -------------------------------------------------------------------------------------------------------


def _untyped_rules(schema: Json, path: str) -> Iterator[Cause]:
    """Find rules on values of which nothing is known."""
    if schema.get(RULES) and sized(schema) is None:
        why = (
            "internal error: failed to construct type information for x-kubernetes-validations rules: unable to convert "
            "structural schema to CEL declarations"
        )
        yield Cause("InternalError", f"{path}.{RULES}", f"Internal error: {why}")
    for below, at in _below(schema, path):
        yield from _untyped_rules(below, at)


def _rules(schema: Json, path: str) -> Iterator[Cause]:
    yield from _untyped_rules(schema, path)
    root = compile_rules(schema).root
    if root is not None:
        costs = Costs()
        yield from _NodeRules(costs).findings(root, Place(path, root=True))
        yield from costs.total(path)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a schema stands: `times`: how many values it may have in one object (None: any number); `lost`: the schema
    below which values cannot be compared with earlier ones, empty if they can.
    """

    path: str
    times: int | None = 1
    lost: str = ""
    root: bool = False

    def below(self, node: Node, step: str, *, loses: bool) -> Place:
        """Give the place of a schema inside."""
        factor = children_factor(node.schema)
        times = None if factor is None or self.times is None else self.times * factor
        return Place(f"{self.path}.{step}", times, self.lost or (self.path if loses else ""))


def schema_at(schema: Json, path: str) -> Json | None:
    """Give the schema that a path of fields leads to (`.a.b`, `.a['b']`), None if it leads nowhere."""
    here: Any = schema
    while path:
        match = _STEP.match(path)
        if match is None or not isinstance(here, dict):
            return None
        name = match[1] or match[2].replace("\\'", "'").replace("\\\\", "\\")
        if here.get("properties"):
            here = here["properties"].get(name)
        else:
            extra = here.get("additionalProperties")
            here = extra if isinstance(extra, dict) else None
        path = path[match.end() :]
    return here if isinstance(here, dict) else None


_STEP = re.compile(r"\.([^.\[\]]+)|\['((?:[^'\\]|\\.)*)'\]")


class _NodeRules:
    """Walks the rules of a schema."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def findings(self, node: Node, place: Place) -> Iterator[Cause]:
        sizes = sized(node.schema, root=place.root)
        for i, rule in enumerate(node.rules):
            path = rule.raw.get("fieldPath")
            if path and schema_at(node.schema, str(path)) is None:
                yield bad(f"{place.path}.{RULES}[{i}].fieldPath", path, "must be a valid path")
        for i, rule in enumerate(node.rules):
            at = f"{place.path}.{RULES}[{i}]"
            yield from _rule(rule, at)
            if rule.uses_old and place.lost:
                why = (
                    f"oldSelf cannot be used on the uncorrelatable portion of the schema within {place.lost}"
                )
                yield bad(f"{at}.rule", rule.raw.get("rule"), why)
            for expression, word in ((rule.check, "rule"), (rule.message, "messageExpression")):
                if isinstance(expression, Expression) and sizes is not None:
                    yield from self._costs.add(
                        expression, sizes, f"{at}.{word}", times=place.times, word=word
                    )
        for name, below in node.properties.items():
            step = f"properties[{name}]"
            yield from self.findings(below, place.below(node, step, loses=False))
        if node.items is not None:
            yield from self.findings(node.items, place.below(node, "items", loses=node.list_keys is None))
        if node.additional is not None:
            step = "additionalProperties"
            yield from self.findings(node.additional, place.below(node, step, loses=False))
        for i, below in enumerate(node.all_of):
            yield from self.findings(below, replace(place, path=f"{place.path}.allOf[{i}]"))


def _rule(rule: Rule, at: str) -> Iterator[Cause]:
    raw = rule.raw
    text = str(raw.get("rule") or "")
    if not text.strip():
        yield required(f"{at}.rule", "rule is not specified")
        return
    for word, outcome in (("rule", rule.check), ("messageExpression", rule.message)):
        if isinstance(outcome, CelCompileError):
            wrong_type = "must evaluate to" in outcome.message
            wanted = "bool" if word == "rule" else "string"
            named = "cel expression" if word == "rule" else word
            why = f"{named} must evaluate to a {wanted}" if wrong_type else explain(outcome)
            yield Cause("FieldValueInvalid", f"{at}.{word}", f"Invalid value: {_as_go(raw)}: {why}")
    message = raw.get("message")
    if isinstance(message, str) and message and not message.strip():
        yield bad(f"{at}.message", message, "must be non-empty if specified")
    if isinstance(message, str) and "\n" in message.strip():
        yield bad(f"{at}.message", message, "must not contain line breaks")
    if not message and "\n" in text.strip():
        yield required(f"{at}.message", "message must be specified if rule contains line breaks")
    if raw.get("reason") not in (None, *_REASONS):
        yield unsupported(f"{at}.reason", raw["reason"], _REASONS)


def _as_go(raw: Json) -> str:
    """Give a rule as the server shows it: the JSON of its internal struct, with the escapes of Go."""
    shown = {
        "Rule": raw.get("rule") or "", "Message": raw.get("message") or "",
        "MessageExpression": raw.get("messageExpression") or "", "Reason": raw.get("reason"),
        "FieldPath": raw.get("fieldPath") or "", "OptionalOldSelf": raw.get("optionalOldSelf"),
    }  # fmt: skip
    text = json.dumps(shown, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
