"""Watch streams: initial state, changes as one client's selection sees them, bookmarks, and the end.

Source: the watch semantics of the Kubernetes API (resourceVersion, allowWatchBookmarks, sendInitialEvents).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dra.sim.apiserver.exchange import dump
from dra.sim.apiserver.index import Index
from dra.sim.apiserver.status import expired
from dra.sim.apiserver.storage import Bucket, Change, ExpiredError, Storage

Json = dict[str, Any]
# How long a silent stream sleeps before it looks whether its client is still there.
_HEARTBEAT_SECONDS = 5.0
INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True)
class Trigger:
    """The only objects that a watch can see a change of: those with a value of an index."""

    index: Index
    value: str


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """What a client asked for.

    `after`: changes after this revision; `initial`: first the objects that exist; `initial_end`: a bookmark that says
    where they end. `matches` selects stored objects; `encode` gives the object of an event.
    """

    resource: str
    after: int
    initial: bool
    initial_end: bool
    bookmarks: bool
    timeout_seconds: float
    matches: Callable[[Json], bool]
    encode: Callable[[Json], Json]
    bookmark: Callable[[int, Json | None], Json]
    trigger: Trigger | None = None
    bookmark_seconds: float = 60.0
    second: float = 1.0


def _event(kind: str, obj: Json) -> bytes:
    return dump({"type": kind, "object": obj})


def as_seen(change: Change, matches: Callable[[Json], bool]) -> tuple[str, Json] | None:
    """Give the event type and object that a selection sees of a change, None where it sees nothing."""
    was = change.before is not None and matches(change.before)
    if change.after is None:
        return ("DELETED", change.last or change.before or {}) if was else None
    if not matches(change.after):
        if not was or change.before is None:
            return None
        # It left the selection: the client gets its state before the change, at the revision of the change.
        version = {"resourceVersion": change.after["metadata"]["resourceVersion"]}
        return "DELETED", {**change.before, "metadata": {**change.before["metadata"], **version}}
    return ("MODIFIED" if was else "ADDED"), change.after


def _next_bookmark(plan: WatchPlan, now: float, deadline: float) -> float:
    """Give when the next bookmark is due: now and then, and in the last two seconds of the watch."""
    due = now + plan.bookmark_seconds
    for left in (2, 1) if plan.timeout_seconds > 2 * plan.second else ():
        last = deadline - left * plan.second
        if last > now:
            return min(due, last)
    return due


def _news_of(bucket: Bucket, trigger: Trigger | None) -> tuple[threading.Condition, Callable[[], int]]:
    """Give what is notified of changes that a watch may see, and the revision of the last of them."""
    if trigger is not None:
        index, value = trigger.index, trigger.value
        return index.changed(value), lambda: index.last(value)
    return bucket.changed, lambda: bucket.history[-1].revision if bucket.history else 0


def stream(storage: Storage, plan: WatchPlan, *, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the lines of a watch; an empty item is a heartbeat that only asks whether the client is there."""
    deadline = time.monotonic() + plan.timeout_seconds
    bucket = storage.bucket(plan.resource)
    epoch = bucket.epoch
    changed, newest = _news_of(bucket, plan.trigger)
    after = plan.after
    if plan.initial:
        if plan.trigger is None:
            after, objects = storage.snapshot(plan.resource)
        else:
            after, objects = storage.selected(plan.resource, plan.trigger.index, plan.trigger.value)
        for obj in objects.values():
            if plan.matches(obj):
                yield _event("ADDED", plan.encode(obj))
        if plan.initial_end:
            yield _event("BOOKMARK", plan.bookmark(after, {INITIAL_EVENTS_END: "true"}))
    next_bookmark = _next_bookmark(plan, time.monotonic(), deadline)
    while True:
        try:
            changes = storage.changes_after(plan.resource, after)
        except ExpiredError:
            failure = expired(f"too old resource version: {after} ({storage.compacted})")
            yield dump({"type": "ERROR", "object": failure.body()})
            return
        for change in changes:
            seen = as_seen(change, plan.matches)
            after = change.revision
            if seen is not None:
                yield _event(seen[0], plan.encode(seen[1]))
        now = time.monotonic()
        if now >= deadline or stopped() or bucket.epoch != epoch:
            return
        if plan.bookmarks and now >= next_bookmark:
            # Without anything newer than what the client started from a bookmark tells it nothing.
            if storage.revision > plan.after:
                yield _event("BOOKMARK", plan.bookmark(storage.revision, None))
            next_bookmark = _next_bookmark(plan, now, deadline)
        sleep = min(
            _HEARTBEAT_SECONDS, deadline - now, max(next_bookmark - now, 0.01) if plan.bookmarks else 1e9
        )
        with changed:
            idle = newest() <= after
            if idle and bucket.epoch == epoch:
                changed.wait(sleep)
        if idle:
            yield b""
