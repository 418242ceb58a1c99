"""What the controller manager does for every object: garbage collection by owner, and emptying namespaces.

Runs in one thread, woken by changes, and looks only at what a change can have given it to do: a node that publishes is
no work, however many there are. Source: the garbage collector and namespace controllers of Kubernetes.
"""

from __future__ import annotations

import threading
from typing import Any

from dra.sim.apiserver.custom import CLEANUP, DEFINITIONS
from dra.sim.apiserver.deletion import FOREGROUND, ORPHAN, finished
from dra.sim.apiserver.dependents import Dependents, Place
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.storage import Change, Key, Storage

Json = dict[str, Any]


class Collector:
    """Deletes what has lost its owners, and works off the finalizers that mean "wait for the dependents"."""

    def __init__(self, api: ServerState) -> None:
        self._api = api
        self._storage: Storage = api.storage
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Both guarded by the storage's lock.
        self._graph = Dependents()
        self._due: dict[Place, None] = {}
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
        due = self._graph.noticed(resource, change)
        if due:
            self._due.update(dict.fromkeys(due))
            self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._stop.is_set() and self.sweep():
                pass

    def sweep(self) -> bool:
        """Look at everything that changes gave to do; gives whether anything changed."""
        with self._storage.lock:
            due, self._due = self._due, {}
            changed = False
            for place in due:
                changed |= self._visit(*place)
            return changed

    def _visit(self, resource: str, key: Key) -> bool:
        current = self._storage.get(resource, key)
        if current is None:
            return False
        meta = current["metadata"]
        if resource == DEFINITIONS and meta.get("deletionTimestamp"):
            return self._empty_definition(current)
        if resource == "/namespaces" and meta.get("deletionTimestamp"):
            return self._empty_namespace(current)
        if meta.get("deletionTimestamp"):
            mine = self._graph.of(meta["uid"])
            finalizers = meta.get("finalizers") or []
            if ORPHAN in finalizers:
                for place in mine:
                    self._disown(place, meta["uid"])
                return self._strike(resource, key, current, ORPHAN)
            if FOREGROUND in finalizers:
                return self._foreground(resource, key, current, mine)
            return False
        owners = meta.get("ownerReferences") or []
        if owners and not any(self._graph.knows(owner["uid"]) for owner in owners):
            return self._delete(resource, key, current)
        return False

    def _foreground(self, resource: str, key: Key, current: Json, mine: list[Place]) -> bool:
        blocking = False
        changed = False
        for name, child_key in mine:
            child = self._storage.get(name, child_key)
            if child is None:
                continue
            owners = child["metadata"].get("ownerReferences") or []
            uid = current["metadata"]["uid"]
            blocking |= any(o["uid"] == uid and o.get("blockOwnerDeletion") for o in owners)
            if not child["metadata"].get("deletionTimestamp"):
                changed |= self._delete(name, child_key, child, foreground=True)
        if blocking and any(self._storage.get(name, child_key) is not None for name, child_key in mine):
            return changed
        return self._strike(resource, key, current, FOREGROUND) or changed

    def _disown(self, place: Place, uid: str) -> None:
        resource, key = place
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

    def _empty_definition(self, definition: Json) -> bool:
        """Delete the objects of a definition that goes; when none is left, let it go."""
        spec = definition["spec"]
        resource = f"{spec['group']}/{spec['names']['plural']}"
        changed = False
        for key, obj in self._storage.snapshot(resource)[1].items():
            changed |= self._delete(resource, key, obj)
        name = ("", definition["metadata"]["name"])
        if not self._storage.snapshot(resource)[1]:
            return self._strike(DEFINITIONS, name, definition, CLEANUP)
        status = definition.get("status") or {}
        reason, message = "InstanceDeletionInProgress", "CustomResource deletion is in progress"
        conditions = [c for c in status.get("conditions") or [] if c["type"] != "Terminating"]
        before = [c for c in status.get("conditions") or [] if c["type"] == "Terminating"]
        if before and before[0]["reason"] == reason:
            return changed
        conditions.append(_condition("Terminating", "True", reason, message, now=self._api.now()))
        self._storage.put(DEFINITIONS, name, {**definition, "status": {**status, "conditions": conditions}})
        return True

    def _empty_namespace(self, namespace: Json) -> bool:
        name = namespace["metadata"]["name"]
        changed = False
        left: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for resource, key, obj in self._storage.every_object():
            if key[0] != name:
                continue
            changed |= self._delete(resource, key, obj)
            still = self._storage.get(resource, key)
            if still is not None:
                group, _, plural = resource.partition("/")
                shown = f"{plural}.{group}" if group else f"{plural}."
                left[shown] = left.get(shown, 0) + 1
                for finalizer in still["metadata"].get("finalizers") or []:
                    waiting[finalizer] = waiting.get(finalizer, 0) + 1
        if left:
            return self._explain_namespace(namespace, left, waiting) or changed
        spec = {k: v for k, v in (namespace.get("spec") or {}).items() if k != "finalizers"}
        self._store_or_drop("/namespaces", ("", name), {**namespace, "spec": spec})
        return True

    def _explain_namespace(self, namespace: Json, left: dict[str, int], waiting: dict[str, int]) -> bool:
        """Write into the namespace's status what it waits for."""
        current = self._storage.get("/namespaces", ("", namespace["metadata"]["name"])) or namespace
        status = current.get("status") or {}
        conditions = namespace_conditions(left, waiting, now=self._api.now())

        def bare(items: list[Json]) -> list[Json]:
            return [{k: v for k, v in item.items() if k != "lastTransitionTime"} for item in items]

        if bare(status.get("conditions") or []) == bare(conditions):
            return False
        changed = {**current, "status": {**status, "conditions": conditions}}
        self._storage.put("/namespaces", ("", current["metadata"]["name"]), changed)
        return True


def _condition(kind: str, status: str, reason: str, message: str, *, now: str) -> Json:
    return {"type": kind, "status": status, "lastTransitionTime": now, "reason": reason, "message": message}


def namespace_conditions(left: dict[str, int], waiting: dict[str, int], *, now: str) -> list[Json]:
    """Give the conditions of a namespace whose content remains. Source: the namespace controller."""
    remaining = ", ".join(f"{name} has {count} resource instances" for name, count in sorted(left.items()))
    finalizers = ", ".join(f"{name} in {count} resource instances" for name, count in sorted(waiting.items()))
    deletion = "NamespaceDeletion"
    return [
        _condition(
            f"{deletion}DiscoveryFailure",
            "False",
            "ResourcesDiscovered",
            "All resources successfully discovered",
            now=now,
        ),
        _condition(
            f"{deletion}GroupVersionParsingFailure",
            "False",
            "ParsedGroupVersions",
            "All legacy kube types successfully parsed",
            now=now,
        ),
        _condition(
            f"{deletion}ContentFailure",
            "False",
            "ContentDeleted",
            "All content successfully deleted, may be waiting on finalization",
            now=now,
        ),
        _condition(
            "NamespaceContentRemaining",
            "True",
            "SomeResourcesRemain",
            f"Some resources are remaining: {remaining}",
            now=now,
        ),
        _condition(
            "NamespaceFinalizersRemaining",
            "True" if waiting else "False",
            "SomeFinalizersRemain" if waiting else "ContentHasNoFinalizers",
            f"Some content in the namespace has finalizers remaining: {finalizers}"
            if waiting
            else "All content-preserving finalizers finished",
            now=now,
        ),
    ]
