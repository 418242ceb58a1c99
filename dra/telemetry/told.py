"""What was said of faults that go on: each once while it lasts, and again when it comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, TypeVar

K = TypeVar("K")
# More faults than this at once, and the eldest may be said again.
MOST = 4096


class Told(Generic[K]):
    """Remembers by key what was said. Not thread-safe."""

    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._said: OrderedDict[K, str] = OrderedDict()

    def is_news(self, key: K, text: str = "") -> bool:
        """Whether this was not said yet, of this fault and in these words; from now on it was."""
        if self._said.get(key) == text:
            return False
        self._said[key] = text
        if len(self._said) > self._most:
            self._said.popitem(last=False)
        return True

    def over(self, key: K) -> bool:
        """Take that a fault has ended; whether it had been told."""
        return self._said.pop(key, None) is not None

    def only(self, keys: Collection[K]) -> None:
        """Take that these faults are all that there are; the others have ended."""
        for key in [each for each in self._said if each not in keys]:
            del self._said[key]
