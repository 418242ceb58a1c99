"""One figure of the bench."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: what was measured, the budget, and what NVIDIA's driver needs."""

    what: str
    value: float
    unit: str
    budget: float
    nvidia: str

    @property
    def met(self) -> bool:
        """Whether the budget holds."""
        return self.value <= self.budget
