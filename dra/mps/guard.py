"""Keeps the keeper: starts it again when it ends by itself. In a pod the container ends with its first process, and all
daemons with the container; this one is so small that it has no reason to.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
# A keeper that lived so long begins anew with short pauses.
_STEADY_SECONDS = 60.0


class Guard:
    """Runs a program until it is told to stop."""

    def __init__(self, command: Sequence[str], *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._command, self._sleep = list(command), sleep
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Run it, again and again; call from the main thread. SIGTERM and SIGINT end it, and the program first."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        pause = _FIRST_PAUSE
        while not self._stopping:
            began = time.monotonic()
            try:
                self._child = subprocess.Popen(self._command)
            except OSError as error:
                print(f"cannot start {self._command[0]}: {error}", flush=True)
            else:
                if self._stopping:
                    self._pass_on()
                self._child.wait()
            if self._stopping:
                break
            if time.monotonic() - began > _STEADY_SECONDS:
                pause = _FIRST_PAUSE
            self._sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        return 0

    def _stop(self, _number: int, _frame: object) -> None:
        self._stopping = True
        self._pass_on()

    def _pass_on(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)
