"""What the controller manager does for every object: garbage collection by owner, and emptying namespaces.

Runs in one thread, woken by changes. Source: the garbage collector and namespace controllers of Kubernetes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dra.sim.apiserver.deletion import FOREGROUND, ORPHAN, finished
from dra.sim.apiserver.storage import Change, Key, Storage

if TYPE_CHECKING:
    from dra.sim.apiserver.api import Api

Json = dict[str, Any]


class Collector:
    """Deletes what has lost its owners, and works off the finalizers that mean "wait for the dependents"."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._storage: Storage = api.storage
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._storage.subscribe(self._noticed)

    def start(self) -> None:
        """Start the thread."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="sim-collector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def _noticed(self, resource: str, change: Change) -> None:
        # Only a deletion, or an object that is marked for it, can give the collector work.
        after = change.after
        if (
            after is None
            or after["metadata"].get("deletionTimestamp")
            or after["metadata"].get("ownerReferences")
        ):
            self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._stop.is_set() and self.sweep():
                pass

    def sweep(self) -> bool:
        """Do one round; gives whether anything changed."""
        with self._storage.lock:
            entries = list(self._storage.every_object())
            uids = {obj["metadata"]["uid"] for _, _, obj in entries}
            dependents: dict[str, list[tuple[str, Key, Json]]] = {}
            for entry in entries:
                for owner in entry[2]["metadata"].get("ownerReferences") or []:
                    dependents.setdefault(owner["uid"], []).append(entry)
            changed = False
            for resource, key, obj in entries:
                changed |= self._visit(resource, key, obj, uids, dependents)
            return changed

    def _visit(
        self,
        resource: str,
        key: Key,
        obj: Json,
        uids: set[str],
        dependents: dict[str, list[tuple[str, Key, Json]]],
    ) -> bool:
        current = self._storage.get(resource, key)
        if current is None or current["metadata"]["uid"] != obj["metadata"]["uid"]:
            return False
        meta = current["metadata"]
        if resource == "/namespaces" and meta.get("deletionTimestamp"):
            return self._empty_namespace(current)
        if meta.get("deletionTimestamp"):
            mine = dependents.get(meta["uid"], [])
            finalizers = meta.get("finalizers") or []
            if ORPHAN in finalizers:
                for entry in mine:
                    self._disown(entry, meta["uid"])
                return self._strike(resource, key, current, ORPHAN)
            if FOREGROUND in finalizers:
                return self._foreground(resource, key, current, mine)
            return False
        owners = meta.get("ownerReferences") or []
        if owners and not any(owner["uid"] in uids for owner in owners):
            return self._delete(resource, key, current)
        return False

    def _foreground(self, resource: str, key: Key, current: Json, mine: list[tuple[str, Key, Json]]) -> bool:
        blocking = False
        changed = False
        for name, child_key, _ in mine:
            child = self._storage.get(name, child_key)
            if child is None:
                continue
            owners = child["metadata"].get("ownerReferences") or []
            uid = current["metadata"]["uid"]
            blocking |= any(o["uid"] == uid and o.get("blockOwnerDeletion") for o in owners)
            if not child["metadata"].get("deletionTimestamp"):
                changed |= self._delete(name, child_key, child, foreground=True)
        if blocking and any(self._storage.get(name, child_key) is not None for name, child_key, _ in mine):
            return changed
        return self._strike(resource, key, current, FOREGROUND) or changed

    def _disown(self, entry: tuple[str, Key, Json], uid: str) -> None:
        resource, key, _ = entry
        child = self._storage.get(resource, key)
        if child is None:
            return
        owners = [o for o in child["metadata"].get("ownerReferences") or [] if o["uid"] != uid]
        meta = {k: v for k, v in child["metadata"].items() if k != "ownerReferences"}
        if owners:
            meta["ownerReferences"] = owners
        self._storage.put(resource, key, {**child, "metadata": meta})

    def _strike(self, resource: str, key: Key, current: Json, finalizer: str) -> bool:
        left = [f for f in current["metadata"].get("finalizers") or [] if f != finalizer]
        meta = {k: v for k, v in current["metadata"].items() if k != "finalizers"}
        if left:
            meta["finalizers"] = left
        self._store_or_drop(resource, key, {**current, "metadata": meta})
        return True

    def _store_or_drop(self, resource: str, key: Key, obj: Json) -> None:
        if finished(obj):
            self._storage.delete(resource, key, obj)
        else:
            self._storage.put(resource, key, obj)

    def _delete(self, resource: str, key: Key, current: Json, *, foreground: bool = False) -> bool:
        """Delete as a client would: pods gracefully, finalizers respected."""
        meta = current["metadata"]
        if meta.get("deletionTimestamp"):
            return False
        finalizers = list(meta.get("finalizers") or [])
        if foreground and FOREGROUND not in finalizers:
            finalizers.append(FOREGROUND)
        grace = 0
        if current.get("kind") == "Pod" and (current.get("spec") or {}).get("nodeName"):
            done = (current.get("status") or {}).get("phase") in {"Failed", "Succeeded"}
            grace = 0 if done else int(current["spec"].get("terminationGracePeriodSeconds", 30))
        if not finalizers and not grace:
            self._storage.delete(resource, key)
            return True
        marked = {**meta, "deletionTimestamp": self._api.after(grace), "deletionGracePeriodSeconds": grace}
        if finalizers:
            marked["finalizers"] = finalizers
        if meta.get("generation"):
            marked["generation"] = meta["generation"] + 1
        self._storage.put(resource, key, {**current, "metadata": marked})
        return True

    def _empty_namespace(self, namespace: Json) -> bool:
        name = namespace["metadata"]["name"]
        left = False
        changed = False
        for resource, key, obj in self._storage.every_object():
            if key[0] == name:
                changed |= self._delete(resource, key, obj)
                left |= self._storage.get(resource, key) is not None
        if left:
            return changed
        spec = {k: v for k, v in (namespace.get("spec") or {}).items() if k != "finalizers"}
        self._store_or_drop("/namespaces", ("", name), {**namespace, "spec": spec})
        return True
