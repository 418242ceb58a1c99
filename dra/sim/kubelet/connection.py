"""One registered plugin instance: its service connection, calls and health stream, as the kubelet has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from dra.api.claim import ClaimRef
from dra.pb.registration_pb2 import InfoRequest, PluginInfo, RegistrationStatus
from dra.pb.services import (
    GET_INFO,
    NOTIFY_REGISTRATION_STATUS,
    PREPARE_V1,
    PREPARE_V1BETA1,
    UNPREPARE_V1,
    UNPREPARE_V1BETA1,
    WATCH_HEALTH_V1,
    WATCH_HEALTH_V1ALPHA1,
    Method,
)
from dra.sim.kubelet.versions import HEALTH_V1, Timings
from dra.telemetry.log import get_logger

log = get_logger()

_HEALTH_STATES = ("Unknown", "Healthy", "Unhealthy")


class CallError(RuntimeError):
    """A call to a plugin failed as a whole."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a plugin said about one device, and when by the monotonic clock."""

    state: str
    message: str
    received: float
    timeout_seconds: float


def stub_of(channel: grpc.Channel, method: Method) -> Callable[..., Any]:
    """Give the callable of a method on a channel."""
    make: Any = channel.unary_stream if method.response_streams else channel.unary_unary
    stub: Callable[..., Any] = make(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )
    return stub


def _text(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)


class RegistrationDial:
    """One attempt at a registration socket; close it afterwards. The authority is the percent-encoded path."""

    def __init__(self, path: Path, timings: Timings) -> None:
        self._timings = timings
        self._channel = grpc.insecure_channel(
            f"unix:{path}",
            options=(
                ("grpc.default_authority", quote(str(path), safe="")),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )

    def get_info(self) -> PluginInfo:
        """Ask who it is. Raises CallError."""
        try:
            info: PluginInfo = stub_of(self._channel, GET_INFO)(InfoRequest(), timeout=self._timings.get_info)
        except grpc.RpcError as error:
            raise CallError(_text(error)) from error
        return info

    def notify(self, *, registered: bool, error: str = "") -> None:
        """Tell the outcome. Raises CallError."""
        status = RegistrationStatus(plugin_registered=registered, error=error)
        try:
            stub_of(self._channel, NOTIFY_REGISTRATION_STATUS)(status, timeout=self._timings.notify)
        except grpc.RpcError as failure:
            raise CallError(_text(failure)) from failure

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class PluginConnection:
    """A registered instance.

    Args:
        info: what it said about itself.
        prepare_version: `v1.DRAPlugin` or `v1beta1.DRAPlugin`.
        health_version: which health service to stream from; empty for none.
        timings: time limits.
        on_change: called without arguments when it connects or disconnects.
        on_health: called after each health message.
    """

    def __init__(
        self,
        info: PluginInfo,
        *,
        prepare_version: str,
        health_version: str,
        timings: Timings,
        on_change: Callable[[], None] = lambda: None,
        on_health: Callable[[], None] = lambda: None,
    ) -> None:
        self.driver = info.name
        self.endpoint = info.endpoint
        self.prepare_version = prepare_version
        self.health_version = health_version
        self.connected = False
        # Whether the plugin was told that it is registered; calls may come before.
        self.told = False
        self.health: dict[tuple[str, str], Health] = {}
        self.health_messages = 0
        self._timings = timings
        self._on_change, self._on_health = on_change, on_health
        self._closed = threading.Event()
        self._stream: Any = None
        self._channel = grpc.insecure_channel(
            f"unix:{info.endpoint}",
            options=(
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ),
        )
        self._health_thread = threading.Thread(target=self._watch_health, name="kubelet-health", daemon=True)

    def start(self) -> None:
        """Connect at once, watch the connection and open the health stream."""
        self._channel.subscribe(self._connectivity, try_to_connect=True)
        if self.health_version:
            self._health_thread.start()

    def close(self) -> None:
        """Drop the connection; nothing is reported afterwards."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self._channel.close()
        if self._health_thread.is_alive():
            self._health_thread.join()

    def prepare(self, claims: Iterable[ClaimRef]) -> Any:
        """Call NodePrepareResources in the chosen version; gives the response. Raises CallError."""
        return self._call(PREPARE_V1 if self.prepare_version == "v1.DRAPlugin" else PREPARE_V1BETA1, claims)

    def unprepare(self, claims: Iterable[ClaimRef]) -> Any:
        """Call NodeUnprepareResources in the chosen version; gives the response. Raises CallError."""
        return self._call(
            UNPREPARE_V1 if self.prepare_version == "v1.DRAPlugin" else UNPREPARE_V1BETA1, claims
        )

    def health_of(self, pool: str, device: str) -> tuple[str, str]:
        """Give (state, message); Unknown without one, and when the last message is too old."""
        health = self.health.get((pool, device))
        if health is None or time.monotonic() - health.received > health.timeout_seconds:
            return "Unknown", ""
        return health.state, health.message

    def _call(self, method: Method, claims: Iterable[ClaimRef]) -> Any:
        request: Any = method.request()
        for ref in claims:
            request.claims.add(namespace=ref.namespace, name=ref.name, uid=ref.uid)
        try:
            return stub_of(self._channel, method)(request, timeout=self._timings.call)
        except grpc.RpcError as error:
            raise CallError(_text(error)) from error

    def _connectivity(self, state: grpc.ChannelConnectivity) -> None:
        if self._closed.is_set():
            return
        connected = state is grpc.ChannelConnectivity.READY
        if connected != self.connected:
            self.connected = connected
            self._on_change()

    def _watch_health(self) -> None:
        method = WATCH_HEALTH_V1 if self.health_version == HEALTH_V1 else WATCH_HEALTH_V1ALPHA1
        while not self._closed.is_set():
            try:
                self._stream = stub_of(self._channel, method)(method.request())
                for message in self._stream:
                    self._take(message)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed meanwhile
                if not self._closed.is_set():
                    log.debug("sim_health_stream_ended", driver=self.driver, reason=str(error)[:200])
            self.health = {}  # the end of a stream drops everything it said
            if not self._closed.is_set():
                self._on_health()
            self._closed.wait(self._timings.health_retry)

    def _take(self, message: Any) -> None:
        now = time.monotonic()
        said = {
            (entry.device.pool_name, entry.device.device_name): Health(
                _HEALTH_STATES[entry.health],
                entry.message,
                now,
                float(entry.health_check_timeout_seconds) or self._timings.health_default_timeout,
            )
            for entry in message.devices
        }
        self.health = {**self.health, **said}
        self.health_messages += 1
        self._on_health()
