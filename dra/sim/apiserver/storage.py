"""Objects in memory under one revision counter, with a history that watches and old lists read.

Stored objects are never changed in place: a write puts a new dict. Every write gets the next revision; the history
keeps the object before and after, so that the state at an older revision can be worked out by going back.
Source: the semantics of etcd revisions and of the API server's watch cache.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dra.sim.apiserver.index import Index

Json = dict[str, Any]
Key = tuple[str, str]  # namespace ('' for cluster scope), name


@dataclass(frozen=True, slots=True)
class Change:
    """One write: `before` is None for a creation, `after` for nothing but a deletion carries the last state."""

    revision: int
    key: Key
    before: Json | None
    after: Json | None
    last: Json | None = None


class ExpiredError(Exception):
    """The revision asked for is older than the history."""


class Bucket:
    """The objects of one resource and their history."""

    def __init__(self, lock: threading.RLock) -> None:
        self.objects: dict[Key, Json] = {}
        self.history: list[Change] = []
        self.changed = threading.Condition(lock)
        self.indexes: dict[str, Index] = {}
        self.epoch = 0  # moves when watches must end (a custom resource goes away, a fault, the server stops)


class Storage:
    """All buckets and the revision. Every method may be called from any thread."""

    def __init__(self, *, first_revision: int = 1000, keep: int = 20_000) -> None:
        self.lock = threading.RLock()
        self._buckets: dict[str, Bucket] = {}
        self._revision = first_revision
        self._compacted = first_revision
        self._keep = keep
        self._listeners: list[Callable[[str, Change], None]] = []

    @property
    def revision(self) -> int:
        """The newest revision."""
        return self._revision

    @property
    def compacted(self) -> int:
        """Revisions below this cannot be read any more."""
        return self._compacted

    def bucket(self, resource: str) -> Bucket:
        """Give the bucket of a resource, made when it is first asked for."""
        with self.lock:
            found = self._buckets.get(resource)
            if found is None:
                found = self._buckets[resource] = Bucket(self.lock)
            return found

    def subscribe(self, listener: Callable[[str, Change], None]) -> None:
        """Call `listener(resource, change)` after every write, under the lock: it must be quick."""
        self._listeners.append(listener)

    def get(self, resource: str, key: Key) -> Json | None:
        """Give the object, or None."""
        return self.bucket(resource).objects.get(key)

    def put(self, resource: str, key: Key, obj: Json) -> Json:
        """Store `obj` (its metadata.resourceVersion is set here) and give it back."""
        with self.lock:
            bucket = self.bucket(resource)
            self._revision += 1
            obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._revision)}}
            before = bucket.objects.get(key)
            bucket.objects[key] = obj
            self._record(resource, bucket, Change(self._revision, key, before, obj))
            return obj

    def delete(self, resource: str, key: Key, last: Json | None = None) -> Json:
        """Remove the object and give its last state, stamped with the revision of the deletion.

        Raises:
            KeyError: it is not there.
        """
        with self.lock:
            bucket = self.bucket(resource)
            before = bucket.objects.pop(key)
            self._revision += 1
            state = last or before
            state = {**state, "metadata": {**state["metadata"], "resourceVersion": str(self._revision)}}
            # Watches see the state before the deletion, with its revision.
            meta = {**before["metadata"], "resourceVersion": str(self._revision)}
            change = Change(self._revision, key, before, None, {**before, "metadata": meta})
            self._record(resource, bucket, change)
            return state

    def _record(self, resource: str, bucket: Bucket, change: Change) -> None:
        bucket.history.append(change)
        if len(bucket.history) > self._keep:
            dropped = bucket.history[: self._keep // 2]
            bucket.history = bucket.history[self._keep // 2 :]
            self._compacted = max(self._compacted, dropped[-1].revision)
        bucket.changed.notify_all()
        for index in bucket.indexes.values():
            index.note(change.revision, change.key, change.before, change.after)
        for listener in self._listeners:
            listener(resource, change)

    def bump(self) -> int:
        """Move the revision without a change (what another writer's lease does to a real server)."""
        with self.lock:
            self._revision += 1
            return self._revision

    def compact(self, revision: int | None = None) -> None:
        """Forget history up to `revision` (default: all of it): older watches and lists get 410."""
        with self.lock:
            self._compacted = self._revision if revision is None else min(revision, self._revision)
            for bucket in self._buckets.values():
                bucket.history = [c for c in bucket.history if c.revision > self._compacted]

    def snapshot(self, resource: str, revision: int | None = None) -> tuple[int, dict[Key, Json]]:
        """Give the objects as they were at `revision` (default: now) in key order, and the revision.

        Raises:
            ExpiredError: `revision` was compacted.
        """
        with self.lock:
            bucket = self.bucket(resource)
            objects = bucket.objects
            if revision is not None and revision < self._revision:
                if revision < self._compacted:
                    raise ExpiredError
                objects = dict(objects)
                for change in reversed(bucket.history):
                    if change.revision <= revision:
                        break
                    if change.before is None:
                        objects.pop(change.key, None)
                    else:
                        objects[change.key] = change.before
            at = self._revision if revision is None else revision
            return at, {key: objects[key] for key in sorted(objects, key="/".join)}

    def index(self, resource: str, field: str, value_of: Callable[[Json], str]) -> Index:
        """Give the index over a field of a resource, made when it is first asked for."""
        with self.lock:
            bucket = self.bucket(resource)
            found = bucket.indexes.get(field)
            if found is None:
                found = bucket.indexes[field] = Index(value_of, self.lock)
                for key, obj in bucket.objects.items():
                    found.note(self._revision, key, None, obj)
            return found

    def selected(self, resource: str, index: Index, value: str) -> tuple[int, dict[Key, Json]]:
        """Give the objects with a value of an index as they are now, in key order, and the revision."""
        with self.lock:
            objects = self.bucket(resource).objects
            return self._revision, {key: objects[key] for key in index.keys(value)}

    def changes_after(self, resource: str, revision: int) -> list[Change]:
        """Give the changes of a resource after `revision`, oldest first.

        Raises:
            ExpiredError: some of them were compacted.
        """
        with self.lock:
            if revision < self._compacted:
                raise ExpiredError
            history = self.bucket(resource).history
            start = bisect_right(history, revision, key=lambda c: c.revision)
            return history[start:]

    def wake_all(self, resource: str | None = None) -> None:
        """End the watches of a resource, or all of them."""
        with self.lock:
            names = [resource] if resource is not None else list(self._buckets)
            for name in names:
                bucket = self.bucket(name)
                bucket.epoch += 1
                bucket.changed.notify_all()
                for index in bucket.indexes.values():
                    index.wake_all()

    def every_object(self) -> Iterator[tuple[str, Key, Json]]:
        """Give all objects of all resources (a copy of the index, taken under the lock)."""
        with self.lock:
            found = [(name, key, obj) for name, b in self._buckets.items() for key, obj in b.objects.items()]
        return iter(found)
