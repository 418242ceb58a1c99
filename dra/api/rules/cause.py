"""One finding of validation, and what the rules must know of the server that would check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]
CelCheck = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Cause:
    """One finding of validation: what kind, where, and the text after the field."""

    reason: str
    field: str
    detail: str

    def __str__(self) -> str:
        """Give the text as it stands in the message."""
        return f"{self.field}: {self.detail}" if self.field else self.detail

    def to_json(self) -> Json:
        """Give the entry of `details.causes`."""
        return {"reason": self.reason, "message": self.detail, "field": self.field}


class Rules(Protocol):
    """Which server checks: its minor version, and its check of CEL expressions (None: they are not checked)."""

    @property
    def cel_check(self) -> CelCheck | None:
        """Give the function that says why an expression would be refused."""

    @property
    def minor(self) -> int:
        """Give the minor version of Kubernetes."""
