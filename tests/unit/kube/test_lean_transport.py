"""The transport is loaded without what it does not use; that works, and later imports get the real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

LATER = """
import importlib.metadata, multiprocessing.pool, typing_extensions, urllib.request
import kubernetes.client, kubernetes.config, pydantic, dateutil.parser
print(kubernetes.client.CoreV1Api.__module__, kubernetes.client.V1Pod.__module__, kubernetes.config.load_kube_config.__name__,
      multiprocessing.pool.ThreadPool(1).map(abs, [-1]), importlib.metadata.version("kubernetes") != "",
      typing_extensions.Doc.__name__, urllib.request.urlopen.__name__, pydantic.BaseModel.__name__,
      dateutil.parser.parse("2026-01-01").year)
"""
ASK = """
import sys
from dra.kube.client import connect
from dra.kube.connection import KubeOptions
client = connect(KubeOptions(kubeconfig=sys.argv[1]))
print(client.server_version(), sorted(name for name in ("asyncio", "multiprocessing", "pydantic", "typing_extensions",
      "importlib.metadata", "urllib.request", "kubernetes") if name in sys.modules))
"""


class _Proxy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = json.dumps({"major": "1", "minor": "36", "gitVersion": "v1.36.0"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def proxy():
    server = HTTPServer(("127.0.0.1", 0), _Proxy)
    server.asked = []
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def kubeconfig(folder: Path, server: str) -> Path:
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(content))
    return path


def run(program: str, *arguments: str, **environment: str) -> str:
    bare = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**bare, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_request_loads_none_of_what_the_transport_does_not_use(proxy, tmp_path):
    file = kubeconfig(tmp_path, f"http://127.0.0.1:{proxy.server_port}")
    assert run(ASK, str(file)) == "(1, 36) []"
    assert proxy.asked == ["/version"]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_a_proxy_of_the_environment_is_used(proxy, tmp_path, name):
    file = kubeconfig(tmp_path, "http://api.invalid")
    answer = run(ASK, str(file), **{name: f"http://127.0.0.1:{proxy.server_port}"})
    assert answer == "(1, 36) ['urllib.request']"
    assert proxy.asked == ["http://api.invalid/version"]


def test_who_imports_the_real_packages_afterwards_gets_them(proxy, tmp_path):
    file = kubeconfig(tmp_path, f"http://127.0.0.1:{proxy.server_port}")
    told = run(ASK + LATER, str(file)).splitlines()[-1]
    assert told == (
        "kubernetes.client.api.core_v1_api kubernetes.client.models.v1_pod load_kube_config [1] True "
        "Doc urlopen BaseModel 2026"
    )
