"""The cluster as `explain` sees it: plain JSON objects by kind, and which kinds could not be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dra.api.versions import GROUP, to_v1

Json = dict[str, Any]

POD = "Pod"
CLAIM = "ResourceClaim"
TEMPLATE = "ResourceClaimTemplate"
CLASS = "DeviceClass"
SLICE = "ResourceSlice"
NODE = "Node"
EVENT = "Event"
NAMESPACE = "Namespace"
KINDS = (POD, CLAIM, TEMPLATE, CLASS, SLICE, NODE, EVENT, NAMESPACE)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A snapshot. Objects of resource.k8s.io have the shape of v1.

    Attributes:
        objects: by kind, then by (namespace, name); the namespace of cluster-scoped objects is empty.
        unread: kind -> why it could not be read. What is missing there is not known to be absent.
        version: the API server's full version, such as `v1.36.2`; empty if it is not known.
        now: the time to which ages are counted.
    """

    objects: Mapping[str, Mapping[tuple[str, str], Json]]
    unread: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def all(self, kind: str) -> Iterable[Json]:
        """Give the objects of a kind."""
        return self.objects.get(kind, {}).values()

    def find(self, kind: str, name: str, namespace: str = "") -> Json | None:
        """Give one object, None if it is not there."""
        return self.objects.get(kind, {}).get((namespace, name))

    def knows(self, kind: str) -> bool:
        """Whether what is not there is known to be absent."""
        return kind not in self.unread


class Collection:
    """Objects on their way into a Cluster; a later one of the same name replaces the earlier."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in KINDS}
        self.version = ""

    def add(self, obj: Mapping[str, Any], *, kind: str = "", api_version: str = "") -> None:
        """Take an object in, or the items of a list; kinds that `explain` has no use for are passed over.

        Args:
            obj: an object as the API or `kubectl` writes it.
            kind: its kind where it does not say so itself (items of a list).
            api_version: likewise.
        """
        kind = str(obj.get("kind") or kind)
        api_version = str(obj.get("apiVersion") or api_version)
        if isinstance(obj.get("items"), list):
            for item in obj["items"]:
                if isinstance(item, Mapping):
                    self.add(item, kind=kind.removesuffix("List"), api_version=api_version)
            return
        if not kind and isinstance(obj.get("serverVersion"), Mapping):
            self.version = str(obj["serverVersion"].get("gitVersion") or "")
            return
        metadata = obj.get("metadata")
        if kind not in self.objects or not isinstance(metadata, Mapping) or not metadata.get("name"):
            return
        group, _, version = api_version.rpartition("/")
        found = to_v1(obj, version=version, kind=kind) if group == GROUP else dict(obj)
        namespace = str(metadata.get("namespace") or ("default" if kind in (POD, CLAIM, TEMPLATE) else ""))
        if metadata.get("namespace") != namespace and namespace:
            found["metadata"] = {**metadata, "namespace": namespace}
        self.objects[kind][namespace, str(metadata["name"])] = found


def age(since: str, now: datetime) -> str:
    """Write how long ago an API time was, as kubectl does (`3d`, `5h`, `12m`, `40s`); empty if it cannot be read."""
    try:
        then = datetime.fromisoformat(since)
    except ValueError:
        return ""
    seconds = int((now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds())
    if seconds < 0:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def since_text(since: str | None, now: datetime) -> str:
    """Write ` since TIME (3h)`, or nothing where no time is known."""
    if not since:
        return ""
    ago = age(since, now)
    return f" since {since} ({ago})" if ago else f" since {since}"


def full_name(obj: Mapping[str, Any]) -> str:
    """Give `namespace/name`."""
    metadata = obj["metadata"]
    return (
        f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])
    )
