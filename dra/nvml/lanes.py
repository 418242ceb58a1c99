"""Calls into the driver with a deadline: a call that hangs costs its GPU, nothing else.

A thread that is stuck in the driver cannot be stopped, only left behind. Each call runs on a worker thread; if
it is not back in time the caller gets DRA-NVML-HUNG, and until it is back further calls on the same subject
(a GPU) fail at once. Workers are bounded: a driver that hangs everywhere cannot eat the process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from dra.errors import DraError, HostError, StackError
from dra.nvml.errors import HUNG, hung
from dra.telemetry.threads import start_thread

T = TypeVar("T")

MAX_THREADS = 32
# Idle workers that are kept; a scan needs one, a prepare beside it another.
KEEP_IDLE = 2
# A wait of so long that took so much longer is one in which the process did not run.
_SLICE_SECONDS = 0.5
_OVERSLEPT_SECONDS = 1.0


class Job:
    """One call on its way: `abandoned` once nobody waits for it any more."""

    __slots__ = ("abandoned", "call", "discard", "done", "error", "finished", "result", "started", "subject")

    def __init__(
        self,
        subject: str,
        call: Callable[[], object],
        *,
        discard: Callable[[Any], None] | None,
        started: float,
    ) -> None:
        self.subject = subject
        self.call = call
        self.discard = discard
        self.started = started
        self.done = threading.Event()
        self.finished = False
        self.abandoned = False
        self.result: object = None
        self.error: BaseException | None = None


class AwakePatience:
    """How long a caller still waits, counted in the time in which this process ran. One thread uses it.

    While the process is stopped (a paused machine, a frozen pod) no answer can arrive either: a call that was under way
    when that began has not hung.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float]) -> None:
        self._left, self._clock = seconds, clock

    def wait_for(self, event: threading.Event) -> bool:
        """Wait until the event is set or the patience is at an end; whether it is set."""
        while self._left > 0:
            asked = min(self._left, _SLICE_SECONDS)
            began = self._clock()
            if event.wait(asked):
                self._left -= min(asked, self._clock() - began)
                return True
            if self._clock() - began < asked + _OVERSLEPT_SECONDS:
                self._left -= asked
        return event.is_set()


_current = threading.local()


def current_job() -> Job | None:
    """Give the job that runs on this thread; None outside a worker."""
    return getattr(_current, "job", None)


class CallLanes:
    """Runs calls on bounded worker threads, by subject. Thread-safe.

    Args:
        max_threads: workers at most, the stuck ones included.
        clock: monotonic seconds.
        on_recovered: told the subject when its last stuck call has come back; called on a worker thread.
    """

    def __init__(
        self,
        *,
        max_threads: int = MAX_THREADS,
        clock: Callable[[], float] = time.monotonic,
        on_recovered: Callable[[str], None] | None = None,
    ) -> None:
        self._max_threads = max_threads
        self._clock = clock
        self._on_recovered = on_recovered
        self._changed = threading.Condition()
        self._idle: list[SimpleQueue[Job | None]] = []
        self._threads = 0
        self._stuck: Counter[str] = Counter()
        self._stuck_since: dict[str, float] = {}

    def run(
        self,
        subject: str,
        call: Callable[[], T],
        *,
        deadline_seconds: float,
        discard: Callable[[T], None] | None = None,
    ) -> T:
        """Give the call's result, or raise what it raised.

        Args:
            subject: what a hang is charged to.
            call: runs on a worker thread.
            deadline_seconds: how long the caller waits.
            discard: takes the result (on the worker) when it comes after the caller has left.

        Raises:
            DeviceError, StackError: DRA-NVML-HUNG when the call is not back in time, or an earlier call on the
                same subject is still stuck, or no worker came free in time.
            HostError: DRA-HOST-NO-THREADS.
        """
        job = self._start(subject, call, discard, deadline_seconds)
        outcome = self._finish(job, AwakePatience(deadline_seconds, clock=self._clock), deadline_seconds)
        if job.error is not None:
            raise job.error
        if outcome is not None:
            raise outcome
        return cast("T", job.result)

    def run_each(
        self, calls: Mapping[str, Callable[[], T]], *, deadline_seconds: float
    ) -> dict[str, T | DraError]:
        """Run one call for each subject, all at once; what each gave, or the DraError that it raised.

        One that hangs costs the others nothing but the wait.
        """
        patience = AwakePatience(deadline_seconds, clock=self._clock)
        jobs: dict[str, Job | DraError] = {}
        for subject, call in calls.items():
            try:
                jobs[subject] = self._start(subject, call, None, deadline_seconds)
            except DraError as error:
                jobs[subject] = error
        results: dict[str, T | DraError] = {}
        for subject, job in jobs.items():
            if isinstance(job, DraError):
                results[subject] = job
                continue
            late = self._finish(job, patience, deadline_seconds)
            if job.error is not None and not isinstance(job.error, DraError):
                raise job.error
            results[subject] = late or job.error or cast("T", job.result)
        return results

    def _start(
        self,
        subject: str,
        call: Callable[[], object],
        discard: Callable[[Any], None] | None,
        wait_seconds: float,
    ) -> Job:
        job = Job(subject, call, discard=discard, started=self._clock())
        self._worker_for(subject, wait_seconds).put(job)
        return job

    def _finish(self, job: Job, patience: AwakePatience, deadline_seconds: float) -> DraError | None:
        """Wait for a job; an error (and the job left behind) when it is late."""
        if not patience.wait_for(job.done):
            with self._changed:
                if not job.finished:
                    job.abandoned = True
                    self._stuck[job.subject] += 1
                    self._stuck_since.setdefault(job.subject, job.started)
                    return hung(job.subject, seconds=deadline_seconds)
        return None

    @property
    def hung(self) -> dict[str, float]:
        """Subjects with a stuck call, with the seconds it has been stuck."""
        now = self._clock()
        with self._changed:
            return {subject: now - since for subject, since in self._stuck_since.items()}

    @property
    def thread_count(self) -> int:
        """Workers that exist now, stuck ones included."""
        with self._changed:
            return self._threads

    def check(self, subject: str) -> None:
        """Raise DRA-NVML-HUNG if the subject has a stuck call."""
        with self._changed:
            self._check(subject)

    def close(self) -> None:
        """Let the idle workers end. Stuck ones end when the driver lets them."""
        with self._changed:
            for queue in self._idle:
                queue.put(None)
            self._threads -= len(self._idle)
            self._idle.clear()

    def _check(self, subject: str) -> None:
        since = self._stuck_since.get(subject)
        if since is not None:
            raise hung(subject, seconds=self._clock() - since)

    def _worker_for(self, subject: str, wait_seconds: float) -> SimpleQueue[Job | None]:
        with self._changed:
            self._check(subject)
            if not self._idle and self._threads >= self._max_threads:
                self._changed.wait_for(
                    lambda: bool(self._idle) or self._threads < self._max_threads, wait_seconds
                )
                self._check(subject)
            if self._idle:
                return self._idle.pop()
            if self._threads >= self._max_threads:
                raise StackError(
                    HUNG,
                    f"NVML: all {self._max_threads} calls that may run at once are waiting for the driver",
                    remedy="Look for 'NVRM' in the kernel log (dmesg); drain and reboot the node.",
                )
            self._threads += 1
        queue: SimpleQueue[Job | None] = SimpleQueue()
        try:
            start_thread(threading.Thread(target=self._work, args=(queue,), name="nvml-call", daemon=True))
        except HostError:
            # A worker that never was must not count, else the lanes would be full for ever.
            with self._changed:
                self._threads -= 1
                self._changed.notify()
            raise
        return queue

    def _work(self, queue: SimpleQueue[Job | None]) -> None:
        while (job := queue.get()) is not None:
            _current.job = job
            try:
                job.result = job.call()
            except BaseException as error:  # handed to the caller, whatever it is
                job.error = error
            _current.job = None
            with self._changed:
                job.finished = True
            if job.abandoned and job.discard is not None and job.error is None:
                job.discard(job.result)
            with self._changed:
                recovered = job.abandoned and self._unstick(job.subject)
                stay = len(self._idle) < KEEP_IDLE
                if stay:
                    self._idle.append(queue)
                else:
                    self._threads -= 1
                self._changed.notify()
            job.done.set()
            if recovered and self._on_recovered is not None:
                self._on_recovered(job.subject)
            del job  # an idle worker keeps nothing alive
            if not stay:
                return

    def _unstick(self, subject: str) -> bool:
        self._stuck[subject] -= 1
        if self._stuck[subject] > 0:
            return False
        del self._stuck[subject]
        self._stuck_since.pop(subject, None)
        return True


def abandoned_error(job: Job) -> DraError:
    """Give the error that ends an abandoned job at its next call: its handles may be stale by then."""
    return hung(job.subject, seconds=0)
