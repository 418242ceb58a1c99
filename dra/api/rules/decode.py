"""From the JSON of a body to an object of a known shape, with the server's errors, and back to what it writes.

`decode` checks types, drops unknown fields (and reports them), fills in the fields that are always written, and gives
quantities their canonical form. `prune` removes what the server leaves out when it writes an object.
Source: encoding/json and sigs.k8s.io/json as the API server uses them (strict decoding, omitempty).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.quick import OddError, pruner_of, reader_of
from dra.api.rules.scalars import (
    NOTHING,
    QUANTITY_FORM,
    DecodeError,
    canonical_quantity,
    mismatch,
    scalar,
    zero_elem,
    zero_of,
)
from dra.api.rules.schema import Struct, Type, load_struct

Json = dict[str, Any]
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class Pairs(dict[str, Any]):
    """A JSON object that remembers the keys that stood in it twice."""

    duplicates: tuple[str, ...] = ()


def _pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    result = Pairs(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        result.duplicates = tuple(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
    return result


def whole_characters(value: Any, text: str) -> Any:
    """Give a value without halves of surrogate pairs (U+D800 to U+DFFF), which no encoding can write.

    U+FFFD stands in their place, as after Go's decoder.

    Args:
        value: what was read.
        text: from which it was read.
    """
    return _whole(value) if _ESCAPED_HALF.search(text) else value


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        found = Pairs((_whole(key), _whole(item)) for key, item in value.items())
        found.duplicates = tuple(map(_whole, getattr(value, "duplicates", ())))
        return found
    return value


def parse_json(text: str) -> Any:
    """Read JSON, keeping note of duplicate keys.

    Raises:
        DecodeError: worded as Go's decoder does.
    """
    try:
        return whole_characters(json.loads(text, object_pairs_hook=_pairs), text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].lstrip()
        if rest == "" or error.msg.startswith("Unterminated"):
            raise DecodeError("unexpected end of JSON input") from error
        raise DecodeError(f"invalid character '{rest[0]}' looking for beginning of value") from error


@dataclass(slots=True)
class Findings:
    """What strict decoding objects to, in the order of the document."""

    problems: list[str] = field(default_factory=list)

    def unknown(self, path: str, known: Collection[str] = ()) -> None:  # noqa: ARG002 - for who wants to guess
        """Note a field that the shape does not have; `known` are the fields it has."""
        self.problems.append(f'unknown field "{path}"')

    def duplicate(self, path: str) -> None:
        """Note a field that stood twice."""
        self.problems.append(f'duplicate field "{path}"')

    def mismatch(self, path: str, value: Any, shape: Type, error: DecodeError) -> Any:  # noqa: ARG002 - as above
        """Give what shall stand for a value of the wrong type. The server gives up here.

        Raises:
            DecodeError: `error`.
        """
        raise error


def decode(value: Any, ref: str, findings: Findings) -> Json:
    """Give `value` in the shape `module.Kind`.

    Raises:
        DecodeError: a value has the wrong type.
    """
    try:
        read: Json = reader_of(ref)(value)
    except OddError:
        # Something is to be said, and this way knows about what.
        read = _struct(value, load_struct(ref), ref.partition(".")[0], ("", ""), "", findings)
    return read


def _struct(
    value: Any, struct: Struct, module: str, where: tuple[str, str], path: str, findings: Findings
) -> Json:
    if not isinstance(value, dict):
        raise mismatch(value, Type("struct", ref=f"{module}.{struct.name}"), where)
    for key in getattr(value, "duplicates", ()):
        findings.duplicate(f"{path}{key}")
    result: Json = {}
    for key, item in value.items():
        known = struct.fields.get(key)
        if known is None:
            findings.unknown(f"{path}{key}", struct.fields)
            continue
        if item is None:
            continue
        outer = where[1]
        inside = (struct.name, f"{outer}.{key}" if outer else key)
        result[key] = _value(item, known.type, inside, f"{path}{key}", findings)
    for name, known in struct.fields.items():
        if name not in result:
            filled = zero_of(known)
            if filled is not NOTHING:
                result[name] = filled
    return result


def _value(value: Any, shape: Type, where: tuple[str, str], path: str, findings: Findings) -> Any:
    try:
        return _read(value, shape, where, path, findings)
    except DecodeError as error:
        return findings.mismatch(path, value, shape, error)


def _read(value: Any, shape: Type, where: tuple[str, str], path: str, findings: Findings) -> Any:
    kind = shape.kind
    if kind == "struct":
        return _struct(value, shape.struct(), shape.ref.partition(".")[0], where, f"{path}.", findings)
    if kind == "list":
        if not isinstance(value, list):
            raise mismatch(value, shape, where)
        elem = shape.elem
        assert elem is not None
        return [
            _value(zero_elem(elem) if item is None else item, elem, where, f"{path}[{i}]", findings)
            for i, item in enumerate(value)
        ]
    if kind == "map":
        if not isinstance(value, dict):
            raise mismatch(value, shape, where)
        for key in getattr(value, "duplicates", ()):
            findings.duplicate(f"{path}.{key}")
        elem = shape.elem
        assert elem is not None
        return {
            key: _value(zero_elem(elem) if item is None else item, elem, where, f"{path}.{key}", findings)
            for key, item in value.items()
        }
    return scalar(value, shape, where)


def same_meaning(one: Any, other: Any) -> bool:
    """Whether two values are equal when absent, null and empty count as the same (Go: semantic DeepEqual)."""
    return bool(_without_empty(one) == _without_empty(other))


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        items = ((key, _without_empty(item)) for key, item in value.items())
        return {key: item for key, item in items if item not in (None, [], {})}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def prune(obj: Json, ref: str) -> Json:
    """Give the object without the optional fields that are empty, as the server writes it."""
    written: Json = pruner_of(ref)(obj)
    return written


__all__ = [
    "QUANTITY_FORM",
    "DecodeError",
    "Findings",
    "Pairs",
    "canonical_quantity",
    "decode",
    "parse_json",
    "prune",
    "same_meaning",
]
