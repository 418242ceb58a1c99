"""The API server as the simulated controllers use it: in this process, without sockets and without faults."""

from __future__ import annotations

import threading
from typing import Any

from dra.sim.apiserver.server import SimApiServer

Json = dict[str, Any]

CLAIMS = "/apis/resource.k8s.io/v1/{namespace}resourceclaims"
TEMPLATES = "/apis/resource.k8s.io/v1/{namespace}resourceclaimtemplates"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
PODS = "/api/v1/{namespace}pods"
NODES = "/api/v1/nodes"
EVENTS = "/api/v1/{namespace}events"


class CallFailed(Exception):  # noqa: N818
    """The API server refused a call."""

    def __init__(self, method: str, path: str, status: int, answer: Any) -> None:
        message = answer.get("message", "") if isinstance(answer, dict) else ""
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status


class ControlApi:
    """Lists and writes for controllers; `wait` sleeps until something changed since the last look."""

    def __init__(self, server: SimApiServer) -> None:
        self.server = server
        self._seen = 0
        self._changed = threading.Condition()
        self._revision = server.storage.revision
        server.storage.subscribe(self._note)

    def _note(self, _resource: str, _change: object) -> None:
        with self._changed:
            self._revision += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """End a wait early."""
        with self._changed:
            self._revision += 1
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Wait for a change (or the time-out), and for the burst that it belongs to."""
        with self._changed:
            self._changed.wait_for(lambda: self._revision != self._seen, timeout=timeout_seconds)
            self._seen = self._revision

    def list(self, collection: str) -> list[Json]:
        """Give all objects of a collection, over all namespaces."""
        answer = self.call("GET", collection.format(namespace=""))
        return list(answer["items"])

    def create(self, collection: str, body: Json) -> Json:
        """Create an object in the namespace that its metadata names."""
        return self.call("POST", path_of(collection, body), body)

    def replace(self, collection: str, body: Json, *, subresource: str = "") -> Json:
        """Replace an object; its resourceVersion guards against changes in between."""
        path = f"{path_of(collection, body)}/{body['metadata']['name']}"
        return self.call("PUT", f"{path}/{subresource}" if subresource else path, body)

    def delete(self, collection: str, body: Json) -> None:
        """Delete exactly this object."""
        path = f"{path_of(collection, body)}/{body['metadata']['name']}"
        self.call("DELETE", path, {"preconditions": {"uid": body["metadata"]["uid"]}})

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Make a call.

        Raises:
            CallFailed: with the HTTP status.
        """
        status, answer = self.server.request(method, path, body)
        if status >= 300:
            raise CallFailed(method, path, status, answer)
        return dict(answer or {})


def path_of(collection: str, body: Json) -> str:
    """Give the collection's path for the namespace of an object."""
    namespace = body["metadata"].get("namespace")
    return collection.format(namespace=f"namespaces/{namespace}/" if namespace else "")
