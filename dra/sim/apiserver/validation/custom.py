"""Checks of custom objects against their schema. Their CEL rules are in `custom_rules`.

Source: k8s.io/apiextensions-apiserver/pkg/apiserver/validation.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from datetime import date
from ipaddress import ip_address, ip_network
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
from dra.cel.errors import Failure
from dra.cel.functions.times import parse_duration, parse_timestamp
from dra.cel.regex import search
from dra.sim.apiserver.validation.custom_rules import MISSING, RuleCheck, RuleTree

Json = dict[str, Any]

_EXACT_DOUBLE = 2**53 - 1
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


def validate_value(value: Any, schema: Json) -> list[Cause]:
    """Find what is wrong with a value of a schema (a default)."""
    return list(_value(value, schema, ""))


def validate_object(
    obj: Json, schema: Json, scale: Json, tree: RuleTree, *, old: Any = MISSING
) -> tuple[list[Cause], list[Cause]]:
    """Give what is wrong with a custom object, and what is wrong but was so before.

    Args:
        obj: the object, pruned and defaulted.
        schema: the schema of its version.
        scale: the definition's scale subresource, empty if it has none.
        tree: the schema's rules.
        old: the object before a change.
    """
    body = {k: v for k, v in obj.items() if k not in {"apiVersion", "kind", "metadata"}}
    before = (
        MISSING
        if old is MISSING
        else {k: v for k, v in old.items() if k not in {"apiVersion", "kind", "metadata"}}
    )
    found, ratcheted = _ratchet(list(_value(body, {"type": "object", **schema}, "")), body, before)
    path = (scale.get("specReplicasPath") or "").strip(".")
    if path:
        value: Any = obj
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            kind = "float64" if isinstance(value, float) else "string" if isinstance(value, str) else "bool"
            why = f".{path} accessor error: {value} is of the type {kind}, expected int64"
            found.append(bad(f".{path}", 0, why))
    if any(cause.reason in _BLOCKING for cause in found):
        if tree.root is not None:
            found.append(bad("<nil>", None, _UNCHECKED))
        return found, ratcheted
    check = RuleCheck(tree, old)
    found += check.findings(obj)
    return found, [*ratcheted, *check.ratcheted]


def _ratchet(found: list[Cause], new: Json, old: Any) -> tuple[list[Cause], list[Cause]]:
    """Part the findings: new ones, and those about values that a change has left as they were."""
    if old is MISSING:
        return found, []
    kept = [cause for cause in found if not _unchanged(_path(cause.field), new, old)]
    return kept, [cause for cause in found if cause not in kept]


def _path(field: str) -> list[str | int]:
    return [int(index) if index else name for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", field)]


def _unchanged(path: list[str | int], new: Any, old: Any) -> bool:
    """Whether the value at a path, or one that holds it, is what it was. Items of lists are never followed."""
    for step in path:
        if new == old:
            return True
        if not (isinstance(step, str) and isinstance(new, dict) and isinstance(old, dict)):
            return False
        if step not in new or step not in old:
            return False
        new, old = new[step], old[step]
    return bool(new == old)


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


def _value(value: Any, schema: Json, path: str) -> Iterator[Cause]:
    if value is None and (schema.get("nullable") or not schema.get("type")):
        return
    wanted = schema.get("type")
    if wanted == "integer" and isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_DOUBLE:
        value = int(value)
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
        if wanted == "integer" and isinstance(value, float) and not value.is_integer():
            # The library checks numbers a second time, and says so without a field.
            yield bad("<nil>", "", f"Checked value must be of type integer (default format) in {path}")
        return
    if isinstance(value, dict):
        yield from _object(value, schema, path)
    elif isinstance(value, list):
        yield from _list(value, schema, path)
    else:
        yield from _scalar(value, schema, path)
    yield from _enum(value, schema, path)
    yield from _combined(value, schema, path)


def _combined(value: Any, schema: Json, path: str) -> Iterator[Cause]:
    """Check `allOf`, `anyOf`, `oneOf` and `not`, which in a structural schema hold conditions only.

    The library says without a field which of them is not met, and what the first alternative found.
    """
    choices = {
        word: [list(_value(value, each, path)) for each in schema.get(word) or []]
        for word in ("allOf", "anyOf", "oneOf")
    }
    good = {word: sum(1 for found in each if not found) for word, each in choices.items()}
    if good["allOf"] < len(choices["allOf"]):
        yield from (cause for found in choices["allOf"] for cause in found)
        more = "" if good["allOf"] else ". None validated"
        yield _unmet(path, f"must validate all the schemas (allOf){more}")
    if choices["anyOf"] and not good["anyOf"]:
        yield from choices["anyOf"][0]
        yield _unmet(path, "must validate at least one schema (anyOf)")
    if choices["oneOf"] and good["oneOf"] != 1:
        if not good["oneOf"]:
            yield from choices["oneOf"][0]
        more = f"Found {good['oneOf']} valid alternatives" if good["oneOf"] else "Found none valid"
        yield _unmet(path, f"must validate one and only one schema (oneOf). {more}")
    if isinstance(schema.get("not"), dict) and not list(_value(value, schema["not"], path)):
        yield _unmet(path, "must not validate the schema (not)")


def _unmet(path: str, why: str) -> Cause:
    return bad("<nil>", "", f'"{path}" {why}')


def _enum(value: Any, schema: Json, path: str) -> Iterator[Cause]:
    if schema.get("enum") and value not in schema["enum"]:
        yield unsupported(path, value, schema["enum"])


def _object(value: Json, schema: Json, path: str) -> Iterator[Cause]:
    prefix = f"{path}." if path else ""
    properties = schema.get("properties") or {}
    embedded = ["apiVersion", "kind"] if schema.get("x-kubernetes-embedded-resource") else []
    for key in (*(schema.get("required") or []), *embedded):
        if value.get(key) is None:
            yield required(f"{prefix}{key}")
    for key, item in value.items():
        known = properties.get(key, schema.get("additionalProperties"))
        if isinstance(known, dict) and not (item is None and key in (schema.get("required") or [])):
            yield from _value(item, known, f"{prefix}{key}")
    limit = schema.get("maxProperties")
    if limit is not None and len(value) > limit:
        yield too_many(path, len(value), limit)
    least = schema.get("minProperties")
    if least is not None and len(value) < least:
        yield bad(path, len(value), f"{path} in body should have at least {least} properties")


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
        if pattern and fits and not _matches(pattern, value):
            yield bad(path, value, f"{path} in body should match '{pattern}'")
        known = _FORMATS.get(schema.get("format", ""))
        if known is not None and not known(value):
            why = f"{path} in body must be of type {schema['format']}: {show(value)}"
            yield Cause("FieldValueTypeInvalid", path, f"Invalid value: {show(value)}: {why}")
    elif isinstance(value, (int, float)):
        low, high = schema.get("minimum"), schema.get("maximum")
        yield from _bounds(schema, path)
        if isinstance(value, int):
            # The library compares a whole number with the whole part of a limit.
            low, high = (limit if limit is None else int(limit) for limit in (low, high))
            bits = {"int32": 31, "int64": 63}.get(schema.get("format", ""))
            if bits and not -(1 << bits) <= value < 1 << bits:
                kind = f"integer with format {schema['format']}"
                yield bad("<nil>", "", f"Checked value must be of type {kind} in {path}")
        if low is not None and schema.get("exclusiveMinimum") and value <= low:
            yield bad(path, value, f"{path} in body should be greater than {show(low)}")
        elif low is not None and value < low:
            yield bad(path, value, f"{path} in body should be greater than or equal to {show(low)}")
        if high is not None and schema.get("exclusiveMaximum") and value >= high:
            yield bad(path, value, f"{path} in body should be less than {show(high)}")
        elif high is not None and value > high:
            yield bad(path, value, f"{path} in body should be less than or equal to {show(high)}")
        step = schema.get("multipleOf")
        if step and value % step:
            yield bad(path, value, f"{path} in body should be a multiple of {show(step)}")


def _bounds(schema: Json, path: str) -> Iterator[Cause]:
    """A real server reads bounds as doubles, and refuses every value where one of an integer is not exact."""
    for bound, said in (("minimum", "Minimum"), ("maximum", "Maximum")):
        if schema.get("type") == "integer" and abs(schema.get(bound) or 0) > _EXACT_DOUBLE:
            kind = schema.get("format") or "default"
            text = f'Invalid value: "": {said} boundary value must be of type integer with format {kind} in {path}'
            yield Cause("FieldValueInvalid", "<nil>", text)


def _matches(pattern: str, value: str) -> bool:
    """Whether a pattern is found, in time that grows with the text only. A bad pattern was refused with its definition."""
    try:
        return search(pattern, value) is not None
    except Failure:
        return True


def _is_address(version: int) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return ip_address(text).version == version
        except ValueError:
            return False

    return check


def _is_network(text: str) -> bool:
    try:
        return "/" in text and bool(ip_network(text, strict=False))
    except ValueError:
        return False


def _is_date(text: str) -> bool:
    try:
        return bool(_DATE.fullmatch(text)) and bool(date.fromisoformat(text))
    except ValueError:
        return False


def _is_base64(text: str) -> bool:
    try:
        b64decode(text, validate=True)
    except ValueError:
        return False
    return True


def _is_duration(text: str) -> bool:
    """`1h30m`, and as the library has it `5 minutes`."""
    return parse_duration(text) is not None or _SPAN.fullmatch(text.strip()) is not None


_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}")
_MAC = re.compile(
    r"[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5}([:-][0-9a-fA-F]{2}){0,2}|([0-9a-fA-F]{4}\.){2}[0-9a-fA-F]{4}"
)
_SPAN = re.compile(
    r"\d+ *(ns|nanos?|us|micros?|ms|millis?|s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?|w|weeks?)"
)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+|/\S*")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
# The formats that are checked; others are not.
_FORMATS: dict[str, Callable[[str], bool]] = {
    "byte": _is_base64,
    "cidr": _is_network,
    "date": _is_date,
    "date-time": lambda text: parse_timestamp(text) is not None,
    "duration": _is_duration,
    "email": lambda text: _EMAIL.fullmatch(text) is not None,
    "hostname": lambda text: len(text) <= 255 and _HOST.fullmatch(text) is not None,
    "ipv4": _is_address(4),
    "ipv6": _is_address(6),
    "mac": lambda text: _MAC.fullmatch(text) is not None,
    "uri": lambda text: _URI.fullmatch(text) is not None,
    "uuid": lambda text: _UUID.fullmatch(text) is not None,
}
