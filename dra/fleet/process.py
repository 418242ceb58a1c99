"""The process `dra fleet`: the election, the parts that run while it leads, and its health over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dra.errors import HostError
from dra.fleet.classes import ClassKeeper
from dra.fleet.copies import Copies
from dra.fleet.election import ElectionTimes, Elector, Lead
from dra.fleet.metrics import FleetMetrics
from dra.fleet.parts import RETRY_SECONDS, Part, Parts
from dra.fleet.policy_status import PolicyStatus
from dra.fleet.templates import COLLECT_SECONDS, TemplateKeeper
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions, agent_of
from dra.kube.events import EventRecorder
from dra.telemetry.http import HttpServer, Request, Response, Route
from dra.telemetry.metrics import Registry, render

COMPONENT = "dra-fleet"
MAX_PORT = 65_535


# Makes a part from the client and the event recorder of the process.
MakePart = Callable[[KubeClient, EventRecorder], Part]


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What the process is told.

    Args:
        port: of health; 0 is any that is free, negative: none.
        retry_seconds: from a part that could not be started to the next try.
    """

    identity: str
    namespace: str = "dra-driver-nvidia-gpu"
    lease: str = "dra-fleet"
    kubeconfig: str = ""
    kube_qps: float = 20.0
    kube_burst: int = 40
    port: int = -1
    collect_seconds: float = COLLECT_SECONDS
    driver: str = "gpu.nvidia.com"
    retry_seconds: float = RETRY_SECONDS
    times: ElectionTimes = ElectionTimes()  # noqa: RUF009 - frozen


class Watch:
    """What looks at slices, nodes and policies: parts that share the copies of these.

    Args:
        tell: hears the copies while this works, and None when it ends.
    """

    def __init__(self, client: KubeClient, *, driver: str, tell: Callable[[Copies | None], None]) -> None:
        self._tell = tell
        self._copies = Copies(client, driver=driver)
        self._parts: tuple[Part, ...] = (
            PolicyStatus(client, driver=driver, copies=self._copies),
            ClassKeeper(client, driver=driver, copies=self._copies),
        )

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        self._copies.start()
        for part in self._parts:
            part.start()
        self._tell(self._copies)

    def stop(self) -> None:
        """End."""
        self._tell(None)
        # First: who waits for the copies is let go.
        self._copies.stop()
        for part in self._parts:
            part.stop()


def parts_of(settings: FleetSettings, tell: Callable[[Copies | None], None]) -> tuple[MakePart, ...]:
    """Give what runs while we lead; `tell` as in `Watch`."""
    return (
        lambda client, events: TemplateKeeper(
            client, events=events, collect_seconds=settings.collect_seconds
        ),
        lambda client, _events: Watch(client, driver=settings.driver, tell=tell),
    )


class Fleet:
    """One replica."""

    def __init__(self, settings: FleetSettings, *, parts: Sequence[MakePart] | None = None) -> None:
        self.settings = settings
        options = KubeOptions(
            kubeconfig=settings.kubeconfig or None, user_agent=agent_of(COMPONENT, settings.identity)
        )
        self.client = KubeClient(
            Connection(options), qps=settings.kube_qps, burst=settings.kube_burst, field_manager=COMPONENT
        )
        # Renewing the lease must wait for nothing.
        self._lease_client = KubeClient(Connection(options), field_manager=COMPONENT)
        self._copies: Copies | None = None
        makers = parts_of(settings, self._follow) if parts is None else parts
        self.parts = Parts(
            [partial(self._make, make) for make in makers], retry_seconds=settings.retry_seconds
        )
        self.elector = Elector(
            self._lease_client, namespace=settings.namespace, name=settings.lease, identity=settings.identity,
            on_lead=self.parts.lead, on_lost=self.parts.lost, times=settings.times,
        )  # fmt: skip
        self.events = EventRecorder(self.client.fenced(self.elector.check), component=COMPONENT)
        self._health: HttpServer | None = None

    @property
    def port(self) -> int:
        """The port of health; 0 without."""
        return 0 if self._health is None else self._health.port

    def start(self) -> None:
        """Take part in the election. Raises HostError."""
        if self.settings.port >= 0:
            registry = Registry()
            registry.add(FleetMetrics(lambda: self._copies, driver=self.settings.driver))
            self._health = _listen(
                self.settings.port, trouble=lambda: self.elector.trouble, registry=registry
            )
        self.parts.start()
        self.elector.start()

    def stop(self) -> None:
        """Stop the parts, give the lease up, end."""
        self.elector.stop()
        self.parts.stop()
        self.events.stop(timeout_seconds=1.0)
        for client in (self.client, self._lease_client):
            client.close()
        if self._health is not None:
            self._health.stop()

    def _follow(self, copies: Copies | None) -> None:
        self._copies = copies

    def _make(self, make: MakePart, lead: Lead) -> Part:
        """Make a part whose client writes in the name of this lead and no other."""
        return make(self.client.fenced(lead.check), self.events)


def _listen(port: int, *, trouble: Callable[[], str], registry: Registry) -> HttpServer:
    """Serve `/healthz` (the process answers), `/readyz` (the API server does) and `/metrics` (of the fleet).

    Raises:
        HostError: DRA-FLAG-PORT, DRA-HOST-NO-THREADS.
    """

    def ready(_request: Request) -> Response:
        wrong = trouble()
        return Response(f"{wrong or 'ok'}\n".encode(), status=503 if wrong else 200)

    def metrics(request: Request) -> Response:
        body, kind = render(registry.collect(), accept=request.headers.get("accept", ""))
        return Response(body, kind)

    routes = {
        "/healthz": Route(lambda _request: Response(b"ok\n"), quick=True),
        "/readyz": Route(ready, quick=True),
        "/metrics": Route(metrics),
    }
    if port <= MAX_PORT:
        server = HttpServer(f":{port}", routes, name="health")
        server.start()
        if server.port:
            return server
        server.stop()
    raise HostError(
        "DRA-FLAG-PORT", f"cannot listen on port {port}", remedy="Give another --healthcheck-port."
    )
