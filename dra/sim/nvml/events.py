"""Event sets: who waits for what, and what has already been told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dra.sim.nvml.state import Event, NodeState
from dra.sim.nvml.watch import FolderWatch


class EventSet:
    """GPUs and event types that one waiter is interested in.

    Events from before the registration are not told. A lost GPU among the registered ends every wait, as long
    as it is lost.
    """

    def __init__(self, folder: Path) -> None:
        self._watch = FolderWatch(folder)
        self._lock = threading.Lock()
        self._waiting = threading.Lock()
        self._masks: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self.closed = False

    def register(self, uuid_text: str, mask: int, *, seq: int) -> None:
        """Add event types of a GPU, from the event after `seq` on."""
        with self._lock:
            self._masks[uuid_text] = self._masks.get(uuid_text, 0) | mask
            self._since.setdefault(uuid_text, seq)

    def take(self, state: NodeState) -> Event | None:
        """Give the oldest event that was not told yet."""
        with self._lock:
            for event in state.events:
                if (
                    event.seq > self._since.get(event.uuid, event.seq)
                    and event.kind & self._masks[event.uuid]
                ):
                    self._since[event.uuid] = event.seq
                    return event
        return None

    def lost(self, state: NodeState) -> str:
        """Give the UUID of a registered GPU that is gone, empty if all are there."""
        with self._lock:
            gone = {gpu.uuid for gpu in state.gpus if gpu.lost or not gpu.seen}
            return next((uuid_text for uuid_text in self._masks if uuid_text in gone), "")

    def has_news(self, state: NodeState) -> bool:
        """Say whether a wait would end now."""
        if self.closed or self.lost(state):
            return True
        with self._lock:
            return any(
                event.seq > self._since.get(event.uuid, event.seq) and event.kind & self._masks[event.uuid]
                for event in state.events
            )

    def wait(self, read: Callable[[], NodeState], *, timeout_seconds: float) -> bool:
        """Block until there is news; False after the timeout. `read` gives the state."""
        with self._waiting:
            return self._watch.wait(lambda: self.has_news(read()), timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """End the wait that is going on and free the set."""
        self.closed = True
        self._watch.wake()
        with self._waiting:
            self._watch.close()
