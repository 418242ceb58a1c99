"""gRPC servers on unix sockets that appear only when they answer, and are removed only by their owner.

The C core binds over a living socket of another process without a word, and removes whatever stands at its path
when it stops. So each server binds under a hidden name, starts, and is then renamed into place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from dra.errors import HostError
from dra.pb.services import Method
from dra.plugin.call_pool import CallPool
from dra.plugin.sockets import hidden_path, inode_of, unlink_own

# A prepare request names the claims of one pod: a mebibyte holds thousands.
MAX_MESSAGE_BYTES = 1 << 20
# The kubelet keeps one connection with one call per pod that starts or ends and one health stream. A full house of
# pods that wait to start must leave room for those that end: beyond these limits a call waits at the kubelet, or is
# refused in words of gRPC's.
MAX_STREAMS_PER_CONNECTION = 512
MAX_CONCURRENT_CALLS = 1024
# A client that connects and says nothing is dropped after this time.
HANDSHAKE_TIMEOUT_MS = 5000

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # The C core otherwise resets calls at random when the limit is near, although the client would wait: a kubelet
    # that starts a hundred pods at once would see some of them fail.
    ("grpc.http.overload_protection", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.so_reuseport", 0),
    # Python's own tracing of calls is not used; without it each call costs less.
    ("grpc.enable_channelz", 0),
)

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


def build_server(
    methods: Iterable[tuple[Method, Behaviour]],
    *,
    pool: CallPool,
    options: Iterable[tuple[str, int]] = (),
) -> grpc.Server:
    """Make a server of these methods, not yet bound nor started; `pool` runs all but behaviours with their own.

    Args:
        methods: what is served.
        pool: where their calls run.
        options: of the C core, beside `SERVER_OPTIONS`.

    Raises:
        HostError: DRA-HOST-NO-THREADS.
    """
    pool.open()
    server = grpc.server(
        pool,
        options=(*SERVER_OPTIONS, *options),
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        compression=None,
    )
    by_service: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for method, behaviour in methods:
        own: CallPool | None = getattr(behaviour, "experimental_thread_pool", None)
        if own is not None:
            own.open()
        make: Any = (
            grpc.unary_stream_rpc_method_handler
            if method.response_streams
            else grpc.unary_unary_rpc_method_handler
        )
        by_service.setdefault(method.service, {})[method.name] = make(
            behaviour,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, table) for service, table in by_service.items())
    )
    return server


class UnixServer:
    """One gRPC server at one path.

    `build` makes a fresh server object for each binding: the C core cannot bind a second time. The methods may be
    called from several threads.
    """

    def __init__(self, path: Path, *, driver: str, build: Callable[[], grpc.Server]) -> None:
        self.path = path
        self._driver = driver
        self._build = build
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self._inode: tuple[int, int] | None = None

    def open(self) -> None:
        """Serve at the path, replacing what stood there: when this returns, calls are answered.

        An older server of this object finishes its calls for up to 40 seconds.

        Raises:
            HostError: DRA-SOCKET-BIND: the directory is missing or cannot be written, or something that is not a
                socket stands at the path.
        """
        with self._lock:
            older = self._server
            self._server, self._inode = self._bind()
        if older is not None:
            older.stop(grace=40)

    def _bind(self) -> tuple[grpc.Server, tuple[int, int] | None]:
        hidden = hidden_path(self.path, self._driver)
        _require_bindable(self.path)
        server = self._build()
        try:
            server.add_insecure_port(f"unix:{hidden}")
            hidden.chmod(0o600)
            inode = inode_of(hidden)
            server.start()
            hidden.rename(self.path)
        except (OSError, RuntimeError) as error:
            server.stop(grace=0)
            hidden.unlink(missing_ok=True)
            raise HostError(
                "DRA-SOCKET-BIND",
                f"the socket {self.path} cannot be served: {error}",
                remedy="Check that the directory is mounted into the pod and can be written.",
                path=str(self.path),
            ) from error
        return server, inode

    @property
    def present(self) -> bool:
        """Whether the path leads to this server: nobody removed or replaced the file."""
        with self._lock:
            return self._inode is not None and inode_of(self.path) == self._inode

    def withdraw(self) -> None:
        """Remove the socket file if it is ours; calls in flight and open connections go on."""
        with self._lock:
            unlink_own(self.path, self._inode)
            self._inode = None

    def close(self, *, grace_seconds: float) -> threading.Event:
        """Remove the file, take no new calls, end the running ones after `grace_seconds`; the event says when."""
        self.withdraw()
        with self._lock:
            server, self._server = self._server, None
        if server is None:
            done = threading.Event()
            done.set()
            return done
        return server.stop(grace=grace_seconds)


def _require_bindable(path: Path) -> None:
    # The C core says only "failed to bind"; the reason would stand on stderr.
    if not path.parent.is_dir():
        reason = "its directory does not exist"
    elif path.exists() and inode_of(path) is None:
        reason = "something that is not a socket has this name"
    else:
        return
    raise HostError(
        "DRA-SOCKET-BIND",
        f"the socket {path} cannot be served: {reason}",
        remedy="Check the kubelet's root directory and the mounts of the pod.",
        path=str(path),
    )
