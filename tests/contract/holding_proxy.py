"""A way to a real API server on which a request can be held up: as if the network kept it, with its sender gone on.

Clients speak plain HTTP with it on loopback; it speaks TLS with the server, in the name of the user whose token it has.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)


class HoldingProxy:
    """Forwards connections until `close`."""

    def __init__(self, port: int, *, ca_file: Path, token: str) -> None:
        self._to, self._token = ("127.0.0.1", port), token
        self._context = ssl.create_default_context(cafile=str(ca_file))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wanted: Callable[[str], bool] | None = None
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.held = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write the kubeconfig of its clients."""
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return path

    def hold(self, wanted: Callable[[str], bool]) -> None:
        """Hold up the first request whose first line this takes; `held` is set when it has come."""
        self._wanted = wanted

    def release(self) -> None:
        """Let the held request go on."""
        self._released.set()

    def close(self) -> None:
        """Take no more connections."""
        self._released.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            raw = socket.create_connection(self._to)
            with self._context.wrap_socket(raw, server_hostname="127.0.0.1") as server:
                threading.Thread(target=_pour, args=(server, client), daemon=True).start()
                self._forward(client.makefile("rb"), server)

    def _forward(self, requests: BinaryIO, server: ssl.SSLSocket) -> None:
        """Send on request after request, whole."""
        while first := requests.readline():
            lines = [first, f"Authorization: Bearer {self._token}\r\n".encode()]
            while (line := requests.readline()) not in (b"\r\n", b""):
                lines.append(line)
            head = b"".join(lines)
            length = _LENGTH.search(head)
            body = requests.read(int(length[1])) if length else b""
            self._hold_up(first.decode())
            server.sendall(head + b"\r\n" + body)

    def _hold_up(self, first: str) -> None:
        with self._lock:
            if self._wanted is None or not self._wanted(first):
                return
            self._wanted = None
        self.held.set()
        self._released.wait()


def _pour(source: ssl.SSLSocket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
