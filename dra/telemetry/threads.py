"""Starting threads, on a machine that may have none left to give."""

from __future__ import annotations

import threading

from dra.errors import HostError


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
