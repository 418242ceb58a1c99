"""The device health stream, in both versions, on threads of its own.

Each message is the complete list: at once, on every change, and at least every ten seconds, because the kubelet
shows Unknown after thirty without one. Source: kubelet DRA manager, NodeWatchResources (1.34 to 1.37).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from dra.health.feed import DeviceCondition, HealthFeed
from dra.pb.services import WATCH_HEALTH_V1, WATCH_HEALTH_V1ALPHA1, Method
from dra.plugin.call_pool import CallPool
from dra.plugin.server import Behaviour
from dra.telemetry.log import get_logger

log = get_logger()

# One kubelet keeps one stream; a few more during its restart and for people who look.
MAX_STREAMS = 6
RESEND_SECONDS = 10.0
KUBELET_TIMEOUT_SECONDS = 30

_STATES = {"Unknown": 0, "Healthy": 1, "Unhealthy": 2}


class HealthService:
    """Streams a feed. `resend_seconds` is how often an unchanged list is sent again."""

    def __init__(
        self,
        feed: HealthFeed,
        *,
        resend_seconds: float = RESEND_SECONDS,
        max_streams: int = MAX_STREAMS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._feed = feed
        self._resend = resend_seconds
        self._clock = clock
        self._slots = threading.BoundedSemaphore(max_streams)
        # Two threads more than streams: a stream too many is told so at once and does not wait in a queue.
        self._pool = CallPool("health-stream", threads=max_streams + 2)

    def methods(self) -> tuple[tuple[Method, Behaviour], ...]:
        """Give the methods for a server."""
        self._pool.open()
        return tuple((method, self._behaviour(method)) for method in (WATCH_HEALTH_V1, WATCH_HEALTH_V1ALPHA1))

    def shut(self) -> None:
        """Let the threads go. Call after the feed was closed."""
        self._pool.shutdown(wait=False)

    def _behaviour(self, method: Method) -> Behaviour:
        def watch(_request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            return self._stream(method, context)

        # Source: grpcio's per-method pool, so that streams never take the threads of prepare calls.
        watch.experimental_thread_pool = self._pool  # type: ignore[attr-defined]
        return watch

    def _stream(self, method: Method, context: grpc.ServicerContext) -> Iterator[Any]:
        if not self._slots.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health streams are open")
        try:
            context.add_callback(self._feed.wake)
            log.info("health_stream_opened", version=method.service)
            version, conditions = self._feed.current()
            # One of this stream alone: it is serialised before the next is asked for.
            message = _message(method, conditions)
            while context.is_active() and not self._feed.closed:
                now = int(self._clock())
                for entry in message.devices:
                    entry.last_updated_time = now
                yield message
                seen = version
                version, conditions = self._feed.wait(
                    seen=seen, timeout_seconds=self._resend, gone=lambda: not context.is_active()
                )
                if version != seen:
                    message = _message(method, conditions)
            log.info("health_stream_closed", version=method.service)
        finally:
            self._slots.release()


def _message(method: Method, conditions: tuple[DeviceCondition, ...]) -> Any:
    """Give the message about these devices, without the time."""
    response: Any = method.response()
    for condition in conditions:
        entry = response.devices.add(
            health=_STATES[condition.state],
            health_check_timeout_seconds=KUBELET_TIMEOUT_SECONDS,
            message=condition.message,
        )
        entry.device.pool_name = condition.pool
        entry.device.device_name = condition.device
    return response
