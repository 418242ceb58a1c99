"""The control plane's thread: claims first, then pods, whenever something changed."""

from __future__ import annotations

import threading

from dra.allocator.model import CompileSelector, Features
from dra.sim.apiserver.server import SimApiServer
from dra.sim.control.api import CallFailed, ControlApi
from dra.sim.control.claims import ClaimController
from dra.sim.control.scheduler import Scheduler
from dra.telemetry.log import get_logger

log = get_logger()


class ControlPlane:
    """Runs the ResourceClaim controller and the scheduler for a simulated API server."""

    def __init__(
        self, server: SimApiServer, compile_selector: CompileSelector, *, features: Features | None = None
    ) -> None:
        self._api = ControlApi(server)
        self._claims = ClaimController(self._api)
        self._scheduler = Scheduler(self._api, compile_selector, features=features)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sim-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stop.set()
        self._api.wake()
        self._thread.join(timeout=5)

    def sync(self) -> None:
        """Do one round of all controllers."""
        self._claims.sync()
        self._scheduler.sync()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.sync()
            except CallFailed as error:
                log.warning("sim_control_failed", error=str(error))
                self._stop.wait(0.2)
                continue
            self._api.wait(1.0)
