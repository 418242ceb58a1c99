"""The threads that gRPC calls run on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dra.errors import HostError
from dra.prepare.workers import WorkerPool
from dra.telemetry.log import error_fields, get_logger

log = get_logger()


class CallPool(ThreadPoolExecutor):
    """At most `threads` daemon threads, made when needed; all but one end when idle.

    A gRPC server asks for an executor of this class and submits from its only serving thread: an exception there, as
    from a thread that cannot be started, would end the server without a word. One thread is there from `open` on, so
    that a call always has somebody to wait for.
    """

    def __init__(self, name: str, *, threads: int) -> None:
        super().__init__(1)  # its own threads are never used
        self._calls = WorkerPool(name, limit=threads, keep=1)

    def open(self) -> None:
        """Have the first thread.

        Raises:
            HostError: DRA-HOST-NO-THREADS.
        """
        self._calls.submit(lambda: None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call; never raises."""
        try:
            return self._calls.submit(functools.partial(fn, *args, **kwargs))
        except HostError as error:
            log.error("call_dropped", **error_fields(error))  # noqa: TRY400 - the traceback says nothing
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads go once what is queued is done; never waits for them."""
        del wait, cancel_futures
        self._calls.close()
