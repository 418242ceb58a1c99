"""The process `dra fleet`: the election, the parts that run while it leads, and its health over HTTP.

A part is anything with `start` and `stop`; parts are made anew each time, so that nothing of an earlier time as leader
is left in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from dra.errors import DraError, HostError
from dra.fleet.classes import ClassKeeper
from dra.fleet.election import ElectionTimes, Elector
from dra.fleet.metrics import FleetMetrics
from dra.fleet.policy_status import PolicyStatus
from dra.fleet.templates import COLLECT_SECONDS, TemplateKeeper
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.kube.events import EventRecorder
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.metrics import Registry, render
from dra.telemetry.threads import start_thread

log = get_logger()
COMPONENT = "dra-fleet"


class Part(Protocol):
    """Something that works while this replica leads."""

    def start(self) -> None:
        """Begin; returns at once."""

    def stop(self) -> None:
        """End; when it returns nothing of it works any more."""


# Makes a part from the client and the event recorder of the process.
MakePart = Callable[[KubeClient, EventRecorder], Part]


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What the process is told. `port`: of health, 0 is any that is free, negative: none."""

    identity: str
    namespace: str = "dra-driver-nvidia-gpu"
    lease: str = "dra-fleet"
    kubeconfig: str = ""
    kube_qps: float = 20.0
    kube_burst: int = 40
    port: int = -1
    collect_seconds: float = COLLECT_SECONDS
    driver: str = "gpu.nvidia.com"
    times: ElectionTimes = ElectionTimes()  # noqa: RUF009 - frozen


def parts_of(settings: FleetSettings) -> tuple[MakePart, ...]:
    """Give what runs while we lead."""
    return (
        lambda client, events: TemplateKeeper(
            client, events=events, collect_seconds=settings.collect_seconds
        ),
        lambda client, _events: PolicyStatus(client, driver=settings.driver),
        lambda client, _events: ClassKeeper(client, driver=settings.driver),
    )


class Fleet:
    """One replica."""

    def __init__(self, settings: FleetSettings, *, parts: Sequence[MakePart] | None = None) -> None:
        self.settings = settings
        self._makers = parts_of(settings) if parts is None else tuple(parts)
        self._running: list[Part] = []
        options = KubeOptions(kubeconfig=settings.kubeconfig or None, user_agent=COMPONENT)
        self.client = KubeClient(
            Connection(options), qps=settings.kube_qps, burst=settings.kube_burst, field_manager=COMPONENT
        )
        # Renewing the lease must wait for nothing.
        self._lease_client = KubeClient(Connection(options), field_manager=COMPONENT)
        self.events = EventRecorder(self.client, component=COMPONENT)
        self.elector = Elector(
            self._lease_client, namespace=settings.namespace, name=settings.lease, identity=settings.identity,
            on_lead=self._lead, on_lost=self._lost, times=settings.times,
        )  # fmt: skip
        self._health: _Health | None = None

    @property
    def port(self) -> int:
        """The port of health; 0 without."""
        return 0 if self._health is None else int(self._health.server_address[1])

    def start(self) -> None:
        """Take part in the election. Raises HostError."""
        if self.settings.port >= 0:
            registry = Registry()
            registry.add(FleetMetrics(self.client, driver=self.settings.driver))
            self._health = _Health(self.settings.port, lambda: self.elector.trouble, registry)
        self.elector.start()

    def stop(self) -> None:
        """Stop the parts, give the lease up, end."""
        self.elector.stop()
        self.events.stop(timeout_seconds=1.0)
        for client in (self.client, self._lease_client):
            client.close()
        if self._health is not None:
            self._health.end()

    def _lead(self) -> None:
        for make in self._makers:
            try:
                part = make(self.client, self.events)
                part.start()
            except DraError as error:
                log.error("part_not_started", **error_fields(error))  # noqa: TRY400 - for people
            else:
                self._running.append(part)

    def _lost(self) -> None:
        while self._running:
            part = self._running.pop()
            try:
                part.stop()
            except Exception:  # marked border: the others must be stopped
                log.exception("part_not_stopped")


class _Health(ThreadingHTTPServer):
    """`/healthz` says that the process answers, `/readyz` that the API server does; `/metrics` tells of the fleet."""

    daemon_threads = True

    def __init__(self, port: int, trouble: Callable[[], str], registry: Registry) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path.partition("?")[0] == "/metrics":
                    self._metrics()
                    return
                known = self.path in ("/healthz", "/readyz")
                wrong = trouble() if self.path == "/readyz" else ""
                body = f"{wrong or 'ok'}\n".encode()
                self.send_response(404 if not known else 503 if wrong else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _metrics(self) -> None:
                body, kind = render(registry.collect(), accept=self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: Any) -> None:
                pass

        try:
            super().__init__(("", port), Handler)
        except (OSError, OverflowError) as error:
            raise HostError(
                "DRA-FLAG-PORT",
                f"cannot listen on port {port}: {error}",
                remedy="Give another --healthcheck-port.",
            ) from error
        self._thread = threading.Thread(target=self.serve_forever, name="health", daemon=True)
        start_thread(self._thread)

    def end(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self._thread.join(2.0)
