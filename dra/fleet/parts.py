"""What works while a replica leads: made anew for each time as leader, and tried again where it could not be started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from dra.errors import DraError
from dra.fleet.election import Lead
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop
from dra.telemetry.told import Told

log = get_logger()

# From a part that could not be started to the next try.
RETRY_SECONDS = 10.0
# So often it is looked whether something is to be started.
_LOOK_SECONDS = 60.0


class Part(Protocol):
    """Something that works while this replica leads."""

    def start(self) -> None:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End. What of it still hangs in a request sends nothing more: its client asks the lead."""


class Parts:
    """Starts the parts when the lead comes, and stops them when it goes.

    Args:
        makers: make the parts for a lead, so that nothing of an earlier time as leader is left in them.
    """

    def __init__(
        self, makers: Sequence[Callable[[Lead], Part]], *, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._makers = tuple(makers)
        # Its thread is there before the lead is: when the system has none to give, who tries again must be there.
        self._loop = Loop("fleet-parts", self._tend, seconds=_LOOK_SECONDS)
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._lead: Lead | None = None
        self._running: dict[int, Part] = {}
        self._failures: Told[int] = Told()

    def start(self) -> None:
        """Wait for the lead. Raises HostError: DRA-HOST-NO-THREADS."""
        self._loop.start()

    def stop(self) -> None:
        """End for good; what runs is stopped."""
        self._loop.stop()
        self.lost()

    def lead(self, lead: Lead) -> None:
        """Have the parts started; returns at once."""
        with self._lock:
            self._lead = lead
        self._loop.wake()

    def lost(self) -> None:
        """Stop the parts."""
        with self._lock:
            self._lead = None
            while self._running:
                _, part = self._running.popitem()
                _stop(part)

    def _tend(self) -> float:
        """Start what does not run; give after how many seconds to look again."""
        complete = True
        for number, make in enumerate(self._makers):
            # The lead can be lost between two parts, and is not to wait for all of them.
            with self._lock:
                if self._lead is not None and number not in self._running:
                    complete = self._begin(number, partial(make, self._lead)) and complete
        return _LOOK_SECONDS if complete else self._retry_seconds

    def _begin(self, number: int, make: Callable[[], Part]) -> bool:
        part: Part | None = None
        try:
            part = make()
            part.start()
        except Exception as error:  # marked border: the others and the election go on
            if self._failures.is_news(number, f"{type(error).__name__} {getattr(error, 'code', '')}"):
                report = log.error if isinstance(error, DraError) else log.exception
                report("part_not_started", again_in_s=self._retry_seconds, **error_fields(error))
            if part is not None:
                # What of it runs must not work beside the next one.
                _stop(part)
            return False
        self._running[number] = part
        if self._failures.over(number):
            log.info("part_started_at_last", part=type(part).__name__)
        return True


def _stop(part: Part) -> None:
    try:
        part.stop()
    except Exception:  # marked border: the others must be stopped
        log.exception("part_not_stopped")
