"""Calls into the driver with a deadline: a call that hangs costs its GPU, nothing else.

A thread that is stuck in the driver cannot be stopped, only left behind. Each call runs on a worker thread; if
it is not back in time the caller gets DRA-NVML-HUNG, and until it is back further calls on the same subject
(a GPU) fail at once. Workers are bounded: a driver that hangs everywhere cannot eat the process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from dra.errors import DraError, HostError, StackError
from dra.nvml.errors import HUNG, hung
from dra.nvml.patience import AwakePatience
from dra.telemetry.threads import start_thread

T = TypeVar("T")

MAX_THREADS = 32
# Idle workers that are kept; a scan needs one, a prepare beside it another.
KEEP_IDLE = 2
# As long as calls of a batch wait and none ends, another worker joins after each of these.
JOIN_SECONDS = 0.05


class Job:
    """One call on its way: `abandoned` once nobody waits for it any more. `started`: when a worker took it."""

    __slots__ = ("abandoned", "call", "discard", "error", "finished", "result", "started", "subject")

    def __init__(
        self, subject: str, call: Callable[[], object], *, discard: Callable[[Any], None] | None = None
    ) -> None:
        self.subject = subject
        self.call = call
        self.discard = discard
        self.started = 0.0
        self.finished = False
        self.abandoned = False
        self.result: object = None
        self.error: BaseException | None = None


class Work:
    """Jobs that workers take one after the other. `left`: those that have not ended; `done` when none has not."""

    __slots__ = ("done", "left", "waiting")

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.waiting = deque(jobs)
        self.left = len(self.waiting)
        self.done = threading.Event()


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
        self._idle: list[SimpleQueue[Work | None]] = []
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
        job = Job(subject, call, discard=discard)
        work = Work([job])
        self._worker_for(deadline_seconds, subject=subject).put(work)
        AwakePatience(deadline_seconds, clock=self._clock).wait_for(work.done)
        late = self._leave(work, [job], deadline_seconds)
        if job.error is not None:
            raise job.error
        if late:
            raise late[subject]
        return cast("T", job.result)

    def run_each(
        self, calls: Mapping[str, Callable[[], T]], *, deadline_seconds: float
    ) -> dict[str, T | DraError]:
        """Run one call for each subject; what each gave, or the DraError that it raised.

        One worker does them one after the other; as long as some wait and none ends, another one joins every
        JOIN_SECONDS. So quick calls cost one worker, and slow ones run beside each other: one that hangs costs the
        others next to nothing.
        """
        results: dict[str, T | DraError] = {}
        jobs: list[Job] = []
        for subject, call in calls.items():
            try:
                self.check(subject)
            except DraError as error:
                results[subject] = error
            else:
                jobs.append(Job(subject, call))
        work = Work(jobs)
        why = self._have_done(work, deadline_seconds) if jobs else None
        results.update(self._leave(work, jobs, deadline_seconds, unbegun=why))
        for job in jobs:
            if job.error is not None and not isinstance(job.error, DraError):
                raise job.error
            if job.subject not in results:
                results[job.subject] = job.error or cast("T", job.result)
        return {subject: results[subject] for subject in calls}

    def _have_done(self, work: Work, deadline_seconds: float) -> DraError | None:
        """Wait for the jobs while workers do them; why one that nobody has taken was not, if it is known."""
        # All are taken in time, however many hang.
        pause = min(JOIN_SECONDS, deadline_seconds / (2 * work.left))
        why = self._join(work, deadline_seconds)
        if why is not None:
            return why
        patience = AwakePatience(deadline_seconds, clock=self._clock)
        left = work.left
        while work.waiting and not patience.wait_for(work.done, at_most=pause) and not patience.over:
            if work.left == left:
                why = self._join(work, 0.0)
            left = work.left
        patience.wait_for(work.done)
        return why

    def _join(self, work: Work, wait_seconds: float) -> DraError | None:
        try:
            self._worker_for(wait_seconds).put(work)
        except DraError as error:
            return error
        return None

    def _leave(
        self, work: Work, jobs: Iterable[Job], deadline_seconds: float, *, unbegun: DraError | None = None
    ) -> dict[str, DraError]:
        """Wait no longer: give the errors of the jobs that are late, by subject. They are left behind."""
        errors: dict[str, DraError] = {}
        with self._changed:
            never_begun = set(work.waiting)
            work.waiting.clear()
            for job in jobs:
                if job.finished:
                    continue
                late = hung(job.subject, seconds=deadline_seconds)
                if job in never_begun:
                    # The GPU was not asked, so nothing is stuck in it.
                    errors[job.subject] = unbegun or late
                    continue
                job.abandoned = True
                self._stuck[job.subject] += 1
                self._stuck_since.setdefault(job.subject, job.started)
                errors[job.subject] = late
        return errors

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

    def _worker_for(self, wait_seconds: float, *, subject: str = "") -> SimpleQueue[Work | None]:
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
        queue: SimpleQueue[Work | None] = SimpleQueue()
        try:
            start_thread(threading.Thread(target=self._work, args=(queue,), name="nvml-call", daemon=True))
        except HostError:
            # A worker that never was must not count, else the lanes would be full for ever.
            with self._changed:
                self._threads -= 1
                self._changed.notify()
            raise
        return queue

    def _work(self, queue: SimpleQueue[Work | None]) -> None:
        stay = True
        while stay and (work := queue.get()) is not None:
            job, stay = self._next(work, queue)
            while job is not None:
                self._call(job)
                with self._changed:
                    recovered = job.subject if job.abandoned and self._unstick(job.subject) else None
                    work.left -= 1
                    # Idle before the caller knows: its next call finds this worker.
                    job, stay = self._next(work, queue)
                if work.left == 0:
                    work.done.set()
                if recovered is not None and self._on_recovered is not None:
                    self._on_recovered(recovered)
            del work  # an idle worker keeps nothing alive

    def _next(self, work: Work, queue: SimpleQueue[Work | None]) -> tuple[Job | None, bool]:
        """Take a job; where none waits the worker is idle, or ends. (The job, whether the worker stays.)"""
        with self._changed:
            if work.waiting:
                job = work.waiting.popleft()
                job.started = self._clock()
                return job, True
            stay = len(self._idle) < KEEP_IDLE
            if stay:
                self._idle.append(queue)
            else:
                self._threads -= 1
            self._changed.notify()
            return None, stay

    def _call(self, job: Job) -> None:
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
