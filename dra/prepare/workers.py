"""A bounded pool of daemon threads that come when there is work and go when there is none.

Unlike concurrent.futures' pool its threads never hold up the end of the process, and an idle driver has none.
"""

from __future__ import annotations

import contextvars
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from dra.errors import HostError
from dra.telemetry.threads import start_thread

T = TypeVar("T")
_IDLE_SECONDS = 10.0


class WorkerPool:
    """Runs calls in at most `limit` threads; more calls wait for their turn. Thread-safe.

    `keep` threads stay once they are there, so that a call always finds one.
    """

    def __init__(self, name: str, *, limit: int, keep: int = 0, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._name = name
        self._limit = limit
        self._keep = keep
        self._idle_seconds = idle_seconds
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._threads = 0
        # Calls that are queued or running.
        self._outstanding = 0

    @property
    def threads(self) -> int:
        """How many threads there are now."""
        with self._mutex:
            return self._threads

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` run; a future that is cancelled before its turn never runs.

        What is bound to the log here is bound to it there too.

        Raises:
            HostError: DRA-HOST-NO-THREADS: there is no thread and none can be started. With fewer threads than
                wanted the call waits for one of those.
        """
        future: Future[T] = Future()
        with self._mutex:
            if self._outstanding >= self._threads and self._threads < self._limit:
                self._grow()
            self._outstanding += 1
            self._calls.put((future, functools.partial(contextvars.copy_context().run, call)))
        return future

    def close(self) -> None:
        """Let the threads that stay go, too, once the queued calls are done."""
        with self._mutex:
            self._keep = 0
            for _ in range(self._threads):
                self._calls.put(None)

    def _grow(self) -> None:
        try:
            start_thread(threading.Thread(target=self._work, name=self._name, daemon=True))
        except HostError:
            if self._threads == 0:
                raise
            return
        self._threads += 1

    def _work(self) -> None:
        while True:
            try:
                item = self._calls.get(timeout=self._idle_seconds)
            except queue.Empty:
                item = None
            if item is None:
                with self._mutex:
                    if self._calls.empty() and self._threads > self._keep:
                        self._threads -= 1
                        return
                continue
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # handed to who waits
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            # Nothing of the last call is kept alive while this thread waits for the next one.
            del item, future, call
            with self._mutex:
                self._outstanding -= 1
