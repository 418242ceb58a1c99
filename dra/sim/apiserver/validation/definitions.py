"""Checks of CustomResourceDefinitions: names, versions, structural schemas, defaults, rules.

Source: k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation and pkg/apiserver/schema (structural schemas).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import Findings
from dra.api.rules.dns import dns_label_error, dns_subdomain_error
from dra.api.rules.fields import bad, duplicate, forbidden, immutable, required, unsupported
from dra.cel import CelCompileError
from dra.cel.regex import RegexProblem, compile_pattern
from dra.sim.apiserver.cel import explain
from dra.sim.apiserver.validation.custom import validate_value
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
_LIST_TYPES, _MAP_TYPES = ("atomic", "set", "map"), ("granular", "atomic")
_REASONS = ("FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate")
_COLUMN_TYPES = ("boolean", "date", "integer", "number", "string")


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


def validate_definition(obj: Json, *, old: Json | None = None) -> list[Cause]:
    """Find what is wrong with a definition; `old` is the one before a change."""
    spec = obj.get("spec") or {}
    found = [*_names(obj, spec), *_versions(spec)]
    if old is not None:
        found += _changes(spec, old.get("spec") or {}, obj)
    versions = spec.get("versions") or []
    for i, version in enumerate(versions):
        at = _schema_path(spec, i)
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            found.append(required(f"spec.versions[{i}].schema.openAPIV3Schema"))
            if version.get("selectableFields"):
                why = "may only be set when validations.schema is included"
                found.append(bad("spec.selectableFields", "", why))
            continue
        if not isinstance(schema, dict):
            found.append(bad(at, schema, "must be an object"))
            continue
        wrong = list(_structural(schema, at, root=True))
        found += wrong
        if not wrong:
            found += _rules(schema, at)
        found += _columns(version, f"spec.versions[{i}]" if len(versions) > 1 else "spec")
    return found


def _schema_path(spec: Json, index: int) -> str:
    if len(spec.get("versions") or []) == 1:
        return "spec.validation.openAPIV3Schema"
    return f"spec.versions[{index}].schema.openAPIV3Schema"


def _names(obj: Json, spec: Json) -> Iterator[Cause]:
    names = spec.get("names") or {}
    wanted = f"{names.get('plural')}.{spec.get('group')}"
    if obj["metadata"].get("name") != wanted:
        yield bad("metadata.name", obj["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
    group = spec.get("group") or ""
    if not group:
        yield required("spec.group")
    elif dns_subdomain_error(group):
        yield bad("spec.group", group, str(dns_subdomain_error(group)))
    elif "." not in group:
        yield bad("spec.group", group, "should be a domain with at least one dot")
    if spec.get("scope") not in {"Namespaced", "Cluster"}:
        yield unsupported("spec.scope", spec.get("scope") or "", ["Cluster", "Namespaced"])
    for key in ("plural", "singular", "kind", "listKind"):
        value = names.get(key) or ""
        if not value:
            yield required(f"spec.names.{key}")
            continue
        # Kinds may have capital letters; otherwise they are labels too.
        error = dns_label_error(value.lower() if key in {"kind", "listKind"} else value)
        if error:
            yield bad(f"spec.names.{key}", value, error)
    if names.get("kind") and names.get("kind") == names.get("listKind"):
        yield bad("spec.names.listKind", names["listKind"], "kind and listKind may not be the same")
    for key in ("shortNames", "categories"):
        for i, value in enumerate(names.get(key) or []):
            if dns_label_error(value):
                yield bad(f"spec.names.{key}[{i}]", value, str(dns_label_error(value)))
    if spec.get("preserveUnknownFields"):
        yield bad(
            "spec.preserveUnknownFields",
            True,
            "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in "
            "spec.versions[*].schema instead",
        )


def _versions(spec: Json) -> Iterator[Cause]:
    versions = spec.get("versions") or []
    seen: set[str] = set()
    for i, version in enumerate(versions):
        name = version.get("name") or ""
        if name in seen:
            yield bad(f"spec.versions[{i}].name", name, "must be unique")
        seen.add(name)
        if dns_label_error(name):
            yield bad(f"spec.versions[{i}].name", name, str(dns_label_error(name)))
    if sum(1 for v in versions if v.get("storage")) != 1:
        yield bad("spec.versions", "", "must have exactly one version marked as storage version")
    conversion = spec.get("conversion") or {}
    if conversion.get("strategy") not in (None, "None", "Webhook"):
        yield unsupported("spec.conversion.strategy", conversion["strategy"], ["None", "Webhook"])


def _changes(spec: Json, before: Json, obj: Json) -> Iterator[Cause]:
    """Find changes of what is fixed once a definition is established."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    if not any(c.get("type") == "Established" and c.get("status") == "True" for c in conditions):
        return
    for field in ("scope", "group"):
        if spec.get(field) != before.get(field):
            yield immutable(f"spec.{field}", spec.get(field))
    for field in ("kind", "plural"):
        new, old = (spec.get("names") or {}).get(field), (before.get("names") or {}).get(field)
        if new != old:
            yield immutable(f"spec.names.{field}", new)
    names = {v.get("name") for v in spec.get("versions") or []}
    for i, stored in enumerate((obj.get("status") or {}).get("storedVersions") or []):
        if stored not in names:
            yield bad(
                f"status.storedVersions[{i}]", stored, "missing from spec.versions; "
                f"{stored} was previously a storage version, and must remain in spec.versions until a storage migration "
                "ensures no data remains persisted in it and removes it from status.storedVersions",
            )  # fmt: skip


def _columns(version: Json, at: str) -> Iterator[Cause]:
    for i, column in enumerate(version.get("additionalPrinterColumns") or []):
        path = f"{at}.additionalPrinterColumns[{i}]"
        if not column.get("name"):
            yield required(f"{path}.name")
        if column.get("type") not in _COLUMN_TYPES:
            why = f"must be one of {','.join(_COLUMN_TYPES)}"
            yield bad(f"{path}.type", column.get("type") or "", why)
        if not column.get("jsonPath"):
            yield required(f"{path}.jsonPath")
        elif not str(column["jsonPath"]).startswith("."):
            yield bad(f"{path}.jsonPath", column["jsonPath"], "is invalid: it must start with a dot")


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
    if schema.get("properties") and schema.get("additionalProperties") not in (None, False):
        yield forbidden(
            f"{path}.additionalProperties", "additionalProperties and properties are mutual exclusive"
        )
    if root and schema.get("additionalProperties"):
        yield forbidden(f"{path}.additionalProperties", "must not be used at the root")
    if kind == "array":
        yield from _list_schema(schema, path)
    elif schema.get("x-kubernetes-list-type") or schema.get("x-kubernetes-list-map-keys"):
        yield bad(f"{path}.type", kind, "must be array if x-kubernetes-list-type is specified")
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
    items = schema.get("items")
    if isinstance(items, list):
        yield forbidden(f"{path}.items", "items must be a schema object and not an array")
        return
    if not isinstance(items, dict):
        yield required(f"{path}.items", "must be specified")
        return
    list_type, keys = schema.get("x-kubernetes-list-type"), schema.get("x-kubernetes-list-map-keys") or []
    if list_type not in (None, *_LIST_TYPES):
        yield unsupported(f"{path}.x-kubernetes-list-type", list_type, _LIST_TYPES)
    if list_type != "map" and keys:
        yield forbidden(
            f"{path}.x-kubernetes-list-map-keys", "must be empty if x-kubernetes-list-type is not map"
        )
    if list_type == "map":
        if not keys:
            yield required(
                f"{path}.x-kubernetes-list-map-keys", "must not be empty if x-kubernetes-list-type is map"
            )
        if items.get("type") != "object":
            yield bad(
                f"{path}.items.type",
                items.get("type") or "",
                "must be object if parent array's x-kubernetes-list-type is map",
            )
        properties, needed = items.get("properties") or {}, items.get("required") or []
        for i, key in enumerate(keys):
            at = f"{path}.x-kubernetes-list-map-keys[{i}]"
            if keys.index(key) != i:
                yield duplicate(at, key)
            if key not in properties:
                yield bad(at, key, "must exist as a property")  # the server words it by the items' properties
            elif key not in needed and "default" not in properties[key]:
                yield required(
                    f"{path}.items.properties[{key}].default",
                    "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
                )


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
    for cause in validate_value(schema["default"], without):
        yield Cause(cause.reason, f"{path}.default{'.' + cause.field if cause.field else ''}", cause.detail)


# -- rules -------------------------------------------------------------------------------------------------------


def _rules(schema: Json, path: str) -> Iterator[Cause]:
    root = compile_rules(schema).root
    if root is not None:
        yield from _node_rules(root, path, correlatable=True, inside="")


def _node_rules(node: Node, path: str, *, correlatable: bool, inside: str) -> Iterator[Cause]:
    for i, rule in enumerate(node.rules):
        at = f"{path}.{RULES}[{i}]"
        yield from _rule(rule, at)
        if rule.uses_old and not correlatable:
            why = f"oldSelf cannot be used on the uncorrelatable portion of the schema within {inside}"
            yield bad(f"{at}.rule", rule.raw.get("rule"), why)
    for name, below in node.properties.items():
        at = f"{path}.properties[{name}]"
        yield from _node_rules(
            below, at, correlatable=correlatable and node.correlatable, inside=inside or path
        )
    if node.items is not None:
        mapped = node.list_keys is not None
        yield from _node_rules(
            node.items,
            f"{path}.items",
            correlatable=correlatable and mapped,
            inside=inside or ("" if mapped else path),
        )
    if node.additional is not None:
        at = f"{path}.additionalProperties"
        yield from _node_rules(
            node.additional, at, correlatable=correlatable and node.correlatable, inside=inside or path
        )
    for i, below in enumerate(node.all_of):
        yield from _node_rules(below, f"{path}.allOf[{i}]", correlatable=correlatable, inside=inside)


def _rule(rule: Rule, at: str) -> Iterator[Cause]:
    raw = rule.raw
    text = str(raw.get("rule") or "")
    if not text.strip():
        yield required(f"{at}.rule", "rule is not specified")
        return
    shown = {
        key: raw[key] for key in ("rule", "message", "messageExpression", "reason", "fieldPath") if key in raw
    }
    if isinstance(rule.check, CelCompileError):
        yield bad(f"{at}.rule", shown, explain(rule.check))
    if isinstance(rule.message, CelCompileError):
        yield bad(f"{at}.messageExpression", shown, explain(rule.message))
    message = raw.get("message")
    if isinstance(message, str) and message and not message.strip():
        yield bad(f"{at}.message", message, "message must be non-empty if specified")
    if isinstance(message, str) and "\n" in message.strip():
        yield bad(f"{at}.message", message, "message must not contain line breaks")
    if not message and "\n" in text.strip():
        yield required(f"{at}.message", "message must be specified if rule contains line breaks")
    if raw.get("reason") not in (None, *_REASONS):
        yield unsupported(f"{at}.reason", raw["reason"], _REASONS)
    if raw.get("fieldPath") and not str(raw["fieldPath"]).startswith((".", "[")):
        yield bad(f"{at}.fieldPath", raw["fieldPath"], f"expected [ or . but got: {raw['fieldPath']}")
