"""Events on API objects: what `kubectl describe` shows at the end.

The caller never waits and never sees a failure: events are put into a bounded queue and written by a thread
that starts with the first one. The same event again raises the count of the one that is there. An object
gets few events a minute, as from client-go (a burst of 25, then one in five minutes).
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import random
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from dra.errors import HostError, KubeError
from dra.kube.client import KubeClient
from dra.kube.clock import Backoff, Clock, SystemClock, TokenBucket
from dra.kube.resources import EVENTS
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

EventType = Literal["Normal", "Warning"]
# Source: client-go tools/record, the event spam filter and the limits of the API.
BURST = 25
PER_SECOND = 1 / 300
MAX_MESSAGE = 1024
QUEUE = 256
# Times an event is tried while the server is away; about ten seconds.
ATTEMPTS = 6
# Events of which the count can still be raised, and for how long.
REMEMBERED = 512
SAME_SECONDS = 600.0
# Without the right to write events nobody asks again for a while: short at first, because a server that has just
# started refuses until it has read its roles, then twice as long each time.
FORBIDDEN_SECONDS = 600.0
FIRST_FORBIDDEN_SECONDS = 5.0
# Source: the admission plugin NamespaceLifecycle; nothing new is kept in such a namespace, and it is no missing right.
_TERMINATING = "because it is being terminated"

log = get_logger()


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """The object an event is about. Events on cluster-scoped objects are kept in `default`."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str = ""


@dataclass(slots=True)
class _Written:
    name: str
    count: int
    # When it was last said, on the clock that cannot be set.
    seen: float


class EventRecorder:
    """Writes events in the background.

    Args:
        component: who says it, for example `gpu.nvidia.com`.
        host: the node's name.
    """

    def __init__(
        self, client: KubeClient, *, component: str, host: str = "", clock: Clock | None = None
    ) -> None:
        self._client = client
        self._component = component
        self._host = host
        self._clock = clock or SystemClock()
        self._queue: queue.Queue[tuple[ObjectReference, EventType, str, str, float] | None] = queue.Queue(
            QUEUE
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._ending = threading.Event()
        self._rng = random.SystemRandom()
        self._failing = ""
        self._refused = 0
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._known: OrderedDict[tuple[str, str, str, str], _Written] = OrderedDict()
        self._mute_until = 0.0
        self.dropped = 0

    def emit(self, about: ObjectReference, type_: EventType, reason: str, message: str) -> None:
        """Say something about an object; returns at once, whatever the API server does.

        `reason` is one word in CamelCase for programs, `message` a sentence for people.
        """
        with self._lock:
            if self._stopped:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="events", daemon=True)
                # Without a thread the event waits for the next one's try.
                with contextlib.suppress(HostError):
                    start_thread(thread)
                    self._thread = thread
        try:
            self._queue.put_nowait((about, type_, reason, message[:MAX_MESSAGE], self._clock.wall()))
        except queue.Full:
            self.dropped += 1

    def stop(self, *, timeout_seconds: float = 1.0) -> None:
        """Write what is queued, for at most this long, and end."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        if thread is None:
            return
        try:
            self._ending.set()
            self._queue.put(None, timeout=timeout_seconds)
        except queue.Full:
            return
        thread.join(timeout_seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            about, type_, reason, message, at = item
            if self._clock.now() < self._mute_until or not self._allowed(about):
                self.dropped += 1
                continue
            try:
                self._deliver(about, type_, reason, message=message, at=at)
            except Exception:  # marked border: an event is never worth a thread
                self.dropped += 1
                log.exception("event_crashed", event_reason=reason)

    def _deliver(
        self, about: ObjectReference, type_: EventType, reason: str, *, message: str, at: float
    ) -> None:
        """Write one event; while the server is away, wait for it a little."""
        backoff = Backoff(rng=self._rng)
        while True:
            try:
                self._write(about, type_, reason, message=message, at=at)
                self._failing, self._refused = "", 0
                return
            except KubeError as error:
                if error.code != self._failing:
                    log.warning("event_failed", event_reason=reason, about=about.name, **error_fields(error))
                self._failing = error.code
                if error.status == 403 and _TERMINATING not in error.message:
                    seconds = min(FIRST_FORBIDDEN_SECONDS * 2**self._refused, FORBIDDEN_SECONDS)
                    self._mute_until = self._clock.now() + seconds
                    self._refused = min(self._refused + 1, 16)
                passing = error.status in (0, 429) or error.status >= 500
                if not passing or backoff.failures >= ATTEMPTS or self._ending.is_set():
                    self.dropped += 1
                    return
                self._clock.wait(self._ending, backoff.next_seconds(error))

    def _allowed(self, about: ObjectReference) -> bool:
        bucket = self._buckets.get(about.uid)
        if bucket is None:
            bucket = TokenBucket(per_second=PER_SECOND, burst=BURST, clock=self._clock)
            self._buckets[about.uid] = bucket
            if len(self._buckets) > REMEMBERED:
                self._buckets.popitem(last=False)
        return bucket.try_take()

    def _write(
        self, about: ObjectReference, type_: EventType, reason: str, *, message: str, at: float
    ) -> None:
        key = (about.uid, type_, reason, message)
        namespace = about.namespace or "default"
        known = self._known.get(key)
        now = self._clock.now()
        if known is not None and now - known.seen <= SAME_SECONDS:
            known.count, known.seen = known.count + 1, now
            try:
                body = {"count": known.count, "lastTimestamp": _rfc3339(at)}
                self._client.patch(EVENTS, known.name, body, namespace, timeout_seconds=5.0)
                return
            except KubeError as error:
                if error.code != "DRA-API-NOT-FOUND":
                    raise
        # Unlike a random name, this one is the same if the first answer was lost.
        digest = hashlib.sha256(f"{key}{at}".encode()).hexdigest()[:16]
        name = f"{about.name[:200].rstrip('.-')}.{digest}"
        body = event_body(
            about,
            type_,
            reason,
            message=message,
            name=name,
            at=at,
            component=self._component,
            host=self._host,
        )
        try:
            self._client.create(EVENTS, body, namespace, timeout_seconds=5.0)
        except KubeError as error:
            if error.reason != "AlreadyExists":
                raise
        self._known[key] = _Written(name, 1, now)
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


def event_body(
    about: ObjectReference,
    type_: EventType,
    reason: str,
    *,
    message: str,
    name: str,
    at: float,
    component: str,
    host: str,
) -> dict[str, Any]:
    """Give the core/v1 Event object (the kind that most roles may write)."""
    involved = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
    if about.namespace:
        involved["namespace"] = about.namespace
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.namespace or "default"},
        "involvedObject": involved,
        "reason": reason,
        "message": message,
        "type": type_,
        "count": 1,
        "firstTimestamp": _rfc3339(at),
        "lastTimestamp": _rfc3339(at),
        "source": {"component": component, **({"host": host} if host else {})},
        "reportingComponent": component,
        "reportingInstance": host,
    }


def _rfc3339(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
