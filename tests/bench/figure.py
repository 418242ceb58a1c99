"""One figure of the bench, and what several runs of it say."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of one run: what was measured, the budget, and what NVIDIA's driver needs."""

    what: str
    value: float
    unit: str
    budget: float
    nvidia: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A figure over all runs. `value` is the median."""

    what: str
    value: float
    low: float
    high: float
    runs: int
    unit: str
    budget: float
    nvidia: str

    @property
    def met(self) -> bool:
        """Whether the budget holds."""
        return self.value <= self.budget


def summarise(figures: Iterable[Figure]) -> list[Summary]:
    """Give the median and the range of each figure, in the order of their first appearance."""
    together: dict[str, list[Figure]] = {}
    for figure in figures:
        together.setdefault(figure.what, []).append(figure)
    return [
        Summary(
            what,
            statistics.median(each.value for each in found),
            min(each.value for each in found),
            max(each.value for each in found),
            len(found),
            found[0].unit,
            found[0].budget,
            found[0].nvidia,
        )
        for what, found in together.items()
    ]


def percentile(values: list[float], percent: float) -> float:
    """Give a percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent) // 100) - 1))]
