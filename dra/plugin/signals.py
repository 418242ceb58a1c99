"""Signals as a queue that the main thread reads.

A Python handler runs between two instructions of the main thread, whatever that holds at the moment: one that logs or
sets an event waits for ever for a lock that its own thread has. Here a handler does nothing, and the number of the
signal is written to a pipe by C code. Unlike a blocked signal mask, this asks nothing of other threads and of child
processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# From a keyboard: whoever says it twice does not want to wait.
HURRY_SIGNALS = (signal.SIGINT, signal.SIGQUIT)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the number is in the pipe already."""


class SignalQueue:
    """Takes the stop signals and SIGUSR1 from now on. Make it early, and in the main thread.

    A process that is the first of its container never gets a signal for which it has no handler.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # Source: signal.set_wakeup_fd: the C handler writes the number.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, _ignore)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Give the next signal's number, 0 for `wake`, None after the timeout."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._read, 1)[0]
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._poll.poll(None if left is None else left * 1000)

    def wake(self) -> None:
        """Have a `wait` give 0. For any thread."""
        with contextlib.suppress(BlockingIOError):  # full of signals: it wakes anyway
            os.write(self._write, b"\0")


def end_process(status: int) -> NoReturn:
    """End now. The interpreter's own end waits for threads, and for locks of threads that it has frozen."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    # Each line of the log was flushed when it was written.
    os._exit(status)
