"""Wait for a file to be replaced, without polling.

Source: inotify(7). Where no inotify instance is left the wait polls ten times a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

_IN_MOVED_TO, _IN_CLOEXEC, _IN_NONBLOCK = 0x80, 0o2000000, 0o4000
_POLL_SECONDS = 0.1


class FolderWatch:
    """Wakes a waiting thread when a file in a folder is replaced, or when `wake` is called.

    One waiter at a time; `wake` and `close` may come from any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._notify = self._libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        if self._notify >= 0:
            self._libc.inotify_add_watch(self._notify, os.fsencode(folder), _IN_MOVED_TO)
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def wait(self, until: Callable[[], bool], *, timeout_seconds: float | None = None) -> bool:
        """Block until the condition holds; False after the timeout. It is looked at on every change."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        if self._notify >= 0:
            poll.register(self._notify, select.POLLIN)
        while not until():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._notify < 0:
                left = _POLL_SECONDS if left is None else min(left, _POLL_SECONDS)
            poll.poll(None if left is None else max(1, int(left * 1000)))
            self._drain()
        return True

    def wake(self) -> None:
        """Make the waiter look at its condition."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Give the descriptors back; nobody may be waiting."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._event)
            if self._notify >= 0:
                os.close(self._notify)

    def _drain(self) -> None:
        if self._notify >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._notify, 65536)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
