"""The kubelet's side of one instance: both sockets, in the order in which they start and stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from dra.health.feed import HealthFeed
from dra.host.files import ensure_dir
from dra.plugin.health_service import HealthService
from dra.plugin.prepare_service import Engine, Measure, OnFailure, PrepareService, unmeasured
from dra.plugin.registration import Registration
from dra.plugin.server import UnixServer, build_server
from dra.plugin.socket_guard import SocketGuard
from dra.plugin.sockets import SocketPaths, find_sockets_of, remove_stale
from dra.telemetry.log import get_logger

log = get_logger()

# Longer than no prepare call runs: the kubelet gives up after 45 seconds.
STOP_GRACE_SECONDS = 40.0
# How often a stop that waits for calls looks whether somebody is in a hurry.
_LOOK_SECONDS = 0.1


class Endpoint:
    """Serves one instance of the driver to the kubelet.

    Args:
        driver: the driver's name.
        sockets: where to serve.
        engine: prepares claims.
        feed: what the health stream says.
        on_status: told what the kubelet answers to the registration.
        on_failure: told of each claim that could not be prepared or unprepared.
        measure: runs around each call.
    """

    def __init__(
        self,
        driver: str,
        *,
        sockets: SocketPaths,
        engine: Engine,
        feed: HealthFeed,
        on_status: Callable[[bool, str], None] = lambda _accepted, _error: None,
        on_failure: OnFailure = lambda _verb, _ref, _error: None,
        measure: Measure = unmeasured,
    ) -> None:
        self.sockets = sockets
        self._driver = driver
        self._feed = feed
        self._prepare = PrepareService(engine, on_failure=on_failure, measure=measure)
        self._health = HealthService(feed)
        self._registration = Registration(driver, endpoint=sockets.service, on_status=on_status)
        self._service_server = UnixServer(sockets.service, driver=driver, build=self._build_service)
        self._registration_server = self._registration.server(sockets.registration)
        self._registration_stopped = threading.Event()
        self._hurry = threading.Event()
        self._guard = SocketGuard((self._service_server, self._registration_server))

    def start(self) -> None:
        """Remove what dead instances left, serve, then register. Never waits for anything else.

        A directory of the kubelet's that is missing is not an error: the guard serves there as soon as it exists.

        Raises:
            HostError: our own directory among the kubelet's plugins can not be made.
        """
        ensure_dir(self.sockets.service.parent, mode=0o750)
        left = find_sockets_of(
            self._driver,
            plugins_dir=self.sockets.service.parent.parent,
            registry_dir=self.sockets.registration.parent,
        )
        for path in remove_stale(left):
            log.info("stale_socket_removed", path=str(path))
        self._guard.open_all()
        self._guard.start()

    def leave(self) -> None:
        """Take leave of the kubelet: the registration goes, health streams end; calls are still served."""
        self._guard.stop()
        self._registration_stopped = self._registration_server.close(grace_seconds=1.0)
        self._feed.close()

    def stop(self, *, grace_seconds: float = STOP_GRACE_SECONDS) -> bool:
        """Leave, then finish the calls in flight; gives whether they all ended within the grace period."""
        self.leave()
        service = self._service_server.close(grace_seconds=grace_seconds)
        finished = self._wait_for_calls(service, seconds=grace_seconds + 1.0)
        self._wait_for_calls(self._registration_stopped, seconds=2.0)
        self._registration.shut()
        self._health.shut()
        self._prepare.shut()
        return finished

    def hurry(self) -> None:
        """Have a `stop` that runs in another thread, or will, leave the calls in flight behind."""
        self._hurry.set()

    def _wait_for_calls(self, ended: threading.Event, *, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not ended.wait(_LOOK_SECONDS):
            if self._hurry.is_set() or time.monotonic() >= end:
                return False
        return True

    @property
    def present(self) -> bool:
        """Whether both socket files lead to this instance."""
        return self._service_server.present and self._registration_server.present

    def _build_service(self) -> grpc.Server:
        return build_server((*self._prepare.methods(), *self._health.methods()), pool=self._prepare.pool)
