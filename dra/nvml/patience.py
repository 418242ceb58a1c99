"""How long a caller waits for an answer, counted in the time in which this process ran."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

# One look at the clock in so long. Longer than an event wait (a second): that wakes its caller once.
SLICE_SECONDS = 2.0
# A slice that took so much longer is one in which the process did not run.
_OVERSLEPT_SECONDS = 1.0


class AwakePatience:
    """How long a caller still waits, counted in the time in which this process ran. One thread uses it.

    While the process is stopped (a paused machine, a frozen pod) no answer can arrive either: a call that was under way
    when that began has not hung.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float]) -> None:
        self._left, self._clock = seconds, clock

    @property
    def over(self) -> bool:
        """Whether it is at an end."""
        return self._left <= 0

    def wait_for(self, event: threading.Event, *, at_most: float = math.inf) -> bool:
        """Wait until the event is set, the patience is at an end or `at_most` seconds are over; whether it is set."""
        while self._left > 0 and at_most > 0:
            asked = min(self._left, SLICE_SECONDS, at_most)
            at_most -= asked
            began = self._clock()
            if event.wait(asked):
                self._left -= min(asked, self._clock() - began)
                return True
            if self._clock() - began < asked + _OVERSLEPT_SECONDS:
                self._left -= asked
        return event.is_set()
