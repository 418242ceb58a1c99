"""The small API server and a client of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from tests.unit.kube.tiny_api import TinyApi, kubeconfig_text


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def api() -> Iterator[TinyApi]:
    server = TinyApi()
    yield server
    server.stop()


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[Callable[..., KubeClient]]:
    made: list[KubeClient] = []

    def make(url: str, **options: object) -> KubeClient:
        path = tmp_path / f"kubeconfig-{len(made)}"
        path.write_text(kubeconfig_text(url))
        client = KubeClient(Connection(KubeOptions(kubeconfig=str(path), user_agent="dra-test")), **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(api: TinyApi, client_of: Callable[..., KubeClient]) -> KubeClient:
    return client_of(api.url)
