"""The columns of `kubectl get` that the server itself prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `value(object, now)` gives the cell."""

    name: str
    value: Callable[[Json, float], Any]
    type: str = "string"
    format: str = ""
    priority: int = 0
    description: str = ""

    def cell(self, obj: Json, now: float) -> Any:
        """Give the cell of one object."""
        return self.value(obj, now)


def age(obj: Json, now: float) -> str:
    """Give how old an object is."""
    return duration_since(obj["metadata"].get("creationTimestamp"), now)


def duration_since(stamp: str | None, now: float) -> str:
    """Give `5m12s` since an RFC 3339 time, `<unknown>` without one."""
    from datetime import datetime

    if not stamp:
        return "<unknown>"
    return human_duration(max(0, int(now - datetime.fromisoformat(stamp).timestamp())))


def human_duration(seconds: int) -> str:
    """Give a duration in two significant units. Source: k8s.io/apimachinery/pkg/util/duration."""
    if seconds < 120:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 8:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    days, hours = divmod(hours, 24)
    if days < 8:
        return f"{days}d{hours}h" if hours else f"{days}d"
    if days < 730:
        return f"{days}d"
    years, days = divmod(days, 365)
    return f"{years}y{days}d" if years < 8 and days else f"{years}y"


NAME = Column("Name", lambda o, _: o["metadata"].get("name", ""), format="name")
AGE = Column("Age", age)


def at(path: str, *, default: Any = "") -> Callable[[Json, float], Any]:
    """Give a cell that reads a dotted path."""

    def cell(obj: Json, _: float) -> Any:
        value: Any = obj
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value in (None, "") else value

    return cell


def counted(path: str) -> Callable[[Json, float], Any]:
    """Give a cell that reads a number, 0 where it is missing."""
    return at(path, default=0)


def custom_columns(declared: list[Json]) -> list[Column]:
    """Give the columns that a custom resource definition declares; the age where it declares none."""
    if not declared:
        return [NAME, AGE]
    columns = [NAME]
    for column in declared:
        kind = column.get("type", "string")
        columns.append(
            Column(
                column["name"],
                _custom_cell(column.get("jsonPath", ""), kind),
                type=kind,
                format=column.get("format", ""),
                priority=column.get("priority", 0),
                description=column.get("description", ""),
            )
        )
    return columns


def _custom_cell(path: str, kind: str) -> Callable[[Json, float], Any]:
    def cell(obj: Json, now: float) -> Any:
        value = json_path(obj, path)
        if kind == "date":
            return duration_since(value, now) if isinstance(value, str) else "<unknown>"
        return value

    return cell


def json_path(obj: Json, path: str) -> Any:
    """Give the first value at a simple JSON path: `.a.b`, `.a[0]`, `.a[?(@.k=="v")].b`; None where there is none."""
    import re

    value: Any = obj
    for token in re.finditer(
        r"\.((?:\\.|[^.\[\]\\])+)|\[\?\(@\.(\w+)==[\"']([^\"']*)[\"']\)\]|\[(\d+)\]", path
    ):
        name, key, wanted, index = token.groups()
        if name:
            value = value.get(name.replace("\\", "")) if isinstance(value, dict) else None
        elif key:
            items = value if isinstance(value, list) else []
            value = next((item for item in items if str(item.get(key)) == wanted), None)
        elif index is not None:
            value = value[int(index)] if isinstance(value, list) and int(index) < len(value) else None
        if value is None:
            return None
    return value
