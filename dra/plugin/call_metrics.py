"""What is counted of the kubelet's calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from dra.errors import DraError
from dra.telemetry import families as f
from dra.telemetry.metrics import Counter, Gauge, Histogram

OPERATIONS = ("prepare", "unprepare")


class CallMetrics:
    """What the kubelet's calls cost and how they end. Recorded always; read when scraped."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self.succeeded = Counter(f.NV_REQUESTS)
        self.durations = Histogram(f.NV_DURATION)
        self.in_flight = Gauge(f.NV_INFLIGHT)
        self.stage_errors = {
            "prepare": Counter(f.NV_PREPARE_ERRORS),
            "unprepare": Counter(f.NV_UNPREPARE_ERRORS),
        }
        self.calls = Histogram(f.NODE_CALLS)
        self.steps = Histogram(f.NODE_STEPS)
        self.codes = Counter(f.NODE_CLAIM_ERRORS)
        # NVIDIA's driver shows these from the start.
        for operation in OPERATIONS:
            self.succeeded.add(driver, operation, by=0)
            self.durations.touch(driver, operation)
            self.in_flight.set(0, driver, operation)

    @property
    def recorders(self) -> tuple[Counter | Gauge | Histogram, ...]:
        """All of them."""
        return (
            self.succeeded, self.durations, self.in_flight, *self.stage_errors.values(), self.calls, self.steps,
            self.codes,
        )  # fmt: skip

    @contextlib.contextmanager
    def call(self, operation: str) -> Iterator[list[DraError]]:
        """Measure a call; its errors, claim by claim, are put into the list that this gives."""
        errors: list[DraError] = []
        self.in_flight.add(1, self._driver, operation)
        began = time.perf_counter()
        try:
            yield errors
        finally:
            seconds = time.perf_counter() - began
            self.in_flight.add(-1, self._driver, operation)
            self.calls.observe(seconds, operation)
            if not errors:
                self.succeeded.add(self._driver, operation)
                self.durations.observe(seconds, self._driver, operation)
            for error in errors:
                self.codes.add(operation, error.code)
                self.stage_errors[operation].add(self._driver, _stage(operation, error))

    def step(self, name: str, seconds: float) -> None:
        """Take how long a step of a prepare took."""
        self.steps.observe(seconds, name)


def _stage(operation: str, error: DraError) -> str:
    """Give NVIDIA's word for where it failed. Source: NVIDIA's driver, metrics.ErrorType."""
    return "lock_acquire" if error.code == "DRA-LOCK-TIMEOUT" else f"{operation}_devices"
