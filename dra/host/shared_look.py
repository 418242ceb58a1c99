"""A look at the node that callers who ask at the same time share, without anybody getting an old answer.

Eight claims prepared at once would each look at the same hundred files. Whoever comes while a look is under way waits
for the next one, which then serves all who wait: it began after each of them asked, so that it sees all that
happened before they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedLook(Generic[T]):
    """Answers of `look`, each begun after it was asked for. Thread-safe; two looks never run at once."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._begun = 0
        self._last: tuple[int, T] | None = None

    def get(self) -> T:
        """Look, or give what a look gave that began after this call; a look that raises, raises for its caller alone."""
        ticket = self._begun
        with self._lock:
            if self._last is not None and self._last[0] > ticket:
                return self._last[1]
            self._begun += 1
            number = self._begun
            answer = self._look()
            self._last = number, answer
            return answer
