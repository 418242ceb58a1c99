"""XIDs that two sources tell: NVML's events and the kernel log. Pure, apart from memory.

Both tell most XIDs, and each misses some (NVML while its session is let go of, the log when its ring overflows). What
one source has told already is not news when the other tells it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dra.health.model import Scope, XidEvent

# The two tell the same XID within this time.
TOGETHER_SECONDS = 10.0
# Kinds of XIDs of all GPUs that are waiting to be judged; a storm repeats few.
MOST_WAITING = 1024


@dataclass(slots=True)
class _Told:
    at: float
    counts: Counter[str] = field(default_factory=Counter)


class Hearing:
    """Collects XIDs until somebody takes them: one entry for each kind with its count. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Scope, int], tuple[XidEvent, int]] = {}
        self._told: dict[tuple[str, int], _Told] = {}
        self.overflowed = 0

    def hear(self, event: XidEvent, *, now: float) -> bool:
        """Take an XID; whether it is news. `now`: monotonic seconds."""
        key = (event.scope.gpu, event.xid)
        told = self._told.get(key)
        if told is None or now - told.at > TOGETHER_SECONDS:
            self._forget(now)
            told = self._told[key] = _Told(now)
        before = max(told.counts.values(), default=0)
        told.counts[event.source] += 1
        told.at = now
        if told.counts[event.source] <= before:
            return False
        place = (event.scope, event.xid)
        first, count = self._waiting.get(place, (event, 0))
        if count == 0 and len(self._waiting) >= MOST_WAITING:
            self.overflowed += 1
            return False
        self._waiting[place] = (first, count + 1)
        return True

    @property
    def waiting(self) -> bool:
        """Whether `take` would give anything."""
        return bool(self._waiting)

    def take(self) -> list[tuple[XidEvent, int]]:
        """Give what is waiting, oldest first, each with how often it came."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def _forget(self, now: float) -> None:
        if len(self._told) >= MOST_WAITING:
            self._told = {key: told for key, told in self._told.items() if now - told.at <= TOGETHER_SECONDS}
