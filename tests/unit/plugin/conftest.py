"""A short directory for sockets, a client as the kubelet is one, and an engine that answers from a table."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest

from dra.pb.services import Method
from tests.places import SHORT

# For the helpers that stand beside the tests.
sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True)
class FakeDevice:
    request_names: tuple[str, ...] = ("gpu",)
    pool: str = "node-a"
    device: str = "gpu-0"
    cdi_ids: tuple[str, ...] = ("k8s.gpu.nvidia.com/claim=u-gpu-0",)
    share_id: str | None = None


@dataclass
class FakeEngine:
    """Answers each claim with `outcomes[uid]`, or with one device; `gate` holds prepare calls back."""

    outcomes: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    failure: Exception | None = None
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)
    within_seconds: float | None = None

    def prepare(self, refs, *, within_seconds=None):
        self.within_seconds = within_seconds
        self.calls.append(("prepare", [ref.uid for ref in refs]))
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        return {ref.uid: self.outcomes.get(ref.uid, (FakeDevice(),)) for ref in refs}

    def unprepare(self, refs):
        self.calls.append(("unprepare", [ref.uid for ref in refs]))
        if self.failure is not None:
            raise self.failure
        return {ref.uid: self.outcomes.get(ref.uid) for ref in refs}


class Client:
    """Dials a unix socket as the kubelet does; `registration` gives the authority of its other dial."""

    def __init__(self, path: Path, *, registration: bool = False) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if registration:
            options.append(("grpc.default_authority", quote(str(path), safe="")))
        self.channel = grpc.insecure_channel(f"unix:{path}", options=options)

    def call(self, method: Method, request=None, *, timeout: float = 5.0):
        make = self.channel.unary_stream if method.response_streams else self.channel.unary_unary
        stub = make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return stub(method.request() if request is None else request, timeout=timeout)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def short_dir():
    path = Path(tempfile.mkdtemp(prefix="p", dir=SHORT))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def dial():
    clients = []

    def make(path: Path, *, registration: bool = False) -> Client:
        clients.append(Client(path, registration=registration))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def new_engine():
    return FakeEngine


@pytest.fixture
def new_device():
    return FakeDevice


@pytest.fixture
def engine(new_engine):
    return new_engine()


@pytest.fixture
def plugin(short_dir, engine):
    """Make instances of the endpoint under one kubelet root: `plugin(pod_uid=...)`."""
    from dra.health.feed import HealthFeed
    from dra.plugin.endpoint import Endpoint
    from dra.plugin.sockets import plan_sockets

    (short_dir / "registry").mkdir()
    made = []

    def make(*, pod_uid: str = "", on_status: Callable = lambda *_: None, own_engine=None, start=True):
        sockets = plan_sockets(
            "gpu.nvidia.com",
            plugins_dir=short_dir / "plugins",
            registry_dir=short_dir / "registry",
            pod_uid=pod_uid,
        )
        feed = HealthFeed()
        endpoint = Endpoint(
            "gpu.nvidia.com", sockets=sockets, engine=own_engine or engine, feed=feed, on_status=on_status
        )
        endpoint.feed = feed
        made.append(endpoint)
        if start:
            endpoint.start()
        return endpoint

    yield make
    for endpoint in made:
        endpoint.stop(grace_seconds=0)
