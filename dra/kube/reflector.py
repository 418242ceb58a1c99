"""Follow a collection: list it, watch it, and never stop, whatever the server does.

Three layers, so that only the lower two need many tests:

* infinite: starts over after every failure, with back-off;
* continuous: one list, then watches one after the other, each from where the last one ended;
* single: one watch request.

A watch is asked to end after less than a minute. A connection that is open and silent (a proxy that lost its
other side) is therefore found out within that time, and what changed meanwhile is seen by the next list.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from dra.errors import DraError, KubeError
from dra.kube.client import PAGE, KubeClient, ObjectList
from dra.kube.clock import Backoff, Clock, SystemClock, TokenBucket
from dra.kube.resources import Resource
from dra.kube.stream import WatchStream
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

# The server ends a watch after this long (less up to a fifth, so that a fleet spreads).
WATCH_SECONDS = 50
# Silence this much longer than the watch should have lasted means that nothing will ever come.
SLACK_SECONDS = 5.0
# A watch that ended sooner than this and brought nothing counts as a failure.
SHORT_SECONDS = 5.0

Json = dict[str, Any]
log = get_logger()


@dataclass(frozen=True, slots=True)
class Change:
    """One object that came, changed or went. `deleted` carries its last known state."""

    type: Literal["added", "modified", "deleted"]
    object: Json


@dataclass(frozen=True, slots=True)
class ReflectorOptions:
    """What to follow, and how patiently.

    Args:
        page: objects that are asked for at once.
    """

    namespace: str | None = None
    label_selector: str = ""
    field_selector: str = ""
    watch_seconds: int = WATCH_SECONDS
    slack_seconds: float = SLACK_SECONDS
    list_seconds: float = 10.0
    page: int = PAGE
    # Requests per second on average, and at once, against a server that ends everything immediately.
    requests_per_second: float = 1.0
    burst: int = 4


class Reflector:
    """A local copy of a collection that follows the server, in a thread of its own.

    Args:
        on_change: called in the reflector's thread for each object that differs from the copy.
        on_list: called in that thread after each complete list, after the changes it brought.
        keep: gives what is kept of an object as it comes, and told of it; its metadata must keep name, namespace, uid
            and resourceVersion. Everything, if not given.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        on_change: Callable[[Change], None] | None = None,
        on_list: Callable[[ObjectList], None] | None = None,
        options: ReflectorOptions | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        keep: Callable[[Json], Json] = lambda obj: obj,
    ) -> None:
        self._client = client
        self._resource = resource
        self._on_change = on_change or (lambda _change: None)
        self._on_list = on_list or (lambda _listed: None)
        self._kept_of = keep
        self._options = options or ReflectorOptions()
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._backoff = Backoff(base_seconds=0.5, rng=self._rng)
        self._pace = TokenBucket(
            per_second=self._options.requests_per_second, burst=self._options.burst, clock=self._clock
        )
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], Json] = {}
        self._stop = threading.Event()
        # Wakes a pause: set by stop() and by hurry().
        self._interrupt = threading.Event()
        self._stream: WatchStream | None = None
        self._thread: threading.Thread | None = None
        self._error: DraError | None = None
        self.synced = threading.Event()

    # -- for the owner -----------------------------------------------------------------------------

    def start(self) -> None:
        """Follow in a thread of its own.

        Raises:
            HostError: DRA-HOST-NO-THREADS.
        """
        thread = threading.Thread(target=self.run, name=f"watch-{self._resource.plural}", daemon=True)
        start_thread(thread)
        self._thread = thread

    def stop(self, *, timeout_seconds: float = 2.0) -> bool:
        """End, also out of a blocking read; whether the thread is gone."""
        self._stop.set()
        self._interrupt.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    def hurry(self) -> None:
        """Cut a pause short: somebody saw that the server answers again."""
        self._interrupt.set()

    @property
    def error(self) -> DraError | None:
        """What keeps the copy from being current; None while the watch is good."""
        return self._error

    def objects(self) -> tuple[Json, ...]:
        """Give the copy as it is now, ordered by namespace and name. Read, never write into it."""
        with self._lock:
            return tuple(self._objects[key] for key in sorted(self._objects))

    def get(self, name: str, namespace: str = "") -> Json | None:
        """Give one object of the copy."""
        with self._lock:
            return self._objects.get((namespace, name))

    # -- the three loops ---------------------------------------------------------------------------

    def run(self) -> None:
        """Follow until `stop`: the infinite loop."""
        while not self._stop.is_set():
            error: DraError
            try:
                self.follow()
                return
            except DraError as failure:
                error = failure
            except Exception as failure:  # marked border: a bug here must not end the watch
                log.exception("watch_crashed", watched=self._resource.full_name)
                error = KubeError("DRA-API-INTERNAL", f"watching {self._resource.full_name}: {failure!r}")
            if self._stop.is_set():
                return
            self._failed(error)

    def follow(self) -> None:
        """List once and watch from there until `stop`: the continuous loop.

        Raises:
            KubeError: what made a new list necessary.
        """
        version = self._list()
        while not self._stop.is_set():
            began = self._clock.now()
            version, seen = self._watch_once(version)
            if seen or self._clock.now() - began >= SHORT_SECONDS:
                self._backoff.reset()
            else:
                # The server ended the watch at once: no error, and no reason to ask again at once.
                self._rest(self._backoff.next_seconds())

    def _watch_once(self, version: str) -> tuple[str, int]:
        """Watch with one request; give the version to go on from and how many events came."""
        self._rest(self._pace.take())
        options = self._options
        if self._stop.is_set():
            return version, 0
        seconds = max(1, round(options.watch_seconds * (1 - self._rng.random() / 5)))
        stream = self._client.watch(
            self._resource,
            options.namespace,
            resource_version=version,
            label_selector=options.label_selector,
            field_selector=options.field_selector,
            server_seconds=seconds,
            inactivity_seconds=options.watch_seconds + options.slack_seconds,
        )
        with self._lock:
            self._stream = stream
        if self._stop.is_set():
            stream.close()
        self._error = None
        seen = 0
        try:
            for event in stream:
                if event.type != "BOOKMARK":
                    self._keep(event.type, event.object)
                version = event.resource_version or version
                seen += 1
        finally:
            with self._lock:
                self._stream = None
            with suppress(Exception):
                stream.close()
        return version, seen

    # -- the copy ----------------------------------------------------------------------------------

    def _list(self) -> str:
        self._rest(self._pace.take())
        listed = self._client.list(
            self._resource,
            self._options.namespace,
            label_selector=self._options.label_selector,
            field_selector=self._options.field_selector,
            page=self._options.page,
            keep=self._kept_of,
            timeout_seconds=self._options.list_seconds,
        )
        fresh = {_key(obj): obj for obj in listed.items}
        with self._lock:
            known, self._objects = self._objects, fresh
        for change in plan_changes(known, fresh):
            self._on_change(change)
        self.synced.set()
        self._on_list(listed)
        return listed.resource_version

    def _keep(self, event: str, obj: Json) -> None:
        obj = self._kept_of(obj)
        key = _key(obj)
        with self._lock:
            known = self._objects.pop(key, None)
            if event != "DELETED":
                self._objects[key] = obj
        if event == "DELETED":
            if known is not None:
                self._on_change(Change("deleted", obj))
        else:
            self._on_change(Change("added" if known is None else "modified", obj))

    # -- pauses ------------------------------------------------------------------------------------

    def _failed(self, error: DraError) -> None:
        """Report a failure (a forgotten version is none) and pause."""
        gone = isinstance(error, KubeError) and error.code == "DRA-API-GONE"
        new = self._error is None or self._error.code != error.code
        if not gone:
            self._error = error
        if new:
            report = log.info if gone else log.warning
            report("watch_restarted", watched=self._resource.full_name, **error_fields(error))
        self._rest(self._backoff.next_seconds(error))

    def _rest(self, seconds: float) -> None:
        if seconds > 0 and not self._stop.is_set():
            self._interrupt.clear()
            if not self._stop.is_set():
                self._clock.wait(self._interrupt, seconds)


def plan_changes(known: dict[tuple[str, str], Json], fresh: dict[tuple[str, str], Json]) -> list[Change]:
    """Give what a new list tells against the old copy: what is gone first, then the rest by name.

    An object that was deleted and made again under the same name is `deleted`, then `added`.
    """
    changes = [
        Change("deleted", known[key])
        for key in sorted(known)
        if key not in fresh or _uid(fresh[key]) != _uid(known[key])
    ]
    for key in sorted(fresh):
        before = known.get(key)
        if before is None or _uid(before) != _uid(fresh[key]):
            changes.append(Change("added", fresh[key]))
        elif _version(before) != _version(fresh[key]):
            changes.append(Change("modified", fresh[key]))
    return changes


def metadata_of(obj: Json) -> Json:
    """Keep of an object what tells it from others and from what it was."""
    kept = {key: obj["metadata"].get(key) for key in ("namespace", "name", "uid", "resourceVersion")}
    return {"metadata": kept}


def _key(obj: Json) -> tuple[str, str]:
    metadata = obj.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _uid(obj: Json) -> object:
    return (obj.get("metadata") or {}).get("uid")


def _version(obj: Json) -> object:
    return (obj.get("metadata") or {}).get("resourceVersion")
