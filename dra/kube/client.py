"""The API server as the rest of the program sees it: verbs on plain JSON objects in the shape of v1.

No typed models: they drop fields that a newer server added, so that writing back what was read loses them.
Each call has its own time limit and raises `KubeError` only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dra.kube.answers import check_deletion, checked_items, checked_object
from dra.kube.clock import Clock, SystemClock, TokenBucket
from dra.kube.connection import Connection, KubeOptions
from dra.kube.resources import RESOURCE_CLAIMS, Resource
from dra.kube.sender import DEFAULT_TIMEOUT_SECONDS, Sender, Target
from dra.kube.stream import WatchStream

# Objects per page of a list.
PAGE = 500

Json = dict[str, Any]
PatchKind = Literal["merge", "json"]
_PATCH_TYPES = {"merge": "application/merge-patch+json", "json": "application/json-patch+json"}


@dataclass(frozen=True, slots=True)
class ObjectList:
    """The items of a list and the resource version from which to watch on."""

    items: tuple[Json, ...]
    resource_version: str


class KubeClient:
    """Verbs of the Kubernetes API. Thread-safe.

    Args:
        connection: the transport.
        qps: requests per second on average from this process, 0 is no limit. Fetching a claim is never
            delayed: a pod waits for it.
        burst: requests at once before `qps` counts.
        field_manager: the name under which this program's fields are managed.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        qps: float = 0.0,
        burst: int = 0,
        field_manager: str = "dra",
        clock: Clock | None = None,
    ) -> None:
        self.field_manager = field_manager
        self._connection = connection
        self._clock = clock or SystemClock()
        self._sender = Sender(connection, clock=self._clock, limit=self._bucket(qps, burst))

    def with_limit(self, *, qps: float, burst: int) -> KubeClient:
        """Give a client on the same connection whose requests are counted apart from this one's."""
        return self._sending_by(self._sender.with_limit(self._bucket(qps, burst)))

    def fenced(self, check: Callable[[], None]) -> KubeClient:
        """Give this client with a condition on all that it writes.

        Args:
            check: called right before each request that changes something is sent, after every wait; what it raises
                is raised in place of sending.
        """
        return self._sending_by(self._sender.fenced(check))

    def _sending_by(self, sender: Sender) -> KubeClient:
        other = copy.copy(self)
        other._sender = sender
        return other

    def _bucket(self, qps: float, burst: int) -> TokenBucket | None:
        return TokenBucket(per_second=qps, burst=burst, clock=self._clock) if qps > 0 else None

    @property
    def host(self) -> str:
        """URL of the API server, empty while it is not known."""
        return self._connection.host

    # -- reading -----------------------------------------------------------------------------------

    def get(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        subresource: str = "",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Json:
        """Give one object as the API server has it now."""
        target = Target("get", resource, name, namespace, subresource)
        return self._object(target, "GET", timeout_seconds=timeout_seconds, free=resource is RESOURCE_CLAIMS)

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        resource_version: str = "",
        page: int = PAGE,
        keep: Callable[[Json], Json] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> ObjectList:
        """Give all objects, read page by page; without `namespace` those of all namespaces.

        `keep` is called with each as it comes, and gives what is to be kept of it.

        Raises:
            KubeError: DRA-API-GONE if the list grew too old between two pages: start again.
        """
        target = Target("list", resource, None, namespace)
        query = _selectors(label_selector, field_selector)
        if resource_version:
            query["resourceVersion"] = resource_version
        query["limit"] = str(page)
        items: list[Json] = []
        while True:
            document, version = self._sender.request(
                target, "GET", query=query, timeout_seconds=timeout_seconds
            )
            found = checked_items(target.call, resource, document, version=version)
            items.extend(found if keep is None else map(keep, found))
            metadata = document["metadata"]
            if not metadata.get("continue"):
                return ObjectList(tuple(items), str(metadata.get("resourceVersion") or ""))
            # The server refuses a resourceVersion beside a continue token, which holds one.
            query.pop("resourceVersion", None)
            query["continue"] = metadata["continue"]

    def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        server_seconds: int = 300,
        inactivity_seconds: float = 330.0,
    ) -> WatchStream:
        """Open a watch; it ends after `server_seconds`, or with DRA-API-TIMEOUT when nothing comes for so long.

        The stream's `close` may be called from another thread and ends a blocking read at once.
        """
        target = Target("watch", resource, None, namespace)
        query = _selectors(label_selector, field_selector)
        query |= {
            "watch": "1",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(server_seconds),
            "allowWatchBookmarks": "true",
        }

        def opening(version: str) -> WatchStream:
            path = resource.path(version=version, namespace=namespace)
            answer = self._connection.send(
                target.call,
                "GET",
                path,
                query=list(query.items()),
                read_seconds=min(inactivity_seconds, DEFAULT_TIMEOUT_SECONDS),
            )
            return WatchStream(
                answer,
                call=target.call,
                connection=self._connection,
                received=lambda obj: checked_object(target.call, resource, obj, version=version),
                inactivity_seconds=inactivity_seconds,
            )

        return self._sender.negotiated(resource, opening)

    # -- writing -----------------------------------------------------------------------------------

    def create(
        self,
        resource: Resource,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        dry_run: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Json:
        """Create an object and give it as stored."""
        name = str((body.get("metadata") or {}).get("name") or "")
        target = Target("create", resource, None, namespace, shown_name=name)
        return self._object(
            target, "POST", body=body, query=self._writing(dry_run), timeout_seconds=timeout_seconds
        )

    def replace(
        self,
        resource: Resource,
        name: str,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
        dry_run: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Json:
        """Replace an object that was read before; with its resourceVersion a change in between is a conflict."""
        target = Target("update", resource, name, namespace, subresource)
        return self._object(
            target, "PUT", body=body, query=self._writing(dry_run), timeout_seconds=timeout_seconds
        )

    def patch(
        self,
        resource: Resource,
        name: str,
        body: Any,
        namespace: str | None = None,
        *,
        kind: PatchKind = "merge",
        subresource: str = "",
        dry_run: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Json:
        """Change some fields: JSON merge patch, or a JSON patch (its paths are those of the served version)."""
        target = Target("patch", resource, name, namespace, subresource)
        return self._object(
            target,
            "PATCH",
            body=body,
            query=self._writing(dry_run),
            content_type=_PATCH_TYPES[kind],
            timeout_seconds=timeout_seconds,
        )

    def apply(
        self,
        resource: Resource,
        name: str,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
        force: bool = True,
        dry_run: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Json:
        """Server-side apply: create the object, or own exactly the fields of `body`."""
        target = Target("patch", resource, name, namespace, subresource)
        query = {**self._writing(dry_run), "force": "true" if force else "false"}
        return self._object(
            target,
            "PATCH",
            body={"kind": resource.kind, **body},
            query=query,
            content_type="application/apply-patch+yaml",
            needs_version=True,
            timeout_seconds=timeout_seconds,
        )

    def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_period_seconds: int | None = None,
        dry_run: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Delete an object; with `uid` or `resource_version` only that very object (else DRA-API-CONFLICT)."""
        target = Target("delete", resource, name, namespace)
        conditions = {"uid": uid, "resourceVersion": resource_version}
        options = _delete_options(
            {k: v for k, v in conditions.items() if v},
            grace_period_seconds=grace_period_seconds,
            dry_run=dry_run,
        )
        document, _ = self._sender.request(
            target, "DELETE", body=options, convert=False, timeout_seconds=timeout_seconds
        )
        check_deletion(target.call, resource, document)

    def delete_collection(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        dry_run: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Delete all objects that the selectors choose."""
        target = Target("deletecollection", resource, None, namespace)
        document, _ = self._sender.request(
            target,
            "DELETE",
            query=_selectors(label_selector, field_selector),
            body=_delete_options({}, grace_period_seconds=None, dry_run=dry_run),
            convert=False,
            timeout_seconds=timeout_seconds,
        )
        check_deletion(target.call, resource, document)

    # -- the server --------------------------------------------------------------------------------

    def server_version(self, *, refresh: bool = False) -> tuple[int, int]:
        """Give (major, minor) of the API server, asked at most every ten minutes."""
        return self._sender.negotiation.server_version(refresh=refresh)

    def git_version(self, *, refresh: bool = False) -> str:
        """Give the API server's full version text."""
        return self._sender.negotiation.git_version(refresh=refresh)

    def served_version(self, resource: Resource) -> str:
        """Give the version in which this client speaks about `resource` with this server."""
        return self._sender.negotiation.version_for(resource)

    def close(self) -> None:
        """Close idle connections."""
        self._connection.close()

    def _object(self, target: Target, method: str, **options: Any) -> Json:
        document, version = self._sender.request(target, method, **options)
        return checked_object(target.call, target.resource, document, version=version)

    def _writing(self, dry_run: bool) -> dict[str, str]:
        query = {"fieldManager": self.field_manager}
        return {**query, "dryRun": "All"} if dry_run else query


def connect(
    options: KubeOptions, *, qps: float = 0.0, burst: int = 0, field_manager: str = "dra"
) -> KubeClient:
    """Give a client; nothing is loaded or connected before its first call."""
    return KubeClient(Connection(options), qps=qps, burst=burst, field_manager=field_manager)


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    pairs = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {key: value for key, value in pairs.items() if value}


def _delete_options(
    conditions: Mapping[str, Any], *, grace_period_seconds: int | None, dry_run: bool
) -> Json:
    options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    if conditions:
        options["preconditions"] = dict(conditions)
    if grace_period_seconds is not None:
        options["gracePeriodSeconds"] = grace_period_seconds
    if dry_run:
        options["dryRun"] = ["All"]
    return options
