"""The connections that are open, and until when each may take to send its next request whole.

A client that sends a byte now and then is no faster than one that sends nothing. When there is no room, the one that has
been waited for longest goes: whoever comes is more likely to ask something.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

# How long a connection that was pushed out may take to make room; its thread only has to notice.
_ROOM_SECONDS = 2.0


class Connections:
    """Thread-safe.

    Args:
        most: at once.
        clock: monotonic seconds.
    """

    def __init__(self, *, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._room = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        # Until when; infinite while a request is being answered.
        self._until: dict[socket.socket, float] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._until)

    def enter(self, connection: socket.socket, *, seconds: float) -> bool:
        """Take a connection in and wait so long for it; False if there is no room, which is rare."""
        if not self._room.acquire(blocking=False) and not (
            self._push_out() and self._room.acquire(timeout=_ROOM_SECONDS)
        ):
            return False
        self.expect(connection, seconds=seconds)
        return True

    def expect(self, connection: socket.socket, *, seconds: float) -> None:
        """Wait so long for what comes next on a connection."""
        with self._lock:
            self._until[connection] = self._clock() + seconds

    def answering(self, connection: socket.socket) -> None:
        """Take that what was waited for is there."""
        with self._lock:
            self._until[connection] = math.inf

    def become(self, connection: socket.socket, secure: socket.socket) -> None:
        """Go on with a connection as another object: TLS takes the descriptor over."""
        with self._lock:
            self._until[secure] = self._until.pop(connection)

    def leave(self, connection: socket.socket) -> None:
        """Take that a connection has ended."""
        with self._lock:
            self._until.pop(connection, None)
        self._room.release()

    def end_late(self) -> None:
        """End those whose time is over."""
        now = self._clock()
        with self._lock:
            late = [connection for connection, until in self._until.items() if until <= now]
        for connection in late:
            _end(connection)

    def end_all(self) -> None:
        """End all."""
        with self._lock:
            left = list(self._until)
        for connection in left:
            _end(connection)

    def _push_out(self) -> bool:
        """End the one that has been waited for longest; False if all are being answered."""
        with self._lock:
            waiting = [(until, connection) for connection, until in self._until.items() if until < math.inf]
            if not waiting:
                return False
            _, connection = min(waiting, key=lambda each: each[0])
            # Not chosen a second time.
            self._until[connection] = math.inf
        _end(connection)
        return True


def _end(connection: socket.socket) -> None:
    # Its thread, which reads, sees the end.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
