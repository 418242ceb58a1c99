"""How soon to undo what somebody else did to our slices. Pure, apart from remembering.

A wipe by the kubelet or an edit by hand is undone at once. Somebody who does it again and again is another
writer: each of its changes is undone later than the last, so that two programs never fight at full speed.
"""

from __future__ import annotations

# A wipe of several slices comes as several events: wait for the last of them.
SETTLE_SECONDS = 0.25
# Restores that are made without delay; a kubelet that restarts now and then is no enemy.
FREE = 3
# Longest delay: what a human edits by hand is back within a minute, whatever happened before.
LONGEST_SECONDS = 45.0
# Without disturbance for so long, all is forgotten.
FORGET_SECONDS = 600.0


class Restores:
    """Counts restores. One thread uses it; times are those of a monotonic clock."""

    def __init__(self) -> None:
        self._count = 0
        self._last = 0.0

    def delay_seconds(self, now: float) -> float:
        """Give how long to wait before undoing a change that was seen now."""
        self._forget(now)
        if self._count < FREE:
            return SETTLE_SECONDS
        return min(LONGEST_SECONDS, 2.0 ** min(self._count - FREE, 10))

    def record(self, now: float) -> None:
        """Note that a change of somebody else was undone."""
        self._forget(now)
        self._count += 1
        self._last = now

    def is_contested(self, now: float) -> bool:
        """Whether somebody keeps changing our slices."""
        self._forget(now)
        return self._count > FREE

    def _forget(self, now: float) -> None:
        if self._count and now - self._last > FORGET_SECONDS:
            self._count = 0
