"""The API server as the simulated controllers use it: in this process, without sockets and without faults.

Lists come straight from the server's memory, in the shape of v1 and shared with it: read them, never write into
them. Writes go through the server's own rules, in a version that it serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dra.sim.apiserver.convert import from_storage, to_storage
from dra.sim.apiserver.registry import Resource, version_rank
from dra.sim.apiserver.server import SimApiServer
from dra.sim.apiserver.storage import Change
from dra.telemetry.log import get_logger

log = get_logger()
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Collection:
    """A kind of object, by group and plural."""

    group: str
    plural: str

    @property
    def key(self) -> str:
        """The name under which the server keeps the objects."""
        return f"{self.group}/{self.plural}"


_DRA = "resource.k8s.io"
CLAIMS = Collection(_DRA, "resourceclaims")
TEMPLATES = Collection(_DRA, "resourceclaimtemplates")
CLASSES = Collection(_DRA, "deviceclasses")
SLICES = Collection(_DRA, "resourceslices")
TAINT_RULES = Collection(_DRA, "devicetaintrules")
PODS = Collection("", "pods")
NODES = Collection("", "nodes")
EVENTS = Collection("", "events")
DEPLOYMENTS = Collection("apps", "deployments")
REPLICA_SETS = Collection("apps", "replicasets")
DAEMON_SETS = Collection("apps", "daemonsets")
STATEFUL_SETS = Collection("apps", "statefulsets")
REVISIONS = Collection("apps", "controllerrevisions")
JOBS = Collection("batch", "jobs")
CRON_JOBS = Collection("batch", "cronjobs")
VOLUME_CLAIMS = Collection("", "persistentvolumeclaims")

# Nobody decides anything because of these.
_SILENT = frozenset({EVENTS.key, "coordination.k8s.io/leases"})


class CallFailed(Exception):  # noqa: N818
    """The API server refused a call."""

    def __init__(self, method: str, path: str, status: int, answer: Any) -> None:
        message = answer.get("message", "") if isinstance(answer, dict) else ""
        super().__init__(f"{method} {path}: {status} {message}")
        self.status, self.message = status, message


class ControlApi:
    """Lists and writes for controllers; `wait` sleeps until something changed since the last look.

    `on_change` hears of every write, under the server's lock: it must be quick.
    """

    def __init__(
        self, server: SimApiServer, *, on_change: Callable[[str, Change], None] = lambda _key, _change: None
    ) -> None:
        self.server = server
        self.on_change = on_change
        self._seen = 0
        self._changed = threading.Condition()
        self._revision = server.storage.revision
        server.storage.subscribe(self._note)

    def _note(self, resource: str, change: Change) -> None:
        if resource in _SILENT:
            return
        self.on_change(resource, change)
        self.wake()

    def wake(self) -> None:
        """End a wait early."""
        with self._changed:
            self._revision += 1
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for a change (or the time-out), and for the burst that it belongs to; whether there was one."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._revision != self._seen, timeout=timeout_seconds)
            self._seen = self._revision
            return found

    def now(self) -> str:
        """Give the server's time as objects carry it."""
        return self.server.api.now()

    def clock(self) -> float:
        """Give the server's time in seconds since 1970."""
        return self.server.api.clock()

    def list(self, collection: Collection) -> list[Json]:
        """Give all objects of a collection, over all namespaces, by namespace and name."""
        return list(self.server.storage.snapshot(collection.key)[1].values())

    def get(self, collection: Collection, name: str, namespace: str = "") -> Json | None:
        """Give an object, None if it is not there."""
        return self.server.storage.get(collection.key, (namespace, name))

    def create(self, collection: Collection, body: Json) -> Json:
        """Create an object in the namespace that its metadata names; gives it as stored. Raises CallFailed."""
        return self._write("POST", collection, body)

    def replace(self, collection: Collection, body: Json, *, subresource: str = "") -> Json:
        """Replace an object; its resourceVersion guards against changes in between. Raises CallFailed."""
        return self._write("PUT", collection, body, rest=_rest(body, subresource))

    def delete(self, collection: Collection, body: Json) -> None:
        """Delete exactly this object. Raises CallFailed."""
        resource, version = self._served(collection)
        path = _path(resource, version, body["metadata"].get("namespace")) + _rest(body, "")
        self.call("DELETE", path, {"preconditions": {"uid": body["metadata"]["uid"]}})

    def bind(self, pod: Json, node: str) -> None:
        """Put a pod on a node. Raises CallFailed."""
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        about = {"name": metadata["name"], "uid": metadata["uid"]}
        target = {"kind": "Node", "name": node}
        self.call("POST", path, {"apiVersion": "v1", "kind": "Binding", "metadata": about, "target": target})

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Make a call.

        Raises:
            CallFailed: with the HTTP status.
        """
        status, answer = self.server.request(method, path, body)
        if status >= 300:
            raise CallFailed(method, path, status, answer)
        return dict(answer or {})

    def attempt(self, act: Callable[..., object], *args: object) -> bool:
        """Do one step of a controller; one that the server refuses costs that step only. Whether it worked."""
        try:
            act(*args)
        except CallFailed as error:
            # Somebody was faster, or the object went: the next round looks again.
            if error.status not in {404, 409}:
                log.info("sim_control_refused", error=str(error))
            return False
        return True

    def event(
        self, about: Mapping[str, Any], kind: str, *, reason: str, message: str, component: str
    ) -> None:
        """Write an Event about an object. One that is refused (the namespace goes) is let go."""
        metadata = about["metadata"]
        now = self.now()
        involved = {
            "apiVersion": about.get("apiVersion", "v1"), "kind": about.get("kind", "Pod"), "name": metadata["name"],
            "namespace": metadata.get("namespace", "default"), "uid": metadata["uid"],
        }  # fmt: skip
        event = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": involved["namespace"]},
            "involvedObject": involved, "type": kind, "reason": reason, "message": message[:1024],
            "source": {"component": component}, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        }  # fmt: skip
        self.attempt(self.create, EVENTS, event)

    def _served(self, collection: Collection) -> tuple[Resource, str]:
        for resource in self.server.registry.resources():
            if (resource.group, resource.plural) == (collection.group, collection.plural):
                return resource, min(resource.versions, key=version_rank)
        raise CallFailed("GET", collection.key, 404, {"message": "the server does not serve this kind"})

    def _write(self, method: str, collection: Collection, body: Json, *, rest: str = "") -> Json:
        resource, version = self._served(collection)
        path = _path(resource, version, body["metadata"].get("namespace")) + rest
        return to_storage(resource, version, self.call(method, path, from_storage(resource, version, body)))


def _path(resource: Resource, version: str, namespace: str | None) -> str:
    base = f"/apis/{resource.group}/{version}" if resource.group else f"/api/{version}"
    return f"{base}/namespaces/{namespace}/{resource.plural}" if namespace else f"{base}/{resource.plural}"


def _rest(body: Json, subresource: str) -> str:
    return f"/{body['metadata']['name']}" + (f"/{subresource}" if subresource else "")
