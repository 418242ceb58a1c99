"""Copies of what the fleet's parts read: followed once while we lead, and small.

A node with eight GPUs that can be cut publishes a quarter of a MB of JSON, seven times that as objects of Python. Of a
thousand nodes that is more than the pod may have; so each object is cut down as it comes, page by page, and none is
read every few seconds. What is kept has the shape of the API's objects, without what nobody here asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from sys import intern
from typing import Any

from dra.errors import KubeError
from dra.kube.client import KubeClient
from dra.kube.reflector import Reflector, ReflectorOptions
from dra.kube.resources import (
    GPU_NODE_POLICIES,
    GPU_NODES,
    NODES,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)

Json = dict[str, Any]

# What a server without the definition of an object answers.
NOT_THERE = frozenset({"DRA-API-NOT-SERVED", "DRA-API-NOT-FOUND", "DRA-API-OTHER-NOT-FOUND"})
# Of memory slices the metrics tell how many nobody can get.
MEMORY_SLICE = "memory-slice-"
# Objects a request: what a page of slices weighs while it is read is some ten MiB.
_PAGE = 50
_LIST_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "labels", "creationTimestamp")
_ATTRIBUTES = ("productName", "uuid", "parentUUID", "profile", "resource.kubernetes.io/pciBusID")
_FOLLOWED = (RESOURCE_SLICES, NODES, GPU_NODES, GPU_NODE_POLICIES)


class Copies:
    """A part of `dra fleet`, which the others ask. Before `start` it lists each time."""

    def __init__(self, client: KubeClient, *, driver: str) -> None:
        self._client, self._driver = client, driver
        self._ending = threading.Event()
        self._followed: dict[str, Reflector] = {}

    def start(self) -> None:
        """Follow. Raises HostError: DRA-HOST-NO-THREADS."""
        for resource in _FOLLOWED:
            options = ReflectorOptions(
                field_selector=self._selector(resource), list_seconds=_LIST_SECONDS, page=_PAGE
            )
            self._followed[resource.plural] = Reflector(
                self._client, resource, options=options, keep=keeper_of(resource)
            )
        for reflector in self._followed.values():
            reflector.start()

    def stop(self) -> None:
        """End; who waits gets an error."""
        self._ending.set()
        for reflector in self._followed.values():
            reflector.stop()

    def all(self, resource: Resource) -> tuple[Json, ...]:
        """Give all objects, cut down; of slices those of our driver; none where the definition is not installed.

        Raises:
            KubeError: they are not known yet.
        """
        reflector = self._followed.get(resource.plural)
        if reflector is None:
            return self.now(resource)
        while True:
            error = reflector.error
            if isinstance(error, KubeError) and error.code in NOT_THERE:
                return ()
            if reflector.synced.is_set():
                return reflector.objects()
            if error is not None:
                raise error
            if self._ending.wait(_LOOK_SECONDS):
                raise KubeError(
                    "DRA-FLEET-ENDING",
                    f"{resource.plural} were not read before this replica stopped leading",
                    remedy="Nothing is to do: the replica that leads next reads them.",
                )

    def now(self, resource: Resource) -> tuple[Json, ...]:
        """Give all objects as the API server has them now, as `all` does. Raises KubeError."""
        try:
            return self._client.list(
                resource, field_selector=self._selector(resource), page=_PAGE, keep=keeper_of(resource)
            ).items
        except KubeError as error:
            if error.code in NOT_THERE:
                return ()
            raise

    def _selector(self, resource: Resource) -> str:
        return f"spec.driver={self._driver}" if resource is RESOURCE_SLICES else ""


def keeper_of(resource: Resource) -> Callable[[Json], Json]:
    """Give what cuts an object of a kind down."""
    return {
        RESOURCE_SLICES.plural: _slice, RESOURCE_CLAIMS.plural: _claim, NODES.plural: _named,
        RESOURCE_CLAIM_TEMPLATES.plural: _named, PODS.plural: _pod,
    }.get(resource.plural, _whole)  # fmt: skip


def _metadata(obj: Mapping[str, Any]) -> Json:
    metadata = obj.get("metadata") or {}
    return {name: metadata[name] for name in _METADATA if name in metadata}


def _whole(obj: Json) -> Json:
    return {**obj, "metadata": _metadata(obj)}


def _named(obj: Json) -> Json:
    return {"metadata": _metadata(obj)}


def _pod(obj: Json) -> Json:
    metadata, spec, status = (obj.get(part) or {} for part in ("metadata", "spec", "status"))
    more = {name: metadata[name] for name in ("annotations", "deletionTimestamp") if name in metadata}
    return {
        "metadata": {**_metadata(obj), **more},
        "spec": {"resourceClaims": spec.get("resourceClaims") or []},
        "status": {"phase": status.get("phase")},
    }


def _claim(obj: Json) -> Json:
    allocation = (obj.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or []
    return {
        "metadata": _metadata(obj), "status": {"allocation": {"devices": {"results": results}}},
    }  # fmt: skip


def _slice(obj: Json) -> Json:
    spec = obj.get("spec") or {}
    # Partitions of a GPU say the same of it: one object for all of them.
    known: dict[tuple[Any, ...], Json] = {}
    return {
        "metadata": _metadata(obj),
        "spec": {
            "driver": spec.get("driver"),
            "nodeName": spec.get("nodeName"),
            "pool": {"name": (spec.get("pool") or {}).get("name")},
            "devices": [_device(each, known) for each in spec.get("devices") or ()],
        },
    }


def _device(device: Mapping[str, Any], known: dict[tuple[Any, ...], Json]) -> Json:
    attributes = device.get("attributes") or {}
    values = tuple((attributes.get(name) or {}).get("string") for name in _ATTRIBUTES)
    kept = known.get(values)
    if kept is None:
        kept = known[values] = {
            name: known.setdefault((value,), {"string": value})
            for name, value in zip(_ATTRIBUTES, values, strict=True)
            if value is not None
        }
    found: Json = {"name": intern(str(device.get("name"))), "attributes": kept}
    if device.get("allowMultipleAllocations"):
        found["allowMultipleAllocations"] = True
    if device.get("taints"):
        found["taints"] = [{"effect": each.get("effect")} for each in device["taints"]]
    counters = tuple(
        counter
        for consumed in device.get("consumesCounters") or ()
        for counter in consumed.get("counters") or ()
        if counter.startswith(MEMORY_SLICE)
    )
    if counters:
        found["consumesCounters"] = _counters(counters)
    return found


@lru_cache(maxsize=4096)
def _counters(names: tuple[str, ...]) -> tuple[Json, ...]:
    """Give the counters that a device takes; the same on all nodes of a kind, and so one object."""
    return ({"counters": dict.fromkeys(names)},)
