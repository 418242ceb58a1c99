"""A clock that a test moves; waiting moves it too."""

from __future__ import annotations

import threading
import time


class FakeClock:
    """`wait` returns at once and lets the time pass; it yields a moment so that other threads run."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._lock = threading.Lock()
        self.waits: list[float] = []

    def now(self) -> float:
        with self._lock:
            return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if seconds is None:
            return event.wait()
        if event.is_set():
            return True
        with self._lock:
            self._now += seconds
            self.waits.append(seconds)
        time.sleep(0.0005)
        return event.is_set()
