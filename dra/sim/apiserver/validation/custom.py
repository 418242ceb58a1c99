"""Checks of custom objects against their schema, and of definitions themselves.

CEL rules (`x-kubernetes-validations`) are not evaluated, but for `self == oldSelf`. Source: k8s.io/apiextensions-apiserver.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.fields import (
    bad,
    duplicate,
    required,
    show,
    too_long,
    too_many,
    unsupported,
)

Json = dict[str, Any]

_UNCHECKED = (
    "some validation rules were not checked because the object was invalid; correct the existing errors to "
    "complete validation"
)
_BLOCKING = {
    "FieldValueRequired",
    "FieldValueNotSupported",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
}


def validate_object(obj: Json, schema: Json, scale: Json) -> list[Cause]:
    """Find what is wrong with a custom object."""
    body = {k: v for k, v in obj.items() if k not in {"apiVersion", "kind", "metadata"}}
    found = list(_value(body, {"type": "object", **schema}, "", root=True))
    path = (scale.get("specReplicasPath") or "").strip(".")
    if path:
        value: Any = obj
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            kind = "float64" if isinstance(value, float) else "string" if isinstance(value, str) else "bool"
            why = f".{path} accessor error: {value} is of the type {kind}, expected int64"
            found.append(bad(f".{path}", 0, why))
    if any(cause.reason in _BLOCKING for cause in found) and _has_rules(schema):
        found.append(bad("<nil>", None, _UNCHECKED))
    return found


def _has_rules(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "x-kubernetes-validations" in schema or any(_has_rules(v) for v in schema.values())
    return isinstance(schema, list) and any(_has_rules(v) for v in schema)


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "number": (int, float),
    "integer": (int,),
}


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number" if isinstance(value, float) else "integer"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _value(value: Any, schema: Json, path: str, *, root: bool = False) -> Iterator[Cause]:
    if value is None and (schema.get("nullable") or not schema.get("type")):
        return
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            why = f'{path} in body must be of type integer,string: "{_word(value)}"'
            yield Cause("FieldValueTypeInvalid", path, f'Invalid value: "{_word(value)}": {why}')
        return
    if wanted and not (
        isinstance(value, _TYPES[wanted]) and not (wanted != "boolean" and isinstance(value, bool))
    ):
        why = f'{path} in body must be of type {wanted}: "{_word(value)}"'
        yield Cause("FieldValueTypeInvalid", path, f'Invalid value: "{_word(value)}": {why}')
        return
    if isinstance(value, dict):
        yield from _object(value, schema, path)
    elif isinstance(value, list):
        yield from _list(value, schema, path)
    else:
        yield from _scalar(value, schema, path)
    yield from _enum(value, schema, path)


def _enum(value: Any, schema: Json, path: str) -> Iterator[Cause]:
    if schema.get("enum") and value not in schema["enum"]:
        yield unsupported(path, value, schema["enum"])


def _object(value: Json, schema: Json, path: str) -> Iterator[Cause]:
    prefix = f"{path}." if path else ""
    properties = schema.get("properties") or {}
    for key in schema.get("required") or []:
        if value.get(key) is None:
            yield required(f"{prefix}{key}")
    for key, item in value.items():
        known = properties.get(key, schema.get("additionalProperties"))
        if isinstance(known, dict) and not (item is None and key in (schema.get("required") or [])):
            yield from _value(item, known, f"{prefix}{key}")
    limit = schema.get("maxProperties")
    if limit is not None and len(value) > limit:
        yield too_many(path, len(value), limit)


def _list(value: list[Any], schema: Json, path: str) -> Iterator[Cause]:
    limit = schema.get("maxItems")
    if limit is not None and len(value) > limit:
        yield too_many(path, len(value), limit)
    least = schema.get("minItems")
    if least is not None and len(value) < least:
        yield bad(path, len(value), f"{path} in body should have at least {least} items")
    for i, item in enumerate(value):
        yield from _value(item, schema.get("items") or {}, f"{path}[{i}]")
    kind = schema.get("x-kubernetes-list-type")
    keys = schema.get("x-kubernetes-list-map-keys") or []
    seen: list[Any] = []
    for i, item in enumerate(value):
        identity = item if kind == "set" else None
        if kind == "map" and isinstance(item, dict):
            identity = {key: item[key] for key in keys if key in item}
        if identity is None or identity == {}:
            continue
        if identity in seen:
            yield duplicate(f"{path}[{i}]", identity)
        seen.append(identity)


def _scalar(value: Any, schema: Json, path: str) -> Iterator[Cause]:
    if isinstance(value, str):
        longest = schema.get("maxLength")
        if longest is not None and len(value) > longest:
            yield too_long(path, longest)
        shortest = schema.get("minLength")
        if shortest is not None and len(value) < shortest:
            yield bad(path, value, f"{path} in body should be at least {shortest} chars long")
        pattern = schema.get("pattern")
        fits = longest is None or len(value) <= longest
        if pattern and fits and re.search(pattern, value) is None:
            yield bad(path, value, f"{path} in body should match '{pattern}'")
    elif isinstance(value, (int, float)):
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None and value < low:
            yield bad(path, value, f"{path} in body should be greater than or equal to {show(low)}")
        if high is not None and value > high:
            yield bad(path, value, f"{path} in body should be less than or equal to {show(high)}")


def fixed_fields(new: Any, old: Any, schema: Json, path: str = "") -> list[Cause]:
    """Find changed fields that the rule `self == oldSelf` freezes (the one CEL rule that is evaluated)."""
    found: list[Cause] = []
    for rule in schema.get("x-kubernetes-validations") or []:
        plain = "".join(str(rule.get("rule", "")).split())
        if plain in {"self==oldSelf", "oldSelf==self"} and old is not None and new is not None and new != old:
            shown = new if isinstance(new, (str, int, float, bool)) else "object"
            found.append(bad(path, shown, rule.get("message") or f"failed rule: {rule.get('rule')}"))
    for key, known in (schema.get("properties") or {}).items():
        if isinstance(new, dict) and isinstance(old, dict) and key != "metadata":
            inner = f"{path}.{key}" if path else key
            found += fixed_fields(new.get(key), old.get(key), known, inner)
    return found


def validate_definition(obj: Json) -> list[Cause]:
    """Find what is wrong with a definition."""
    spec = obj.get("spec") or {}
    names = spec.get("names") or {}
    found: list[Cause] = []
    wanted = f"{names.get('plural')}.{spec.get('group')}"
    if obj["metadata"].get("name") != wanted:
        found.append(
            bad("metadata.name", obj["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
        )
    if spec.get("scope") not in {"Namespaced", "Cluster"}:
        found.append(unsupported("spec.scope", spec.get("scope") or "", ["Cluster", "Namespaced"]))
    versions = spec.get("versions") or []
    if sum(1 for v in versions if v.get("storage")) != 1:
        found.append(
            bad(
                "spec.versions",
                json.dumps(versions)[:0],
                "must have exactly one version marked as storage version",
            )
        )
    for i, version in enumerate(versions):
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            found.append(required(f"spec.versions[{i}].schema.openAPIV3Schema"))
            if version.get("selectableFields"):
                why = "may only be set when validations.schema is included"
                found.append(bad("spec.selectableFields", "", why))
            continue
        at = (
            "spec.validation.openAPIV3Schema"
            if len(versions) == 1
            else f"spec.versions[{i}].schema.openAPIV3Schema"
        )
        found += _untyped(schema, at, root=True)
    return found


def _untyped(schema: Json, path: str, *, root: bool = False) -> list[Cause]:
    found: list[Cause] = []
    loose = schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
    if not schema.get("type") and not loose:
        word = "at the root" if root else "for specified object fields"
        found.append(required(f"{path}.type", f"must not be empty {word}"))
    for key, value in (schema.get("properties") or {}).items():
        found += _untyped(value, f"{path}.properties[{key}]")
    if isinstance(schema.get("items"), dict):
        found += _untyped(schema["items"], f"{path}.items")
    if isinstance(schema.get("additionalProperties"), dict):
        found += _untyped(schema["additionalProperties"], f"{path}.additionalProperties")
    return found
