"""Sockets: HTTP/1.1 with keep-alive, chunked streams, and the places where faults bite.

One thread a connection. Everything that decides is in `api.py`; here bytes go in and out.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dra.sim.apiserver.exchange import Request, Response, dump
from dra.sim.apiserver.faults import Fault, Faults, Logged, RequestLog
from dra.sim.apiserver.status import ApiFailure

Handle = Callable[[Request], Response]


class Listener(ThreadingHTTPServer):
    """The listening socket and its threads."""

    daemon_threads = True
    # Connection threads end when their sockets are closed; nothing waits for them at interpreter exit.
    block_on_close = False
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], *, handle: Handle, faults: Faults, log: RequestLog) -> None:
        self.handle_call = handle
        self.faults = faults
        self.log = log
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(address, Connection)

    def server_bind(self) -> None:
        # The base class looks the host's name up, which can take seconds without DNS.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return not (self.faults.refusing or self.stopping.is_set())

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are normal."""

    def close_connections(self) -> None:
        """Break every open connection (watches included); clients see a reset."""
        with self._open_lock:
            current = list(self._open)
        for connection in current:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _BrokenError(Exception):
    """The connection must end here."""


class Connection(BaseHTTPRequestHandler):
    """One client connection."""

    protocol_version = "HTTP/1.1"
    server: Listener
    # Headers and body leave in one segment; without it a 40 ms delayed ACK creeps into every exchange.
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are in `server.requests`."""

    def __getattr__(self, name: str) -> Any:
        # Any method reaches the API, which answers 405 itself.
        if name.startswith("do_"):
            return self._exchange
        raise AttributeError(name)

    def _exchange(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunked_body()
        headers: dict[str, str] = {}
        for key, value in self.headers.items():
            # Groups and what else is told of a user come one a header.
            several = key.lower().startswith("impersonate-") and key.lower() in headers
            headers[key.lower()] = f"{headers[key.lower()]}\n{value}" if several else value
        request = Request(self.command, self.path, headers, body)
        watch = request.flag("watch") or "/watch/" in request.path
        fault = self.server.faults.take(request.method, request.target, watch=watch, body=body)
        status = 0
        try:
            response = self._answer(request, fault)
            status = response.status
            self._note(request, status, watch=watch)
            self._send(request, response, fault)
        except _BrokenError:
            if status == 0:
                self._note(request, 0, watch=watch)
            self.close_connection = True
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True

    def _chunked_body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or "").lower():
            return b""
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0].strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _note(self, request: Request, status: int, *, watch: bool) -> None:
        self.server.log.add(
            Logged(
                request.method,
                request.path,
                request.target,
                status,
                request.headers.get("user-agent", ""),
                request.body,
                time.monotonic(),
                watch,
            )
        )

    def _answer(self, request: Request, fault: Fault | None) -> Response:
        if fault is not None:
            if fault.kind == "close":
                raise _BrokenError
            if fault.kind == "freeze":
                self._wait(fault, None)
                raise _BrokenError
            if fault.kind == "delay":
                self._wait(fault, fault.seconds)
            if fault.kind == "error":
                return _failed(fault)
            if fault.kind in {"stall", "gone"}:
                return Response(200, stream=self._faulty_watch(fault))
        return self.server.handle_call(request)

    def _wait(self, fault: Fault, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not (fault.cleared.wait(0.02) or self.server.stopping.is_set()):
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _faulty_watch(self, fault: Fault) -> Any:
        if fault.kind == "gone":
            status = ApiFailure(410, "Expired", "too old resource version").body()
            yield dump({"type": "ERROR", "object": status})
            return
        yield b""
        self._wait(fault, None)

    def _send(self, request: Request, response: Response, fault: Fault | None) -> None:
        self.send_response(response.status)
        if response.content_type is not None:
            self.send_header("Content-Type", response.content_type)
        for name, value in response.headers.items():
            self.send_header(name, value)
        for warning in response.warnings:
            self.send_header("Warning", warning)
        if response.stream is not None:
            self._send_stream(response, fault)
            return
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        body = b"" if request.method == "HEAD" else response.body
        if fault is not None and fault.kind == "drop":
            self.wfile.write(body[: fault.after_bytes])
            self.wfile.flush()
            raise _BrokenError
        self.wfile.write(body)
        self.wfile.flush()

    def _send_stream(self, response: Response, fault: Fault | None) -> None:
        assert response.stream is not None
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        sent = 0
        for chunk in response.stream:
            if not chunk:
                # A heartbeat of the generator: has the client gone?
                if self._client_gone():
                    raise _BrokenError
                continue
            if fault is not None and fault.kind == "drop" and sent + len(chunk) > fault.after_bytes:
                cut = chunk[: fault.after_bytes - sent]
                self.wfile.write(b"%x\r\n%s" % (len(chunk), cut))
                self.wfile.flush()
                raise _BrokenError
            sent += len(chunk)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _client_gone(self) -> bool:
        try:
            self.connection.setblocking(False)
            try:
                return bool(self.connection.recv(1, socket.MSG_PEEK) == b"")
            finally:
                self.connection.setblocking(True)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _failed(fault: Fault) -> Response:
    failure = ApiFailure(fault.code, fault.reason, fault.message or f"simulated fault: {fault.reason}")
    if fault.retry_after is not None:
        failure.headers["Retry-After"] = str(fault.retry_after)
        failure.details = {"retryAfterSeconds": fault.retry_after}
    if fault.causes:
        failure.details = {**(failure.details or {}), "causes": list(fault.causes)}
    return Response(fault.code, dump(failure.body()), headers=failure.headers)
