"""Metrics: plain recorders anybody may keep, and a registry that writes them out when asked.

Recording is a dictionary and an int under a lock; prometheus_client is loaded when a registry is written out for the
first time, which only happens where somebody asked for metrics. A `Family` says what a metric is called and means;
`dra/telemetry/families.py` lists all of them, and docs/metrics.md is made from that list.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.told import Told

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

# Series of one recorder; what comes on top is counted under the label value OTHER.
MAX_SERIES = 1000
OTHER = "other"

log = get_logger()


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: the name as it is exposed, what kind, one sentence of help, the names of its labels.

    `dcgm` are the fields of dcgm-exporter that measure the same, `buckets` a histogram's upper bounds in the unit of
    its name.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    dcgm: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's series: how many values were at most each bound (cumulative), their sum and their number."""

    below: tuple[int, ...]
    total: float
    count: int


@dataclass(frozen=True, slots=True)
class Series:
    """One series: label values in the family's order, and its value."""

    labels: Labels
    value: float | Buckets


@dataclass(frozen=True, slots=True)
class Samples:
    """All series of a family at one moment."""

    family: Family
    series: tuple[Series, ...]


Collector = Callable[[], Iterable[Samples]]


def samples_of(family: Family, found: Iterable[tuple[Labels, float | None]]) -> Samples:
    """Give a family's samples without those that have no value: what is not known is absent, never 0.

    Of two with the same labels the first counts: a scraper refuses a page that says something twice.
    """
    known: dict[Labels, float] = {}
    for labels, value in found:
        if value is not None:
            known.setdefault(labels, value)
    return Samples(family, tuple(Series(labels, value) for labels, value in known.items()))


class _Recorder:
    """What the recorders share. Thread-safe; label values are given in the family's order."""

    kind: Kind

    def __init__(self, family: Family, *, max_series: int = MAX_SERIES) -> None:
        if family.kind != self.kind:
            raise ValueError(f"{family.name} is a {family.kind}")
        self.family = family
        self._max_series = max_series
        self._mutex = threading.Lock()

    def _key(self, labels: Labels, known: object) -> Labels:
        if len(labels) != len(self.family.labels):
            raise ValueError(f"{self.family.name} has the labels {self.family.labels}, not {labels}")
        series: dict[Labels, Any] = known  # type: ignore[assignment]
        if labels in series or len(series) < self._max_series:
            return labels
        return (OTHER,) * len(labels)


class Counter(_Recorder):
    """Counts up. A series is there from its first `add`, or from `add(…, by=0)`."""

    kind = "counter"

    def __init__(self, family: Family, *, max_series: int = MAX_SERIES) -> None:
        super().__init__(family, max_series=max_series)
        self._values: dict[Labels, float] = {}

    def add(self, *labels: str, by: float = 1) -> None:
        """Count `by` more."""
        with self._mutex:
            key = self._key(labels, self._values)
            self._values[key] = self._values.get(key, 0) + by

    def value(self, *labels: str) -> float:
        """Give what was counted, 0 for a series that is not there."""
        with self._mutex:
            return self._values.get(labels, 0)

    def __call__(self) -> Iterator[Samples]:
        """Collect."""
        with self._mutex:
            found = tuple(Series(labels, value) for labels, value in self._values.items())
        yield Samples(self.family, found)


class Gauge(_Recorder):
    """Goes up and down."""

    kind = "gauge"

    def __init__(self, family: Family, *, max_series: int = MAX_SERIES) -> None:
        super().__init__(family, max_series=max_series)
        self._values: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        """Set a series."""
        with self._mutex:
            self._values[self._key(labels, self._values)] = value

    def add(self, by: float, *labels: str) -> None:
        """Move a series by so much."""
        with self._mutex:
            key = self._key(labels, self._values)
            self._values[key] = self._values.get(key, 0) + by

    def remove(self, *labels: str) -> None:
        """Take a series away; fine if it is not there."""
        with self._mutex:
            self._values.pop(labels, None)

    def __call__(self) -> Iterator[Samples]:
        """Collect."""
        with self._mutex:
            found = tuple(Series(labels, value) for labels, value in self._values.items())
        yield Samples(self.family, found)


class Histogram(_Recorder):
    """Sorts values into the family's buckets."""

    kind = "histogram"

    def __init__(self, family: Family, *, max_series: int = MAX_SERIES) -> None:
        super().__init__(family, max_series=max_series)
        # One slot for each bucket, one for what is above, and the sum.
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Take a value in the unit of the family's name."""
        with self._mutex:
            key = self._key(labels, self._counts)
            self._ready(key)[bisect.bisect_left(self.family.buckets, value)] += 1
            self._sums[key] += value

    def touch(self, *labels: str) -> None:
        """Have a series, without a value yet."""
        with self._mutex:
            self._ready(self._key(labels, self._counts))

    def _ready(self, key: Labels) -> list[int]:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(self.family.buckets) + 1)
            self._sums[key] = 0.0
        return counts

    def __call__(self) -> Iterator[Samples]:
        """Collect."""
        with self._mutex:
            taken = [(labels, tuple(counts), self._sums[labels]) for labels, counts in self._counts.items()]
        yield Samples(
            self.family, tuple(Series(labels, _cumulative(each, total)) for labels, each, total in taken)
        )


def _cumulative(counts: Sequence[int], total: float) -> Buckets:
    below, running = [], 0
    for count in counts:
        running += count
        below.append(running)
    return Buckets(tuple(below[:-1]), total, running)


class Registry:
    """What a process exposes: recorders and functions that look something up. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._collectors: list[Collector] = []
        # By the number of the collector.
        self._failed: Told[int] = Told()

    def add(self, *collectors: Collector) -> None:
        """Expose recorders, or functions that give samples when asked. Each gives families of its own."""
        with self._mutex:
            self._collectors += collectors

    def collect(self) -> list[Samples]:
        """Give everything, by name. What fails costs its own series; that is logged once, until it works again."""
        with self._mutex:
            collectors = tuple(self._collectors)
        found: dict[str, Samples] = {}
        for number, collector in enumerate(collectors):
            try:
                for samples in collector():
                    before = found.get(samples.family.name)
                    series = samples.series if before is None else before.series + samples.series
                    found[samples.family.name] = Samples(samples.family, series)
            except Exception as error:  # a marked border: one number less is no reason for none
                self._report(number, error)
            else:
                with self._mutex:
                    self._failed.over(number)
        return [found[name] for name in sorted(found)]

    def _report(self, number: int, error: Exception) -> None:
        with self._mutex:
            news = self._failed.is_news(number, type(error).__name__)
        if news:
            with contextlib.suppress(Exception):
                log.error("metrics_not_collected", exc_info=error, **error_fields(error))


def render(samples: Iterable[Samples], *, accept: str = "") -> tuple[bytes, str]:
    """Write samples out: the text, and its content type. `accept` is the HTTP header.

    Source: the Prometheus text format, and OpenMetrics where the client asks for it.
    """
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return encode(_Page([_metric(each) for each in samples if each.series])), content_type


class _Page:
    """What prometheus_client takes for a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Give the metrics."""
        return self._metrics


def _metric(samples: Samples) -> Metric:
    from prometheus_client.metrics_core import Metric

    family = samples.family
    metric = Metric(family.name.removesuffix("_total"), family.help, family.kind)
    for series in samples.series:
        labels = dict(zip(family.labels, series.labels, strict=True))
        if not isinstance(series.value, Buckets):
            metric.add_sample(family.name, labels, series.value)
            continue
        bounds = (*(repr(float(bound)) for bound in family.buckets), "+Inf")
        for bound, below in zip(bounds, (*series.value.below, series.value.count), strict=True):
            metric.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, below)
        metric.add_sample(f"{family.name}_sum", labels, series.value.total)
        metric.add_sample(f"{family.name}_count", labels, series.value.count)
    return metric
