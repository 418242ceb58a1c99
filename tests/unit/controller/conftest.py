"""The small API server, a client of it, and publishers that are stopped at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra.controller.publisher import Publisher
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from tests.unit.controller.pools import DRIVER, NODE
from tests.unit.kube.tiny_api import TinyApi, kubeconfig_text


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def api() -> Iterator[TinyApi]:
    server = TinyApi()
    server.put("nodes", {"metadata": {"name": NODE, "uid": "node-uid-1"}})
    yield server
    server.stop()


@pytest.fixture
def client(api: TinyApi, tmp_path: Path) -> Iterator[KubeClient]:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig_text(api.url))
    made = KubeClient(Connection(KubeOptions(kubeconfig=str(path))))
    yield made
    made.close()


@pytest.fixture
def publishing(client: KubeClient) -> Iterator[Callable[..., Publisher]]:
    """Start a publisher of the pool given first."""
    started: list[Publisher] = []

    def start(desired: object = None, **options: object) -> Publisher:
        publisher = Publisher(client, NODE, DRIVER, **{"rng": random.Random(5), **options})
        started.append(publisher)
        if desired is not None:
            publisher.set_desired(desired)
        publisher.start()
        return publisher

    yield start
    for publisher in started:
        assert publisher.stop(timeout_seconds=30)
