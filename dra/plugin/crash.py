"""A process that kills itself at a chosen step of the journal: for tests of what is found after a crash."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def crash_step(crash_at: tuple[str, int] | None) -> Callable[[str], None]:
    """Give the callable for the journal's steps: it kills this process at the chosen one, for tests."""
    if crash_at is None:
        return lambda _step: None
    wanted, count = crash_at
    lock, seen = threading.Lock(), [0]

    def step(name: str) -> None:
        if name != wanted:
            return
        with lock:
            seen[0] += 1
            reached = seen[0] >= count
        if reached:
            os.kill(os.getpid(), signal.SIGKILL)

    return step
