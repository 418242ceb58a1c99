"""Where XIDs come from: NVML's events and the kernel log, heard together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dra.health.hearing import Hearing
from dra.health.model import Scope, XidEvent
from dra.host.kernel_log import KernelLog, KernelXid
from dra.inventory.model import Inventory
from dra.nvml.event_watch import EventWatch, WatchedGpu, WatchState
from dra.nvml.health_facts import NvmlEvent
from dra.nvml.session import NvmlSession
from dra.telemetry.log import get_logger

log = get_logger()

# XIDs of GPUs that were not seen yet: from before the first look, or of a GPU that is just coming.
MOST_UNPLACED = 64


class Ears:
    """Listens on two threads and keeps what was heard until it is taken. Thread-safe.

    Args:
        session: NVML.
        kernel_log_path: `/dev/kmsg` of the node.
        inventory: what the node has.
        watched: the GPUs whose events are wanted.
        heard: hears that there is something to take, or that the sources changed; true: GPUs should be looked at.
    """

    def __init__(
        self,
        session: NvmlSession,
        *,
        kernel_log_path: Path,
        inventory: Callable[[], Inventory],
        watched: Callable[[], tuple[WatchedGpu, ...]],
        heard: Callable[[bool], None],
    ) -> None:
        self._inventory, self._heard = inventory, heard
        self._path = kernel_log_path
        self._watch = EventWatch(
            session, gpus=watched, told=self._nvml_told, changed=lambda _state: heard(True)
        )
        self._log: KernelLog | None = None
        self._lock = threading.Lock()
        self._hearing = Hearing()
        self._unplaced: deque[KernelXid] = deque(maxlen=MOST_UNPLACED)

    def start(self, *, after: float | None) -> None:
        """Start listening. `after`: seconds since boot until which the log was heard. Raises HostError."""
        self._log = KernelLog(self._path, self._kernel_told, after=after, changed=lambda: self._heard(False))
        self._log.start()
        self._watch.start()

    def stop(self, *, timeout_seconds: float) -> None:
        """Stop listening."""
        self._watch.stop(timeout_seconds=timeout_seconds)
        if self._log is not None:
            self._log.stop(timeout_seconds=timeout_seconds)

    def wake(self) -> None:
        """Try again at once to watch NVML's events."""
        self._watch.wake()

    @property
    def watch(self) -> WatchState:
        """Which GPUs' events are heard from NVML."""
        return self._watch.state

    @property
    def deaf_to_log(self) -> str:
        """Why the kernel log is not heard; empty if it is."""
        return "not started" if self._log is None else self._log.why

    @property
    def waiting(self) -> bool:
        """Whether `take` would give anything."""
        with self._lock:
            return self._hearing.waiting

    def take(self) -> list[tuple[XidEvent, int]]:
        """Give what was heard since, with how often it came."""
        with self._lock:
            return self._hearing.take()

    def place(self, inventory: Inventory) -> None:
        """Find the GPUs of XIDs that the kernel told by address; those of GPUs not seen yet wait for a while."""
        gpus = {gpu.pci_address: gpu.uuid for gpu in inventory.gpus}
        news = False
        with self._lock:
            waiting, self._unplaced = self._unplaced, deque(maxlen=MOST_UNPLACED)
            for found in waiting:
                uuid = gpus.get(found.address)
                if uuid is None:
                    self._unplaced.append(found)
                else:
                    news |= self._hear(XidEvent(Scope(uuid, found.gi, found.ci), found.xid, "kernel log"))
        if news:
            self._heard(False)

    def _kernel_told(self, found: KernelXid) -> None:
        with self._lock:
            self._unplaced.append(found)
        self.place(self._inventory())

    def _nvml_told(self, events: tuple[NvmlEvent, ...]) -> None:
        look = False
        with self._lock:
            for event in events:
                if event.xid is None:
                    # An ECC error or a new recovery action: a check finds what it is.
                    look = True
                else:
                    self._hear(XidEvent(Scope(event.gpu_uuid, event.gi, event.ci), event.xid, "nvml"))
        self._heard(look)

    def _hear(self, event: XidEvent) -> bool:
        event = self._of_whole_gpu(event)
        news = self._hearing.hear(event, now=time.monotonic())
        if news:
            log.debug("xid_heard", gpu_uuid=event.scope.gpu, xid=event.xid, source=event.source)
        return news

    def _of_whole_gpu(self, event: XidEvent) -> XidEvent:
        """Give an XID of a GPU that is not in MIG mode to the whole of it.

        There NVML says 0xFFFFFFFF for the instances, but not every driver does: some say 0.
        """
        scope = event.scope
        if scope.whole:
            return event
        gpu = next((each for each in self._inventory().gpus if each.uuid == scope.gpu), None)
        if gpu is None or gpu.mig_enabled or gpu.mig_devices:
            return event
        return replace(event, scope=Scope(scope.gpu))
