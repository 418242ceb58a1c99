"""Starting threads, on a machine that may have none left to give; and threads that do the same again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dra.errors import DraError, HostError
from dra.telemetry.log import error_fields, get_logger

log = get_logger()

# Gives after how many seconds it wants its next turn; None: it does not mind.
Job = Callable[[], float | None]


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        HostError: DRA-HOST-NO-THREADS, retryable: the system gives no thread (a pids cgroup, `ulimit -u`, memory).
            The thread object is of no further use.
    """
    try:
        thread.start()
    except RuntimeError as error:
        # Source: CPython; "can't start new thread" is all that it says.
        raise HostError(
            "DRA-HOST-NO-THREADS",
            f"no thread for {thread.name} could be started: {error}",
            remedy="Raise the limit of processes (pids) of the plugin's pod or the node; it is tried again by itself.",
        ) from error


class Loop:
    """A thread that does the same jobs, one after the other, again and again. None ends it, and none keeps another from its turn.

    Args:
        name: of the thread. In the log a job's failures are `<name>_failed` and `<name>_crashed`, with underscores: each
            once until the job works again, which is `<name>_works_again`.
        jobs: raise DraError for what a later round may mend.
        seconds: from the end of a round to the next one, where no job wants it sooner.
        retry_seconds: the same after a round with a failure; as `seconds` if not given.
        first_seconds: from the start to the first round.
        settle_seconds: from a `wake` to the round: what comes meanwhile has its turn with it.
    """

    def __init__(
        self,
        name: str,
        *jobs: Job,
        seconds: float,
        retry_seconds: float | None = None,
        first_seconds: float = 0.0,
        settle_seconds: float = 0.0,
    ) -> None:
        self._name, self._jobs, self._seconds = name, jobs, seconds
        self._retry_seconds = seconds if retry_seconds is None else retry_seconds
        self._first_seconds, self._settle_seconds = first_seconds, settle_seconds
        event = name.replace("-", "_")
        self._failed_event, self._crashed_event = f"{event}_failed", f"{event}_crashed"
        self._not_started_event, self._works_event = f"{event}_not_started", f"{event}_works_again"
        self._failing: dict[int, str] = {}
        self._ending = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def ending(self) -> bool:
        """Whether it was told to end: a job that takes long looks now and then."""
        return self._ending.is_set()

    def start(self) -> None:
        """Begin; may be called again. Raises HostError: DRA-HOST-NO-THREADS."""
        with self._lock:
            if self._thread is None and not self._ending.is_set():
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                start_thread(thread)
                self._thread = thread

    def begin(self) -> None:
        """Begin, where a system without threads is no reason to fail: the next call tries again."""
        try:
            self.start()
        except HostError as error:
            log.warning(self._not_started_event, **error_fields(error))

    def wake(self) -> None:
        """Have the next round now, or as soon as it has settled."""
        self._woken.set()

    def pause(self, seconds: float) -> bool:
        """Wait in a job; whether it was told to end meanwhile."""
        return self._ending.wait(seconds)

    def stop(self, *, timeout_seconds: float = 5.0) -> bool:
        """End after the job under way, and wait so long for that; whether the thread is gone."""
        self._ending.set()
        self._woken.set()
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        pause = self._first_seconds
        while not self._ending.is_set():
            if pause > 0 and self._woken.wait(pause) and self._settle_seconds > 0:
                self._ending.wait(self._settle_seconds)
            # Before the round: what comes during it is worth another one.
            self._woken.clear()
            if self._ending.is_set():
                return
            pause = self._round()

    def _round(self) -> float:
        pause = self._seconds
        for number, job in enumerate(self._jobs):
            try:
                wanted = job()
            except DraError as error:
                self._failed(number, error.code, error)
            except Exception as error:  # marked border: the next round tries again
                self._failed(number, type(error).__name__, error)
            else:
                if self._failing.pop(number, None) is not None:
                    log.info(self._works_event)
                pause = pause if wanted is None else min(pause, wanted)
                continue
            pause = min(pause, self._retry_seconds)
        return pause

    def _failed(self, number: int, kind: str, error: Exception) -> None:
        if self._failing.get(number) == kind:
            return
        self._failing[number] = kind
        if isinstance(error, DraError):
            log.warning(self._failed_event, **error_fields(error))
        else:
            log.error(self._crashed_event, exc_info=error, **error_fields(error))
