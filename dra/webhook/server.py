"""The HTTPS server of the webhook: POST of AdmissionReviews, GET of /healthz and /readyz.

The API server keeps connections open and waits a few seconds for an answer: each connection has a thread, of which
there are a limited number, and everything on it has a time limit. Ready means that a connection would be served: the
certificate is there, valid, and the checks give the right answers to two known reviews.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

from dra.api.fractions import FractionRules
from dra.errors import HostError
from dra.telemetry.log import get_logger
from dra.telemetry.threads import Loop, start_thread
from dra.webhook.certificate import LOOK_SECONDS, Certificate
from dra.webhook.connections import Connections
from dra.webhook.review import Decide, ReviewError, answer, mutate, validate

log = get_logger()

VALIDATE_PATH = "/validate"
# NVIDIA's webhook is called here; configurations that were written for it work.
VALIDATE_ALIAS = "/validate-resource-claim-parameters"
MUTATE_PATH = "/mutate"
# Objects have at most 3 MiB in etcd; a review of an update holds two.
MAX_BODY = 16 << 20
# Connections at once; an API server needs a few.
MAX_CONNECTIONS = 64
# From one answer, or from the connection, until the next request is there whole.
IDLE_SECONDS = 90.0
_HANDSHAKE_SECONDS = 10.0


class WebhookServer:
    """Serves until `stop`.

    Args:
        certificate: of the server.
        rules: what is rewritten.
        host, port: where it listens; port 0 is any that is free.
        look_seconds: how often the certificate's files are looked at.
    """

    def __init__(
        self,
        certificate: Certificate,
        *,
        rules: FractionRules | None = None,
        host: str = "",
        port: int = 0,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._certificate = certificate
        self._watch = Loop(
            "webhook-certificate", self._look, seconds=look_seconds, first_seconds=look_seconds
        )
        rewriting = rules or FractionRules()
        self.decisions: Mapping[str, Decide] = {
            VALIDATE_PATH: validate,
            VALIDATE_ALIAS: validate,
            MUTATE_PATH: lambda request: mutate(request, rewriting),
        }
        self._where = (host, port)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start`."""
        return 0 if self._server is None else int(self._server.server_address[1])

    def start(self) -> None:
        """Listen, with a certificate or without: connections then fail until there is one.

        Raises:
            HostError: DRA-WEBHOOK-PORT.
        """
        self._certificate.look()
        try:
            self._server = _Server(self._where, self)
        except (OSError, OverflowError) as error:
            raise HostError(
                "DRA-WEBHOOK-PORT",
                f"cannot listen on port {self._where[1]}: {error}",
                remedy="Give another --port, or end what has it.",
            ) from error
        thread = threading.Thread(target=self._server.serve, name="webhook", daemon=True)
        start_thread(thread)
        self._thread = thread
        self._watch.start()
        log.info("webhook_started", port=self.port)

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """Take no new connections, and end."""
        self._watch.stop(timeout_seconds=timeout_seconds)
        if self._server is not None and self._thread is not None:
            self._server.end(timeout_seconds=timeout_seconds)
            self._thread.join(timeout_seconds)

    def trouble(self) -> str:
        """Say what keeps it from being ready; empty if nothing does."""
        return self._certificate.trouble() or _self_test(self.decisions)

    def context(self) -> ssl.SSLContext | None:
        """What new connections are made with."""
        return self._certificate.context

    def _look(self) -> None:
        self._certificate.look()


class _Server(HTTPServer):
    """Accepts on one thread; TLS and requests are each connection's own."""

    # A second instance must not take the port of one that lives, as SO_REUSEPORT would let it.
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, where: tuple[str, int], owner: WebhookServer) -> None:
        self.owner = owner
        self.connections = Connections(most=MAX_CONNECTIONS)
        host, port = where
        if ":" in host or (not host and socket.has_dualstack_ipv6()):
            self.address_family = socket.AF_INET6
        super().__init__((host or "::" if self.address_family == socket.AF_INET6 else host, port), _Handler)

    def server_bind(self) -> None:
        """Take both families on the unspecified address; no look-up of names."""
        if self.address_family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "webhook", int(self.server_address[1])

    def serve(self) -> None:
        """Serve until `end`."""
        self.serve_forever(poll_interval=0.2)

    def end(self, *, timeout_seconds: float) -> None:
        """Stop accepting, let running requests end for a moment, close the rest."""
        self.shutdown()
        self.server_close()
        end = time.monotonic() + min(timeout_seconds, 2.0)
        while self.connections and time.monotonic() < end:
            time.sleep(0.02)
        self.connections.end_all()

    def service_actions(self) -> None:
        """End, several times a second, what took too long."""
        self.connections.end_late()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread of its own; one too many pushes out the one that has been waited for longest."""
        if not self.connections.enter(request, seconds=_HANDSHAKE_SECONDS):
            log.warning("webhook_full", connections=MAX_CONNECTIONS)
            self.shutdown_request(request)
            return
        thread = threading.Thread(
            target=self._serve_one, args=(request, client_address), name="webhook-connection", daemon=True
        )
        try:
            start_thread(thread)
        except HostError:
            self.connections.leave(request)
            self.shutdown_request(request)

    def _serve_one(self, request: socket.socket, client_address: Any) -> None:
        secure: socket.socket = request
        try:
            context = self.owner.context()
            if context is None:
                return
            request.settimeout(_HANDSHAKE_SECONDS)
            secure = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            self.connections.become(request, secure)
            secure.do_handshake()
            secure.settimeout(IDLE_SECONDS)
            self.finish_request(secure, client_address)
        except (OSError, ValueError) as error:
            # Probes of load balancers, clients that do not trust us, connections that break.
            log.debug("webhook_connection_ended", error=str(error))
        except Exception:  # marked border: one connection's failure is its own
            log.exception("webhook_connection_crashed")
        finally:
            self.shutdown_request(secure)
            self.connections.leave(secure)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dra-webhook"
    sys_version = ""
    # Head and body of an answer leave in one piece.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server
    _TYPES: ClassVar[tuple[str, ...]] = ("application/json",)

    def handle_one_request(self) -> None:
        """Answer one request, which has to be there in time."""
        self.server.connections.expect(self.connection, seconds=IDLE_SECONDS)
        super().handle_one_request()

    def do_GET(self) -> None:
        self.server.connections.answering(self.connection)
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._send(200, b"ok\n")
        elif path == "/readyz":
            trouble = self.server.owner.trouble()
            self._send(503 if trouble else 200, f"{trouble or 'ok'}\n".encode())
        else:
            self._send(404, b"not found\n")

    def do_POST(self) -> None:
        decide = self.server.owner.decisions.get(self.path.partition("?")[0])
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._refuse(411, "a Content-Length is required")
        elif int(length) > MAX_BODY:
            self._refuse(413, f"more than {MAX_BODY} bytes")
        elif decide is None:
            self._refuse(404, "not found")
        elif self.headers.get("Content-Type", "").partition(";")[0].strip() not in self._TYPES:
            self._refuse(415, "the Content-Type must be application/json")
        else:
            body = self.rfile.read(int(length))
            self.server.connections.answering(self.connection)
            self._review(body, decide)

    def _review(self, body: bytes, decide: Decide) -> None:
        try:
            self._send(200, answer(body, decide), kind="application/json")
        except ReviewError as error:
            self._send(400, f"{error}\n".encode())
        except Exception:  # marked border: the API server's failure policy decides
            log.exception("webhook_review_crashed")
            self._send(500, b"the webhook met a bug; its log has the reason\n")

    def _refuse(self, status: int, why: str) -> None:
        # The body was not read: nothing after it can be told from it.
        self.close_connection = True
        self._send(status, f"{why}\n".encode())

    def _send(self, status: int, body: bytes, *, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Keep the log for what matters."""


def _self_test(decisions: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> str:
    """Ask about a claim that is right and one that is wrong; empty if both are told."""
    for interval, allowed in (("Short", True), ("Never", False)):
        body = json.dumps(_known_review(interval)).encode()
        try:
            review = json.loads(answer(body, decisions[VALIDATE_PATH]))
        except Exception as error:  # marked border: a bug here must show as not ready
            return f"the self-test met {type(error).__name__}: {error}"
        if review["response"]["allowed"] is not allowed:
            return f"the self-test of a configuration with interval {interval} gave the wrong answer"
    return ""


def _known_review(interval: str) -> dict[str, Any]:
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
        "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}},
    }  # fmt: skip
    spec = {
        "devices": {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}],
            "config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}],
        }
    }
    obj = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "self-test", "namespace": "default"}, "spec": spec,
    }  # fmt: skip
    return {
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {"uid": "self-test", "operation": "CREATE", "object": obj},
    }  # fmt: skip
