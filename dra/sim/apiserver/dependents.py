"""Who owns what, kept in step with every write: what the collector has to look at after a change.

Pure. Source: the garbage collector of Kubernetes, which keeps such a graph.
"""

from __future__ import annotations

from typing import Any

from dra.sim.apiserver.custom import DEFINITIONS
from dra.sim.apiserver.storage import Change, Key

Json = dict[str, Any]
Place = tuple[str, Key]  # resource, key


class Dependents:
    """The objects by UID, and by owner those that it owns."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        # The inner dict is a set that keeps the order of creation.
        self._owned: dict[str, dict[Place, None]] = {}
        # Those that are marked for deletion.
        self._leaving: set[str] = set()

    def knows(self, uid: str) -> bool:
        """Whether there is an object with this UID."""
        return uid in self._places

    def of(self, uid: str) -> list[Place]:
        """Give the objects that name this UID as an owner."""
        return list(self._owned.get(uid, ()))

    def noticed(self, resource: str, change: Change) -> list[Place]:
        """Take note of a write, and give what may have to be deleted, emptied or let go because of it."""
        place = (resource, change.key)
        before, after = change.before, change.after
        old, new = _owners(before), _owners(after)
        if old != new:
            self._move(place, old, new)
        if after is None:
            assert before is not None
            uid = before["metadata"]["uid"]
            self._places.pop(uid, None)
            self._leaving.discard(uid)
            # What it owned, who waits for it to go, and the namespace or definition that is emptied.
            return [*self.of(uid), *self._existing(old), *_holders(place)]
        meta = after["metadata"]
        self._places[meta["uid"]] = place
        leaving = bool(meta.get("deletionTimestamp"))
        if leaving:
            self._leaving.add(meta["uid"])
        due = [place] if leaving else []
        if old != new:
            # An orphan, whom its owners let go, and owners on their way out that have one more to take along.
            orphaned = bool(new) and not any(map(self.knows, new))
            due += [*([place] if orphaned else ()), *self._existing(old)]
            due += self._existing([uid for uid in new if uid in self._leaving])
        return due

    def _move(self, place: Place, old: list[str], new: list[str]) -> None:
        for uid in old:
            if uid not in new:
                owned = self._owned[uid]
                owned.pop(place, None)
                if not owned:
                    del self._owned[uid]
        for uid in new:
            self._owned.setdefault(uid, {})[place] = None

    def _existing(self, uids: list[str]) -> list[Place]:
        return [self._places[uid] for uid in uids if uid in self._places]


def _owners(obj: Json | None) -> list[str]:
    if obj is None:
        return []
    return list(dict.fromkeys(owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ()))


def _holders(place: Place) -> list[Place]:
    resource, (namespace, _) = place
    group, _, plural = resource.partition("/")
    return [
        *([("/namespaces", ("", namespace))] if namespace else ()),
        *([(DEFINITIONS, ("", f"{plural}.{group}"))] if group else ()),
    ]
