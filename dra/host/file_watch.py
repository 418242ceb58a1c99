"""News of files and folders without polling, and a way to wake who waits for them.

Source: inotify(7), eventfd(2). The instances of inotify are few (`fs.inotify.max_user_instances`, 128 for all of root's
containers together), so one is made only when there is something to watch, and its user must be able to do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

from dra.errors import HostError
from dra.host.files import host_error
from dra.telemetry.threads import start_thread

# What to hear of. A folder's: names in it; a file's: itself.
MODIFIED, ATTRIBUTES = 0x2, 0x4
MOVED_FROM, MOVED_TO, CREATED, DELETED = 0x40, 0x80, 0x100, 0x200
SELF_DELETED, SELF_MOVED = 0x400, 0x800
NAMES_CHANGED = MOVED_FROM | MOVED_TO | CREATED | DELETED | SELF_DELETED | SELF_MOVED

_CLOEXEC, _NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_PIECE = 16384


class FileWatch:
    """Waits for news of what it follows. One thread follows and waits; `wake` and `close` may come from any.

    Raises:
        HostError: DRA-HOST-TOO-MANY-FILES: not even the descriptor to be woken by.
    """

    def __init__(self) -> None:
        try:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise host_error(error, "make", Path("eventfd")) from error
        self._notify = -1
        self._followed: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def follow(self, path: Path, events: int) -> bool:
        """Hear of what stands at the path now, and no longer of what stood there before; whether that can be done.

        To be called again after news: another file or folder may have the name. Costs one system call then.
        """
        before, now = self._followed.pop(path, -1), self._add(path, events)
        if now >= 0:
            self._followed[path] = now
        if before >= 0 and before != now:
            # Moved away; where it was deleted the kernel has forgotten it.
            _libc().inotify_rm_watch(self._notify, before)
        return now >= 0

    def _add(self, path: Path, events: int) -> int:
        if self._notify < 0:
            self._notify = _libc().inotify_init1(_CLOEXEC | _NONBLOCK)
        if self._notify < 0:
            return -1
        return int(_libc().inotify_add_watch(self._notify, os.fsencode(path), events))

    def wait(self, timeout_seconds: float | None, *, also: int = -1) -> bool:
        """Block until there is news, until `wake`, or until the time is over (then False).

        `also`: a descriptor that can be read is news too; it is not read.
        """
        poll = select.poll()
        for descriptor in (self._event, self._notify, also):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        news = poll.poll(None if timeout_seconds is None else max(1, int(timeout_seconds * 1000)))
        if self._notify >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._notify, _PIECE)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return bool(news)

    def wake(self) -> None:
        """End the wait that is going on, or the next one."""
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


def start_watching(name: str, run: Callable[[FileWatch], None]) -> tuple[FileWatch, threading.Thread]:
    """Start a thread of this name that runs `run` with a watch of its own; whoever ends it closes the watch.

    Raises:
        HostError: no descriptor or no thread is left; nothing stays open.
    """
    files = FileWatch()
    thread = threading.Thread(target=run, args=(files,), name=name, daemon=True)
    try:
        start_thread(thread)
    except HostError:
        files.close()
        raise
    return files, thread


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
