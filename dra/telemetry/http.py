"""A small HTTP server for metrics and probes: GET only, an answer a connection, two threads at most.

One thread waits for all connections at once, so that a slow client costs a descriptor until its time is over and never
a thread; a second one, there only while it is needed, makes the pages that take time. While nobody asks, nothing wakes.
"""

from __future__ import annotations

import contextlib
import errno
import re
import selectors
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dra.errors import ConfigError, DraError
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

# A request must be there in so long, a page made in so long, an answer taken in so long.
READ_SECONDS = 5.0
PAGE_SECONDS = 60.0
WRITE_SECONDS = 10.0
MAX_CONNECTIONS = 32
# How often an address that is taken is tried again: another instance may be about to end.
BIND_SECONDS = 2.0

_MAX_HEAD = 16 << 10
_CHUNK = 64 << 10
_WORTH_PACKING = 1 << 10
_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]", re.ASCII)
_ENDPOINT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\[\]\s]*)):(?P<port>\d{1,5})", re.ASCII)

log = get_logger()


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. Names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """An answer."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Handler = Callable[[Request], Response]


@dataclass(frozen=True, slots=True)
class Route:
    """Who answers for a path. `quick` ones are called by the thread that serves everybody."""

    handler: Handler
    quick: bool = False


def parse_endpoint(text: str, *, flag: str = "--http-endpoint") -> tuple[str, int]:
    """Read `host:port`, `:port` or `[ipv6]:port`; an empty host means all addresses.

    Raises:
        ConfigError: DRA-FLAG-ENDPOINT.
    """
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            "DRA-FLAG-ENDPOINT",
            f"{flag} {text[:200]!r} is not an address to serve on",
            remedy="Give :PORT for all addresses, HOST:PORT, or [IPv6]:PORT.",
        )
    return match["six"] or match["host"] or "", int(match["port"])


class _Connection:
    """One client. `out` is what is still to be sent, None while its request is read or answered."""

    __slots__ = ("deadline", "head", "out", "socket")

    def __init__(self, client: socket.socket, deadline: float) -> None:
        self.socket, self.deadline = client, deadline
        self.head = b""
        self.out: memoryview | None = None


class HttpServer:
    """Serves routes by path. `name` is the thread's."""

    def __init__(
        self,
        endpoint: str,
        routes: Mapping[str, Route],
        *,
        name: str = "metrics",
        read_seconds: float = READ_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._host, self._port = parse_endpoint(endpoint)
        self._endpoint = endpoint
        self._routes = dict(routes)
        self._name = name
        self._read_seconds, self._write_seconds = read_seconds, write_seconds
        self._max_connections = max_connections
        self._mutex = threading.Lock()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._stopping = False
        self._asked: deque[tuple[_Connection, Request, Handler]] = deque()
        self._answered: deque[tuple[_Connection, bytes]] = deque()
        self._working = False

    @property
    def port(self) -> int:
        """The TCP port, 0 while there is none."""
        listener = self._listener
        return 0 if listener is None else int(listener.getsockname()[1])

    def start(self) -> None:
        """Start serving; returns at once. An address that is taken is tried again and again.

        Raises:
            HostError: DRA-HOST-NO-THREADS.
        """
        self._bind(first=True)
        self._waker = socket.socketpair()
        for end in self._waker:
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        start_thread(self._thread)

    def stop(self, *, timeout_seconds: float = 2.0) -> bool:
        """Close everything; whether the thread is gone."""
        self._stopping = True
        self._wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # -- the address -------------------------------------------------------------------------------

    def _bind(self, *, first: bool) -> None:
        try:
            if self._host:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                listener = socket.create_server((self._host, self._port), family=family, backlog=16)
            elif socket.has_dualstack_ipv6():
                listener = socket.create_server(
                    ("", self._port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=16
                )
            else:
                listener = socket.create_server(("", self._port), backlog=16)
        except OSError as error:
            if first:
                log.warning(
                    "http_endpoint_not_bound", endpoint=self._endpoint, error_code="DRA-HTTP-BIND",
                    error=str(error), remedy="It is tried again; free the port, or give another --http-endpoint.",
                )  # fmt: skip
            return
        listener.setblocking(False)
        self._listener = listener
        log.info("http_endpoint_bound", endpoint=self._endpoint, port=self.port)

    # -- the serving thread ------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._waker is not None
        selector = selectors.DefaultSelector()
        connections: dict[socket.socket, _Connection] = {}
        try:
            selector.register(self._waker[0], selectors.EVENT_READ)
            while not self._stopping:
                if self._listener is None:
                    self._bind(first=False)
                if self._listener is not None and self._listener not in selector.get_map():
                    selector.register(self._listener, selectors.EVENT_READ)
                for key, _ in selector.select(self._patience(connections)):
                    self._handle(selector, connections, key.fileobj)
                self._take_answers(selector, connections)
                self._drop_late(selector, connections)
        except Exception as error:  # a marked border: the driver lives on without its metrics
            log.exception("http_server_failed", **error_fields(error))
        finally:
            for client in [*connections, *self._waker]:
                client.close()
            if self._listener is not None:
                self._listener.close()
            selector.close()

    def _patience(self, connections: Mapping[socket.socket, _Connection]) -> float | None:
        """Give how long nothing has to be done; None for ever."""
        if self._listener is None:
            return BIND_SECONDS
        if not connections:
            return None
        return max(0.0, min(each.deadline for each in connections.values()) - time.monotonic())

    def _handle(
        self, selector: selectors.BaseSelector, connections: dict[socket.socket, _Connection], ready: object
    ) -> None:
        assert self._waker is not None
        if ready is self._waker[0]:
            with contextlib.suppress(OSError):
                while self._waker[0].recv(64):
                    pass
        elif ready is self._listener:
            self._accept(selector, connections)
        elif isinstance(ready, socket.socket) and (connection := connections.get(ready)) is not None:
            try:
                alive = (
                    self._read(selector, connection) if connection.out is None else self._write(connection)
                )
            except OSError:
                alive = False
            if not alive:
                self._close(selector, connections, connection)

    def _accept(
        self, selector: selectors.BaseSelector, connections: dict[socket.socket, _Connection]
    ) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)  # else this would go round and round
            return
        client.setblocking(False)
        if len(connections) >= self._max_connections:
            # Whoever has taken longest is worth least.
            self._close(selector, connections, min(connections.values(), key=lambda each: each.deadline))
        connection = _Connection(client, time.monotonic() + self._read_seconds)
        connections[client] = connection
        selector.register(client, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, connection: _Connection) -> bool:
        """Take what a client sent; whether to keep it."""
        data = connection.socket.recv(_CHUNK)
        if not data:
            return False
        connection.head += data
        end = connection.head.find(b"\r\n\r\n")
        if end < 0 and len(connection.head) <= _MAX_HEAD:
            return True
        selector.unregister(connection.socket)
        connection.deadline = time.monotonic() + PAGE_SECONDS
        if end < 0:
            self._answer(connection, None, Response(b"the request is too long\n", status=431))
            return True
        self._dispatch(connection, connection.head[:end])
        return True

    def _dispatch(self, connection: _Connection, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        match = _REQUEST.fullmatch(first)
        if match is None:
            self._answer(connection, None, Response(b"not an HTTP request\n", status=400))
            return
        headers = {
            name.strip().lower().decode("latin-1"): value.strip().decode("latin-1")
            for name, colon, value in (line.partition(b":") for line in lines)
            if colon
        }
        request = Request(match[2].decode("latin-1").partition("?")[0], headers)
        route = self._routes.get(request.path)
        if match[1] not in (b"GET", b"HEAD"):
            self._answer(connection, request, Response(b"only GET\n", status=405))
        elif route is None:
            known = "\n".join(sorted(self._routes)) + "\n"
            self._answer(connection, request, Response(known.encode(), status=404))
        elif route.quick:
            self._answer(connection, request, _call(route.handler, request), head_only=match[1] == b"HEAD")
        else:
            self._asked.append((connection, request, route.handler))
            self._have_worker()

    def _take_answers(
        self, selector: selectors.BaseSelector, connections: dict[socket.socket, _Connection]
    ) -> None:
        while self._answered:
            connection, data = self._answered.popleft()
            if connections.get(connection.socket) is not connection:
                continue  # it went away, or its time was over
            connection.out = memoryview(data)
            connection.deadline = time.monotonic() + self._write_seconds
            selector.register(connection.socket, selectors.EVENT_WRITE)

    @staticmethod
    def _write(connection: _Connection) -> bool:
        """Send some; whether there is more."""
        assert connection.out is not None
        sent = connection.socket.send(connection.out[:_CHUNK])
        connection.out = connection.out[sent:]
        if connection.out:
            return True
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        return False

    def _drop_late(
        self, selector: selectors.BaseSelector, connections: dict[socket.socket, _Connection]
    ) -> None:
        now = time.monotonic()
        for connection in [each for each in connections.values() if each.deadline <= now]:
            self._close(selector, connections, connection)

    @staticmethod
    def _close(
        selector: selectors.BaseSelector,
        connections: dict[socket.socket, _Connection],
        connection: _Connection,
    ) -> None:
        connections.pop(connection.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection.socket)
        connection.socket.close()

    # -- answers -----------------------------------------------------------------------------------

    def _answer(
        self, connection: _Connection, request: Request | None, response: Response, *, head_only: bool = False
    ) -> None:
        self._answered.append((connection, _encode(request, response, head_only=head_only)))

    def _have_worker(self) -> None:
        with self._mutex:
            if self._working:
                return
            self._working = True
        try:
            start_thread(threading.Thread(target=self._work, name=f"{self._name}-page", daemon=True))
        except DraError as error:
            log.warning("http_page_not_made", **error_fields(error))
            with self._mutex:
                self._working = False
            while self._asked:
                connection, request, _ = self._asked.popleft()
                self._answer(connection, request, Response(f"{error}\n".encode(), status=503))

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._asked or self._stopping:
                    self._working = False
                    return
                connection, request, handler = self._asked.popleft()
            self._answer(connection, request, _call(handler, request))
            self._wake()
            del connection, request, handler

    def _wake(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(OSError):
                self._waker[1].send(b"x")


def _call(handler: Handler, request: Request) -> Response:
    try:
        return handler(request)
    except Exception as error:  # a marked border
        log.exception("http_page_failed", path=request.path, **error_fields(error))
        return Response(f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"), status=500)


def _encode(request: Request | None, response: Response, *, head_only: bool) -> bytes:
    body, packed = response.body, ""
    accepts = request.headers.get("accept-encoding", "") if request is not None else ""
    if "gzip" in accepts and len(body) >= _WORTH_PACKING:
        packer = zlib.compressobj(1, wbits=31)
        body, packed = packer.compress(body) + packer.flush(), "Content-Encoding: gzip\r\n"
    head = (
        f"HTTP/1.1 {response.status} {_REASONS.get(response.status, 'Unknown')}\r\n"
        f"Content-Type: {response.content_type}\r\n{packed}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if head_only else body)
