"""An index over one field of a resource's objects, so that what is about one node costs the same in a large cluster.

Lists that select the field read only what they give, and watches that select it wake only for their own objects. Source:
the watch cache of the API server, which has such an index over `spec.nodeName` of Pods and ResourceSlices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Key = tuple[str, str]


class Index:
    """The keys of the objects by the value of a field. The storage's lock guards it.

    Args:
        value_of: gives the field of an object, '' where it has none.
    """

    def __init__(self, value_of: Callable[[Json], str], lock: threading.RLock) -> None:
        self._value_of = value_of
        self._lock = lock
        # The inner dict is a set.
        self._keys: dict[str, dict[Key, None]] = {}
        self._changed: dict[str, threading.Condition] = {}
        # When an object with this value was last written, for values that somebody waits for.
        self._last: dict[str, int] = {}

    def keys(self, value: str) -> list[Key]:
        """Give the keys of the objects with this value, in the order of keys."""
        return sorted(self._keys.get(value, ()), key="/".join)

    def note(self, revision: int, key: Key, before: Json | None, after: Json | None) -> None:
        """Take note of a write, and wake who waits for it."""
        old = None if before is None else self._value_of(before)
        new = None if after is None else self._value_of(after)
        if old is not None and old != new:
            kept = self._keys[old]
            kept.pop(key, None)
            if not kept:
                del self._keys[old]
        if new is not None and new != old:
            self._keys.setdefault(new, {})[key] = None
        for value in {old, new} - {None}:
            waiting = self._changed.get(str(value))
            if waiting is not None:
                self._last[str(value)] = revision
                waiting.notify_all()

    def changed(self, value: str) -> threading.Condition:
        """Give what is notified when an object with this value is written."""
        with self._lock:
            return self._changed.setdefault(value, threading.Condition(self._lock))

    def last(self, value: str) -> int:
        """Give the revision of the last write of an object with this value since somebody waits for it, or 0."""
        return self._last.get(value, 0)

    def wake_all(self) -> None:
        """Wake everybody."""
        for waiting in self._changed.values():
            waiting.notify_all()
