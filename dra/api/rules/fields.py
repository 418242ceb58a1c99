"""Findings in the server's words. Source: k8s.io/apimachinery/pkg/util/validation/field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from dra.api.rules.cause import Cause


def show(value: Any) -> str:
    """Give a value as a message quotes it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def required(field: str, detail: str = "") -> Cause:
    """A value is missing."""
    return Cause("FieldValueRequired", field, f"Required value: {detail}" if detail else "Required value")


def bad(field: str, value: Any, detail: str) -> Cause:
    """A value is wrong."""
    return Cause("FieldValueInvalid", field, f"Invalid value: {show(value)}: {detail}")


def unsupported(field: str, value: Any, supported: Iterable[str]) -> Cause:
    """A value is not one of those that exist."""
    listed = ", ".join(show(one) for one in supported)
    return Cause(
        "FieldValueNotSupported", field, f"Unsupported value: {show(value)}: supported values: {listed}"
    )


def duplicate(field: str, value: Any) -> Cause:
    """A value stands twice."""
    return Cause("FieldValueDuplicate", field, f"Duplicate value: {show(value)}")


def forbidden(field: str, detail: str = "") -> Cause:
    """A value may not stand there."""
    return Cause("FieldValueForbidden", field, f"Forbidden: {detail}" if detail else "Forbidden")


def too_many(field: str, count: int, limit: int) -> Cause:
    """A list or map has too many items."""
    items = "item" if limit == 1 else "items"
    return Cause("FieldValueTooMany", field, f"Too many: {count}: must have at most {limit} {items}")


def too_long(field: str, limit: int) -> Cause:
    """A text is too long."""
    unit = "byte" if limit == 1 else "bytes"
    return Cause("FieldValueTooLong", field, f"Too long: may not be more than {limit} {unit}")


def not_found(field: str, value: Any) -> Cause:
    """A value refers to something that is not there."""
    return Cause("FieldValueNotFound", field, f"Not found: {show(value)}")


def immutable(field: str, value: Any) -> Cause:
    """A value may not be changed."""
    return bad(field, value, "field is immutable")
