"""Words for a value that has another type than its field."""

from __future__ import annotations

from typing import Any

from dra.api.rules.scalars import INT_RANGE
from dra.api.rules.schema import Type

_WANTED = {
    "string": "a text", "bool": "true or false", "int32": "a whole number", "int64": "a whole number",
    "float": "a number", "quantity": "a quantity such as 2, 500m or 8Gi", "time": "a time as 2026-01-31T12:00:00Z",
    "microtime": "a time", "bytes": "base64", "intstr": "a whole number or a text", "list": "a list",
}  # fmt: skip


def type_error(value: Any, shape: Type) -> str:
    """Write what stands where something of another type belongs."""
    if shape.kind in INT_RANGE and _is_whole(value):
        low, high = INT_RANGE[shape.kind]
        return f"must be a whole number from {low} to {high}, is {_shown(value)}"
    return f"must be {_WANTED.get(shape.kind, 'an object (fields with values)')}, is {_shown(value)}"


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return f"{value}".lower()
    text = f"the text {value!r}" if isinstance(value, str) else f"{value}"
    return text if len(text) <= 60 else text[:57] + "..."
