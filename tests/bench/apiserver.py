"""The simulated API server in a process of its own, so that what is measured shares no interpreter with it.

`python -m tests.bench.apiserver VERSION KUBECONFIG` serves until its standard input ends: it never outlives the
benchmark. Its first line of output is the port.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class _Client:
    """What the benchmark needs of `SimApiServer`, by HTTP on one kept connection. Thread-safe."""

    def __init__(self, connection: http.client.HTTPConnection, *, token: str = "") -> None:
        self._connection = connection
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._lock = threading.Lock()

    def request(
        self, method: str, target: str, body: Any = None, *, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Make a call; gives status and decoded answer, or the text that is not JSON."""
        headers = {"Content-Type": content_type, **self._headers}
        data = None if body is None else json.dumps(body).encode()
        with self._lock:
            self._connection.request(method, target, body=data, headers=headers)
            answer = self._connection.getresponse()
            text = answer.read()
        is_json = "json" in (answer.getheader("Content-Type") or "")
        return answer.status, json.loads(text) if is_json and text else text.decode() or None

    def create(self, collection: str, obj: Json) -> Json:
        """Create an object. RuntimeError: the server refused it."""
        status, answer = self.request("POST", collection, obj)
        if status != 201:
            raise RuntimeError(f"{collection}: {status} {answer}")
        return dict(answer)


class ApiServerProcess(_Client):
    """The simulated API server, in a process of its own."""

    def __init__(self, *, version: str, folder: Path) -> None:
        self._kubeconfig = folder / "bench-kubeconfig"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.apiserver", version, str(self._kubeconfig)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        super().__init__(http.client.HTTPConnection("127.0.0.1", int(self._process.stdout.readline())))

    def write_kubeconfig(self, path: Path) -> Path:
        """Copy the kubeconfig of the server."""
        return Path(shutil.copy(self._kubeconfig, path))

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class RealApi(_Client):
    """A real kube-apiserver with etcd, from `KUBEBUILDER_ASSETS`; `arguments` are more for kube-apiserver."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        from tests.real_apiserver import ADMIN, real_apiserver

        (folder / "api").mkdir()
        self._made = contextlib.ExitStack()
        self.server = self._made.enter_context(real_apiserver(folder / "api", arguments=arguments))
        context = ssl.create_default_context(cafile=str(self.server.ca_file))
        connection = http.client.HTTPSConnection("127.0.0.1", self.server.port, context=context)
        super().__init__(connection, token=self.server.token_of(ADMIN))

    def write_kubeconfig(self, path: Path) -> Path:
        """Copy the kubeconfig of an administrator."""
        return Path(shutil.copy(self.server.admin_kubeconfig, path))

    def stop(self) -> None:
        """End both processes."""
        self._connection.close()
        self._made.close()


def main(version: str, kubeconfig: str) -> None:
    """Serve until standard input ends."""
    from dra.sim.apiserver import SimApiServer

    server = SimApiServer(version=version).start()
    server.write_kubeconfig(kubeconfig)
    print(server.url.rpartition(":")[2], flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
