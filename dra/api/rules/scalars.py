"""Leaf values of the API's kinds as the server reads them, its words for values of the wrong type, and what stands where
nothing was given.

Source: encoding/json and sigs.k8s.io/json as the API server uses them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

from dra.api.rules.schema import Field, Struct, Type
from dra.errors import ValueFormatError
from dra.values import Quantity

Json = dict[str, Any]

QUANTITY_FORM = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
INT_RANGE = {"int32": (-(1 << 31), (1 << 31) - 1), "int64": (-(1 << 63), (1 << 63) - 1)}
_TIME = re.compile(
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
    re.ASCII,
)


class DecodeError(Exception):
    """A value does not fit its field; the text is the server's."""


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


NOTHING: Any = object()


def zero_of(known: Field) -> Any:
    """Give what stands in a field that was not given but is always written; `NOTHING` if it is left out then."""
    kind = known.type.kind
    if known.default is not None:
        return json.loads(known.default)
    if known.always:
        if kind == "struct":
            return zeros(known.type.struct())
        return {"string": "", "bool": False}.get(kind, 0 if kind in {"int32", "int64", "float"} else None)
    if known.required and kind == "quantity":
        return "0"
    if known.required and kind == "time":
        return None
    return NOTHING


def zeros(struct: Struct) -> Json:
    """Give an object of which nothing was given."""
    found = {name: zero_of(known) for name, known in struct.fields.items()}
    return {name: value for name, value in found.items() if value is not NOTHING}


def zero_elem(elem: Type) -> Any:
    """Give what a null stands for as an item of a list or map."""
    if elem.kind in {"struct", "map"}:
        return {}
    if elem.kind == "list":
        return []
    return {"string": "", "bool": False, "quantity": "0"}.get(elem.kind, 0)


def mismatch(value: Any, shape: Type, where: tuple[str, str], *, quote: bool = False) -> DecodeError:
    """Give the error for a value of the wrong type; `where`: the struct that holds it, and the path from the top."""
    number = f" {json.dumps(value)}" if quote else ""
    struct, path = where
    target = f"Go struct field {struct}.{path}" if struct else "Go value"
    return DecodeError(
        f"json: cannot unmarshal {_json_type(value)}{number} into {target} of type {_go_type(shape)}"
    )


def scalar(value: Any, shape: Type, where: tuple[str, str]) -> Any:
    """Give a leaf value as it is kept.

    Raises:
        DecodeError: it has the wrong type.
    """
    kind = shape.kind
    if kind == "any":
        return value
    if kind == "string":
        if not isinstance(value, str):
            raise mismatch(value, shape, where)
        return value
    if kind == "bool":
        if not isinstance(value, bool):
            raise mismatch(value, shape, where)
        return value
    if kind in INT_RANGE:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise mismatch(value, shape, where)
        low, high = INT_RANGE[kind]
        if isinstance(value, float) or not low <= value <= high:
            raise mismatch(value, shape, where, quote=True)
        return value
    if kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise mismatch(value, shape, where)
        return value
    if kind == "quantity":
        return canonical_quantity(value)
    if kind in {"time", "microtime"}:
        return _time(value, micro=kind == "microtime")
    if kind == "bytes":
        return _bytes(value, where)
    if kind == "intstr" and (isinstance(value, bool) or not isinstance(value, (int, str))):
        raise mismatch(value, Type("int32"), where)
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
        raise mismatch(value, Type("list", elem=Type("uint8")), where)
    try:
        base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise DecodeError("illegal base64 data at input byte 0") from error
    return value
