"""A running cluster to a Cluster: lists only, and what may not be read is noted, never guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dra.diagnose.explain.cluster import (
    CLAIM,
    CLASS,
    EVENT,
    NAMESPACE,
    NODE,
    POD,
    SLICE,
    TEMPLATE,
    Cluster,
    Collection,
)
from dra.errors import KubeError

if TYPE_CHECKING:
    from dra.kube.client import KubeClient
    from dra.kube.resources import Resource

LIST_SECONDS = 60.0


def read_live(client: KubeClient, namespace: str) -> Cluster:
    """Read what explaining an object of `namespace` needs. Without cluster-wide rights the namespace alone.

    An empty namespace stands for all of them.

    Raises:
        KubeError: the API server cannot be reached, knows nobody of this name, or has no resource.k8s.io.
    """
    from dra.kube import resources

    collection = Collection()
    unread: dict[str, str] = {}
    kinds: dict[str, Resource] = {
        CLAIM: resources.RESOURCE_CLAIMS,
        CLASS: resources.DEVICE_CLASSES,
        SLICE: resources.RESOURCE_SLICES,
        POD: resources.PODS,
        NODE: resources.NODES,
    }
    for kind, resource in kinds.items():
        _read(client, collection, unread, kind=kind, resource=resource, fallback=namespace)
    for kind, resource in ((TEMPLATE, resources.RESOURCE_CLAIM_TEMPLATES), (EVENT, resources.EVENTS)):
        _read_namespace(client, collection, unread, kind=kind, resource=resource, namespace=namespace)
    try:
        # The name of none is the address of their list.
        if namespace:
            collection.add(client.get(resources.NAMESPACES, namespace), kind=NAMESPACE, api_version="v1")
    except KubeError as error:
        if error.status not in {403, 404}:
            raise
        unread[NAMESPACE] = _why(error)
    try:
        version = client.git_version()
    except KubeError:
        version = ""
    return Cluster(collection.objects, unread, version)


def _read(
    client: KubeClient,
    collection: Collection,
    unread: dict[str, str],
    *,
    kind: str,
    resource: Resource,
    fallback: str,
) -> None:
    try:
        _add(collection, kind, client.list(resource, timeout_seconds=LIST_SECONDS).items)
        return
    except KubeError as error:
        if error.status != 403:
            raise
        unread[kind] = _why(error)
    if resource.namespaced:
        _read_namespace(client, collection, unread, kind=kind, resource=resource, namespace=fallback)
        if kind in unread and collection.objects[kind]:
            unread[kind] = f"only namespace {fallback} may be read"


def _read_namespace(
    client: KubeClient,
    collection: Collection,
    unread: dict[str, str],
    *,
    kind: str,
    resource: Resource,
    namespace: str,
) -> None:
    try:
        _add(collection, kind, client.list(resource, namespace, timeout_seconds=LIST_SECONDS).items)
    except KubeError as error:
        if error.status != 403:
            raise
        unread[kind] = _why(error)


def _add(collection: Collection, kind: str, items: tuple[dict[str, Any], ...]) -> None:
    for item in items:
        # The client gives resource.k8s.io in the shape of v1 already.
        collection.add({**item, "apiVersion": "v1", "kind": kind})


def _why(error: KubeError) -> str:
    return "may not be read" if error.status == 403 else error.message
