"""A thread that does the same jobs again and again, for parts of `dra fleet` that look instead of following."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dra.errors import DraError
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()


class Rounds:
    """Does the jobs one after the other, then waits. A job that fails keeps no other from its turn.

    Args:
        name: of the thread; in the log its failures are `<name>_failed`, with underscores.
        jobs: raise DraError for what the next round may mend.
        seconds: between two rounds.
    """

    def __init__(self, name: str, *jobs: Callable[[], None], seconds: float) -> None:
        self._name, self._jobs, self._seconds = name, jobs, seconds
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        start_thread(thread)
        self._thread = thread

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """End, after the job that runs."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        event = self._name.replace("-", "_")
        failed, crashed = f"{event}_failed", f"{event}_crashed"
        while not self._ending.is_set():
            for job in self._jobs:
                try:
                    job()
                except DraError as error:
                    log.warning(failed, **error_fields(error))
                except Exception:  # marked border: the next round tries again
                    log.exception(crashed)
            self._ending.wait(self._seconds)
