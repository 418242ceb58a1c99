"""A bounded pool of daemon threads that come when there is work and go when there is none.

Unlike concurrent.futures' pool its threads never hold up the end of the process, and an idle driver has none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_IDLE_SECONDS = 10.0


class WorkerPool:
    """Runs calls in at most `limit` threads; more calls wait for their turn. Thread-safe."""

    def __init__(self, name: str, *, limit: int, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._name = name
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
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
        """Have `call` run; a future that is cancelled before its turn never runs."""
        future: Future[T] = Future()
        with self._mutex:
            self._outstanding += 1
            self._calls.put((future, call))
            if self._outstanding > self._threads and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, call = self._calls.get(timeout=self._idle_seconds)
            except queue.Empty:
                with self._mutex:
                    if self._calls.empty():
                        self._threads -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # handed to who waits
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            # Nothing of the last call is kept alive while this thread waits for the next one.
            del future, call
            with self._mutex:
                self._outstanding -= 1
