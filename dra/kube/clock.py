"""Time as the loops of this room see it, so that tests need not wait.

`Clock` is what reflector, event recorder and publisher wait by; `Backoff` says how long after a failure.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Protocol

from dra.errors import KubeError

# Longest pause after repeated failures.
BACKOFF_CAP_SECONDS = 30.0
# A refused connection costs the server nothing, so it is tried again soon: a pool has to be in the API
# within 3 s after the API server is back.
REFUSED_CAP_SECONDS = 2.5
# A Retry-After longer than this is taken for a mistake.
RETRY_AFTER_CAP_SECONDS = 300.0
_BOOT_TIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """A monotonic clock that can also wait."""

    def now(self) -> float:
        """Seconds that never go back."""

    def wall(self) -> float:
        """Seconds since 1970."""

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until the event is set or the time has passed; whether it is set."""


class SystemClock:
    """The real time."""

    def now(self) -> float:
        """Give `time.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """Give `time.time`."""
        return time.time()

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Block the calling thread."""
        return event.wait(seconds)


class SleeplessClock(SystemClock):
    """The real time, and `now` also counts what the machine slept through: for what others measure meanwhile."""

    def now(self) -> float:
        """Give the seconds since boot; `time.monotonic` where the system has no such clock."""
        return time.clock_gettime(_BOOT_TIME) if _BOOT_TIME is not None else time.monotonic()


class Backoff:
    """How long to pause after a failure: exponential, with jitter, reset by success.

    Not thread-safe: one loop owns it.
    """

    def __init__(
        self, *, base_seconds: float = 0.25, cap_seconds: float = BACKOFF_CAP_SECONDS, rng: random.Random
    ) -> None:
        self._base = base_seconds
        self._cap = cap_seconds
        self._rng = rng
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures since the last success."""
        return self._failures

    def reset(self) -> None:
        """Start again from the shortest pause."""
        self._failures = 0

    def next_seconds(self, error: BaseException | None = None) -> float:
        """Count a failure and give the pause after it, at least what the server asked for."""
        self._failures += 1
        delay = min(self._cap, self._base * 2.0 ** min(self._failures - 1, 16))
        if isinstance(error, KubeError):
            if error.fields.get("refused"):
                delay = min(delay, REFUSED_CAP_SECONDS)
            # Between 50 % and 100 %: a fleet that failed together does not come back together.
            delay *= 0.5 + self._rng.random() / 2
            return max(delay, min(error.retry_after_seconds or 0.0, RETRY_AFTER_CAP_SECONDS))
        return delay * (0.5 + self._rng.random() / 2)


class TokenBucket:
    """A rate: `per_second` on average, `burst` at once. Thread-safe; it says how long to wait, it never waits."""

    def __init__(self, *, per_second: float, burst: int, clock: Clock) -> None:
        self._rate = per_second
        self._burst = float(max(1, burst))
        self._clock = clock
        self._tokens = self._burst
        self._at = clock.now()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take one token and give the seconds until it is really there."""
        with self._lock:
            self._refill()
            self._tokens -= 1.0
            return max(0.0, -self._tokens / self._rate)

    def try_take(self) -> bool:
        """Take one token if there is one."""
        with self._lock:
            self._refill()
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True

    def _refill(self) -> None:
        now = self._clock.now()
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
