"""An HTTPS server that answers admission reviews, for tests."""

from __future__ import annotations

import json
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]
TLS = Path(__file__).parents[2] / "data" / "tls"
Answer = Callable[[Json], "Json | bytes | int"]


def bundle(name: str = "server.crt") -> str:
    return b64encode((TLS / name).read_bytes()).decode()


def allow(**more: Any) -> Json:
    return {"allowed": True, **more}


def patch(*operations: Json) -> Json:
    raw = b64encode(json.dumps(list(operations)).encode()).decode()
    return {"allowed": True, "patchType": "JSONPatch", "patch": raw}


class WebhookServer:
    """`answers` maps paths to functions from an AdmissionRequest to a response (or raw bytes, or a status); `requests`
    holds what came, in order, as (path, request).
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, Json]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.partition("?")[0]
                outer.requests.append((path, body["request"]))
                answer = outer.answers[path](body["request"])
                status = answer if isinstance(answer, int) else 200
                if isinstance(answer, bytes):
                    raw = answer
                elif isinstance(answer, int):
                    raw = b"broken"
                else:
                    raw = json.dumps(
                        {
                            "apiVersion": "admission.k8s.io/v1",
                            "kind": "AdmissionReview",
                            "response": {"uid": body["request"]["uid"], **answer},
                        }
                    ).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "server.crt", TLS / "server.key")
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
