"""The probe: the standard gRPC health service on TCP, for the kubelet's liveness and readiness checks.

`""` and `liveness` dial the driver's own two sockets, as the kubelet does: GetInfo and a prepare call without
claims. They do not fail for a missing NVIDIA driver or API server, which a restart would not bring. `readiness`
says what is missing in the trailing metadata `dra-missing`. Source: the gRPC health checking protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from dra.errors import HostError
from dra.pb.grpc_health_pb2 import HealthCheckRequest, HealthCheckResponse
from dra.pb.services import GET_INFO, HEALTH_CHECK, PREPARE_V1, Method
from dra.plugin.call_pool import CallPool
from dra.plugin.readiness import Readiness
from dra.plugin.server import build_server
from dra.telemetry.log import get_logger

log = get_logger()

# Two calls within the second that a kubelet's probe waits for at least.
CALL_SECONDS = 0.4
# The kubelet connects anew for each question. Whoever reaches the port and holds connections has them for so long.
CONNECTION_SECONDS = 30
CONNECTION_GRACE_SECONDS = 5

LIVENESS = ("", "liveness")
READINESS = "readiness"


def call_once(socket_path: Path, method: Method, *, timeout_seconds: float = CALL_SECONDS) -> str:
    """Make one call without content on a unix socket; gives an empty text or what went wrong."""
    with grpc.insecure_channel(
        f"unix:{socket_path}", options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        call = channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            call(method.request(), timeout=timeout_seconds)
        except grpc.RpcError as error:
            return f"{method.path} on {socket_path}: {_status(error)}"
    return ""


def _status(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return type(error).__name__


class Probe:
    """The health service. `registration` and `service` are the driver's own sockets."""

    def __init__(self, *, registration: Path, service: Path, readiness: Readiness) -> None:
        self._sockets = ((registration, GET_INFO), (service, PREPARE_V1))
        self._readiness = readiness
        self._pool = CallPool("probe", threads=4)
        self._server: grpc.Server | None = None
        self.port = 0

    def start(self, port: int, *, address: str = "[::]") -> None:
        """Serve on a TCP port (0: any free one; `port` says which).

        Raises:
            HostError: DRA-PROBE-PORT if the port cannot be bound.
        """
        options = (
            ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
            ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE_SECONDS * 1000),
        )
        server = build_server(((HEALTH_CHECK, self._check),), pool=self._pool, options=options)
        try:
            self.port = server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as error:
            raise HostError(
                "DRA-PROBE-PORT",
                f"the health check port {port} cannot be bound",
                remedy="Choose a free port with --healthcheck-port.",
            ) from error
        server.start()
        self._server = server

    def stop(self) -> None:
        """End the probe's server."""
        if self._server is not None:
            self._server.stop(grace=None)
        self._pool.shutdown(wait=False)

    def _check(self, request: HealthCheckRequest, context: grpc.ServicerContext) -> HealthCheckResponse:
        ask = self._question(request.service)
        if ask is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service}")
            raise AssertionError  # abort raises
        missing = ask()
        if missing:
            log.warning("probe_failed", service=request.service or "liveness", missing=missing)
            context.set_trailing_metadata((("dra-missing", _header(missing)),))
        status = HealthCheckResponse.NOT_SERVING if missing else HealthCheckResponse.SERVING
        return HealthCheckResponse(status=status)

    def _question(self, service: str) -> Callable[[], list[str]] | None:
        if service in LIVENESS:
            return self._dead
        return self._unready if service == READINESS else None

    def _dead(self) -> list[str]:
        return [text for path, method in self._sockets if (text := call_once(path, method))]

    def _unready(self) -> list[str]:
        return [f"{name}: {text}" for name, text in self._readiness.missing().items()]


def _header(missing: list[str]) -> str:
    # Metadata is printable ASCII.
    return "; ".join(missing).encode("ascii", "replace").decode()[:1000]
