"""The control plane's thread: workloads, claims, pods, evictions, whenever something changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dra.allocator.model import CompileSelector, Features
from dra.sim.apiserver.server import SimApiServer
from dra.sim.control.api import ControlApi
from dra.sim.control.claims import ClaimController
from dra.sim.control.eviction import TaintEviction
from dra.sim.control.scheduler import Scheduler
from dra.sim.control.workloads import WorkloadControllers
from dra.telemetry.log import error_fields, get_logger

log = get_logger()

# Without any change everything is looked at again after so long.
RESYNC_SECONDS = 5.0


class ControlPlane:
    """Runs the controllers and the scheduler for a simulated API server."""

    def __init__(
        self, server: SimApiServer, compile_selector: CompileSelector, *, features: Features | None = None
    ) -> None:
        self._api = ControlApi(server)
        self._workloads = WorkloadControllers(self._api)
        self._claims = ClaimController(self._api)
        self._scheduler = Scheduler(self._api, compile_selector, features=features)
        self._eviction = TaintEviction(self._api)
        self._api.on_change = self._scheduler.noticed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sim-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._api.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def sync(self) -> float:
        """Do one round of all controllers; gives the seconds after which one must run again at the latest."""
        due = RESYNC_SECONDS
        for step in (self._workloads.sync, self._claims.sync, self._scheduler.sync, self._eviction.sync):
            asked = self._guarded(step)
            due = due if asked is None else min(due, asked)
        return due

    def _guarded(self, step: Callable[[], float | None]) -> float | None:
        # A marked border: one controller that fails must not end the others.
        try:
            return step()
        except Exception as error:
            log.exception("sim_control_failed", **error_fields(error))
            return 1.0

    def _run(self) -> None:
        while not self._stop.is_set():
            self._api.wait(self.sync())
