"""The columns of `kubectl get` that the server itself prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dra.sim.apiserver.registry import Resource

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


NAME = Column("Name", lambda o, _: o["metadata"]["name"], format="name")
AGE = Column("Age", age)


def columns_of(resource: Resource, version: str) -> list[Column]:
    """Give the columns of a resource."""
    return [NAME, AGE]
