"""Wait for a file to be replaced, without polling.

Where no inotify instance is left the wait polls ten times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dra.host.file_watch import MOVED_TO, FileWatch

_POLL_SECONDS = 0.1


class FolderWatch:
    """Wakes a waiting thread when a file in a folder is replaced, or when `wake` is called.

    One waiter at a time; `wake` and `close` may come from any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._files = FileWatch()
        self._hears = self._files.follow(folder, MOVED_TO)

    def wait(self, until: Callable[[], bool], *, timeout_seconds: float | None = None) -> bool:
        """Block until the condition holds; False after the timeout. It is looked at on every change."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not until():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            if not self._hears:
                left = _POLL_SECONDS if left is None else min(left, _POLL_SECONDS)
            self._files.wait(left)
        return True

    def wake(self) -> None:
        """Make the waiter look at its condition."""
        self._files.wake()

    def close(self) -> None:
        """Give the descriptors back; nobody may be waiting."""
        self._files.close()
