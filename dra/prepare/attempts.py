"""The prepares that are under way in this process, and whether an unprepare of their claim came in between.

A prepare reads its claim from the API before it has the claim's lock. If the claim is unprepared in the meantime, what
was read is of a claim that may be gone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Attempt:
    """A prepare under way; `stale` once an unprepare of its claim ended in the meantime."""

    def __init__(self) -> None:
        self.stale = False


class Attempts:
    """All of them, by claim UID. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_uid: dict[str, set[Attempt]] = {}

    @contextlib.contextmanager
    def under_way(self, uid: str) -> Iterator[Attempt]:
        """Count a prepare as under way while the block runs."""
        attempt = Attempt()
        with self._mutex:
            self._by_uid.setdefault(uid, set()).add(attempt)
        try:
            yield attempt
        finally:
            with self._mutex:
                left = self._by_uid[uid]
                left.discard(attempt)
                if not left:
                    del self._by_uid[uid]

    def outdate(self, uid: str) -> None:
        """Make the attempts of a claim stale: it was unprepared."""
        with self._mutex:
            for attempt in self._by_uid.get(uid, ()):
                attempt.stale = True
