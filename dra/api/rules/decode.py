"""From the JSON of a body to an object of a known shape, with the server's errors, and back to what it writes.

`decode` checks types, drops unknown fields (and reports them), fills in the fields that are always written, and gives
quantities their canonical form. `prune` removes what the server leaves out when it writes an object.
Source: encoding/json and sigs.k8s.io/json as the API server uses them (strict decoding, omitempty).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.schema import Field, Struct, Type, load_struct
from dra.errors import ValueFormatError
from dra.values import Quantity

Json = dict[str, Any]

QUANTITY_FORM = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
_RANGE = {"int32": (-(1 << 31), (1 << 31) - 1), "int64": (-(1 << 63), (1 << 63) - 1)}
_TIME = re.compile(
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    re.ASCII,
)


class DecodeError(Exception):
    """A value does not fit its field; the text is the server's."""


class Pairs(dict[str, Any]):
    """A JSON object that remembers the keys that stood in it twice."""

    duplicates: tuple[str, ...] = ()


def _pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    result = Pairs(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        result.duplicates = tuple(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
    return result


def parse_json(text: str) -> Any:
    """Read JSON, keeping note of duplicate keys.

    Raises:
        DecodeError: worded as Go's decoder does.
    """
    try:
        return json.loads(text, object_pairs_hook=_pairs)
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
    return _struct(value, load_struct(ref), ref.partition(".")[0], ("", ""), "", findings)


def _go_type(shape: Type) -> str:
    if shape.kind == "struct":
        module, _, name = shape.ref.rpartition(".")
        return f"{module.rpartition('_')[2]}.{name}"
    if shape.kind == "list" and shape.elem is not None:
        return f"[]{_go_type(shape.elem)}"
    if shape.kind == "map" and shape.elem is not None:
        return f"map[string]{_go_type(shape.elem)}"
    return {"float": "float64"}.get(shape.kind, shape.kind)


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _mismatch(value: Any, shape: Type, where: tuple[str, str], *, quote: bool = False) -> DecodeError:
    number = f" {json.dumps(value)}" if quote else ""
    struct, path = where
    target = f"Go struct field {struct}.{path}" if struct else "Go value"
    return DecodeError(
        f"json: cannot unmarshal {_json_type(value)}{number} into {target} of type {_go_type(shape)}"
    )


def _struct(
    value: Any, struct: Struct, module: str, where: tuple[str, str], path: str, findings: Findings
) -> Json:
    if not isinstance(value, dict):
        raise _mismatch(value, Type("struct", ref=f"{module}.{struct.name}"), where)
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
            filled = _zero(known)
            if filled is not _NOTHING:
                result[name] = filled
    return result


_NOTHING: Any = object()


def _zero(known: Field) -> Any:
    """Give what stands in a field that was not given but is always written."""
    kind = known.type.kind
    if known.default is not None:
        return json.loads(known.default)
    if known.always:
        if kind == "struct":
            shape = known.type.struct()
            return _struct({}, shape, known.type.ref.partition(".")[0], ("", ""), "", Findings())
        return {"string": "", "bool": False}.get(kind, 0 if kind in {"int32", "int64", "float"} else None)
    if known.required and kind == "quantity":
        return "0"
    if known.required and kind == "time":
        return None
    return _NOTHING


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
            raise _mismatch(value, shape, where)
        elem = shape.elem
        assert elem is not None
        return [
            _value(_zero_elem(elem) if item is None else item, elem, where, f"{path}[{i}]", findings)
            for i, item in enumerate(value)
        ]
    if kind == "map":
        if not isinstance(value, dict):
            raise _mismatch(value, shape, where)
        for key in getattr(value, "duplicates", ()):
            findings.duplicate(f"{path}.{key}")
        elem = shape.elem
        assert elem is not None
        return {
            key: _value(_zero_elem(elem) if item is None else item, elem, where, f"{path}.{key}", findings)
            for key, item in value.items()
        }
    return _scalar(value, shape, where)


def _zero_elem(elem: Type) -> Any:
    if elem.kind in {"struct", "map"}:
        return {}
    if elem.kind == "list":
        return []
    return {"string": "", "bool": False, "quantity": "0"}.get(elem.kind, 0)


def _scalar(value: Any, shape: Type, where: tuple[str, str]) -> Any:
    kind = shape.kind
    if kind == "any":
        return value
    if kind == "string":
        if not isinstance(value, str):
            raise _mismatch(value, shape, where)
        return value
    if kind == "bool":
        if not isinstance(value, bool):
            raise _mismatch(value, shape, where)
        return value
    if kind in _RANGE:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _mismatch(value, shape, where)
        low, high = _RANGE[kind]
        if isinstance(value, float) or not low <= value <= high:
            raise _mismatch(value, shape, where, quote=True)
        return value
    if kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _mismatch(value, shape, where)
        return value
    if kind == "quantity":
        return canonical_quantity(value)
    if kind in {"time", "microtime"}:
        return _time(value, micro=kind == "microtime")
    if kind == "bytes":
        return _bytes(value, where)
    if kind == "intstr" and (isinstance(value, bool) or not isinstance(value, (int, str))):
        raise _mismatch(value, Type("int32"), where)
    return value


def canonical_quantity(value: Any) -> str:
    """Give a quantity in its canonical form.

    Raises:
        DecodeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise DecodeError(QUANTITY_FORM)
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return str(Quantity.parse(text))
    except ValueFormatError as error:
        raise DecodeError(QUANTITY_FORM) from error


def _time(value: Any, *, micro: bool) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"json: cannot unmarshal {_json_type(value)} into Go value of type string")
    if not _TIME.fullmatch(value):
        layout = "2006-01-02T15:04:05.000000Z07:00" if micro else "2006-01-02T15:04:05Z07:00"
        raise DecodeError(f'parsing time "{value}" as "{layout}": cannot parse "{value}" as "2006"')
    if micro and not re.search(r"\.\d{6}(Z|[+-])", value):
        rest = value[19:]
        raise DecodeError(
            f'parsing time "{value}" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "{rest}" as ".000000"'
        )
    if value.endswith("Z"):
        whole, dot, fraction = value[:-1].partition(".")
        if micro:
            return f"{whole}.{(fraction if dot else '')[:6]:0<6}Z"
        return f"{whole}Z"
    from datetime import UTC, datetime

    moment = datetime.fromisoformat(value).astimezone(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


def _bytes(value: Any, where: tuple[str, str]) -> str:
    if not isinstance(value, str):
        raise _mismatch(value, Type("list", elem=Type("uint8")), where)
    try:
        base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise DecodeError("illegal base64 data at input byte 0") from error
    return value


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
    return _prune_struct(obj, load_struct(ref))


def _prune_struct(value: Json, struct: Struct) -> Json:
    result: Json = {}
    for key, item in value.items():
        known = struct.fields.get(key)
        if known is None:
            result[key] = item
            continue
        kept = _prune_value(item, known.type)
        if known.always or known.required or not _is_empty(kept, known):
            result[key] = (kept or None) if known.type.kind in {"list", "map"} else kept
    return result


def _is_empty(value: Any, known: Field) -> bool:
    kind = known.type.kind
    if value is None or kind in {"list", "map", "bytes"}:
        return not value
    if kind in {"string", "bool", "int32", "int64", "float"}:
        return not value and not known.keeps_zero
    return False


def _prune_value(value: Any, shape: Type) -> Any:
    if shape.kind == "struct" and isinstance(value, dict):
        return _prune_struct(value, shape.struct())
    if shape.elem is not None and shape.elem.kind in {"struct", "list", "map"}:
        if isinstance(value, list):
            return [_prune_value(item, shape.elem) for item in value]
        if isinstance(value, dict):
            return {key: _prune_value(item, shape.elem) for key, item in value.items()}
    return value
