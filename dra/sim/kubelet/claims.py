"""The kubelet's DRA manager: claims of pods are prepared, remembered and unprepared.

Source: kubelet cm/dra manager: checks before a call, checks of the answer, the claim cache and its checkpoint.
"""

from __future__ import annotations

import json
import random
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from dra.api.claim import ClaimRef
from dra.errors import KubeError
from dra.kube.resources import RESOURCE_CLAIMS, Resource
from dra.sim.kubelet.connection import CallError

Json = dict[str, Any]


class ClaimReader(Protocol):
    """The part of the API that the manager needs."""

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        """Give an object; raises KubeError."""


class PrepareError(RuntimeError):
    """A pod cannot start yet; the text is that of the pod's event."""


class UnprepareError(RuntimeError):
    """A pod cannot end yet."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a driver returned."""

    driver: str
    request_names: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(slots=True)
class CachedClaim:
    """What is remembered of one claim. `prepared` is not kept over a restart."""

    ref: ClaimRef
    pod_uids: set[str]
    drivers: tuple[str, ...]
    devices: list[Device] = field(default_factory=list)
    prepared: bool = False


class PluginCalls(Protocol):
    """The two calls to a plugin; gives the responses of the service. Both raise CallError."""

    def prepare(self, claims: Iterable[ClaimRef]) -> Any:
        """Call NodePrepareResources."""
        ...

    def unprepare(self, claims: Iterable[ClaimRef]) -> Any:
        """Call NodeUnprepareResources."""
        ...


Drivers = Callable[[str], PluginCalls | None]


class ClaimCache:
    """Claims by namespace and name, with the checkpoint file `dra_manager_state`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.claims: dict[tuple[str, str], CachedClaim] = {}
        if path.exists():
            self._load(json.loads(path.read_text()))

    def save(self) -> None:
        """Write the checkpoint."""
        entries = [
            {
                "namespace": claim.ref.namespace,
                "name": claim.ref.name,
                "uid": claim.ref.uid,
                "podUIDs": sorted(claim.pod_uids),
                "drivers": list(claim.drivers),
                "devices": [
                    [d.driver, list(d.request_names), d.pool, d.device, list(d.cdi_ids), d.share_id]
                    for d in claim.devices
                ],
            }
            for claim in self.claims.values()
        ]
        data = json.dumps(entries, sort_keys=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"data": data, "checksum": zlib.crc32(data.encode())}))
        temporary.replace(self._path)

    def _load(self, stored: Mapping[str, Any]) -> None:
        if zlib.crc32(stored["data"].encode()) != stored["checksum"]:
            raise ValueError(f"{self._path}: checkpoint is corrupted")
        for entry in json.loads(stored["data"]):
            ref = ClaimRef(entry["namespace"], entry["name"], entry["uid"])
            devices = [Device(d[0], tuple(d[1]), d[2], d[3], tuple(d[4]), d[5]) for d in entry["devices"]]
            self.claims[ref.namespace, ref.name] = CachedClaim(
                ref, set(entry["podUIDs"]), tuple(entry["drivers"]), devices
            )


class DraManager:
    """Prepares and unprepares the claims of pods. Thread-safe; different pods are handled in parallel.

    Args:
        api: where claims are read.
        drivers: gives the connection of a driver, None if it is not registered.
        state: the checkpoint file.
        replace_devices: whether a repeated prepare replaces the devices remembered (1.37) or appends them.
    """

    def __init__(
        self, api: ClaimReader, drivers: Drivers, *, state: Path, replace_devices: bool = False
    ) -> None:
        self._api, self._drivers = api, drivers
        self._replace_devices = replace_devices
        self._lock = threading.RLock()
        self.cache = ClaimCache(state)

    def prepare(self, pod: Json) -> None:
        """Prepare all claims of a pod.

        Raises:
            PrepareError: with the text that the pod's event would have.
        """
        pod_uid = pod["metadata"]["uid"]
        claims = [self._checked(pod, name, template) for name, template in claim_names(pod)]
        with self._lock:
            for claim in claims:
                self._remember(claim, pod_uid)
            self.cache.save()
            todo = [
                self.cache.claims[claim["metadata"]["namespace"], claim["metadata"]["name"]]
                for claim in claims
            ]
            todo = [cached for cached in todo if not cached.prepared]
        batches: dict[str, list[CachedClaim]] = {}
        for cached in todo:
            for driver in cached.drivers:
                batches.setdefault(driver, []).append(cached)
        order = list(batches)
        random.shuffle(order)  # as a Go map gives it
        for driver in order:
            self._prepare_batch(driver, batches[driver])
        with self._lock:
            for cached in todo:
                cached.prepared = True
            self.cache.save()

    def cdi_ids(self, pod: Json, container: Json) -> list[str]:
        """Give the CDI names that the engine gets for a container, in the order of its claims."""
        found: list[str] = []
        for name, request in container_requests(pod, container):
            cached = self.cache.claims.get((pod["metadata"]["namespace"], name))
            for device in cached.devices if cached is not None else ():
                if not request or not device.request_names or request in device.request_names:
                    found.extend(device.cdi_ids)
        return found

    def unprepare(self, pod: Json) -> None:
        """Let go of a pod's claims; those that no other pod uses are unprepared.

        Raises:
            UnprepareError: the pod stays Terminating and this is called again.
        """
        self._unprepare_for({pod["metadata"]["uid"]})

    def reconcile(self, active_pod_uids: Iterable[str]) -> None:
        """Unprepare the claims of pods that are no longer there (force-deleted, or gone while the kubelet was down).

        Raises:
            UnprepareError: some stay; the next round tries again.
        """
        active = set(active_pod_uids)
        with self._lock:
            gone = {uid for cached in self.cache.claims.values() for uid in cached.pod_uids} - active
        if gone:
            self._unprepare_for(gone)

    # -- checks before a call ----------------------------------------------------------------------

    def _checked(self, pod: Json, name: str, template: bool) -> Json:
        namespace, pod_uid = pod["metadata"]["namespace"], pod["metadata"]["uid"]
        try:
            claim = self._api.get(RESOURCE_CLAIMS, name, namespace)
        except KubeError as error:
            raise PrepareError(f"fetch ResourceClaim {name}: {error}") from error
        owners = [owner.get("uid") for owner in claim["metadata"].get("ownerReferences") or ()]
        if template and pod_uid not in owners:
            raise PrepareError(f"ResourceClaim {namespace}/{name} was not created for pod {pod_uid}")
        status = claim.get("status") or {}
        if pod_uid not in [user.get("uid") for user in status.get("reservedFor") or ()]:
            raise PrepareError(f"pod {pod_uid} is not allowed to use ResourceClaim {namespace}/{name}")
        if "allocation" not in status:
            raise PrepareError(f"ResourceClaim {namespace}/{name} not allocated")
        for driver in drivers_of(claim):
            if self._drivers(driver) is None:
                raise PrepareError(f"DRA driver {driver} is not registered")
        with self._lock:
            cached = self.cache.claims.get((namespace, name))
        if cached is not None and cached.ref.uid != claim["metadata"]["uid"]:
            raise PrepareError(
                f"old ResourceClaim with same name {name} and different UID {cached.ref.uid} still exists "
                "(previous pod force-deleted?!)"
            )
        return claim

    def _remember(self, claim: Json, pod_uid: str) -> None:
        metadata = claim["metadata"]
        ref = ClaimRef(metadata["namespace"], metadata["name"], metadata["uid"])
        cached = self.cache.claims.setdefault(
            (ref.namespace, ref.name), CachedClaim(ref, set(), drivers_of(claim))
        )
        cached.pod_uids.add(pod_uid)

    # -- calls -------------------------------------------------------------------------------------

    def _prepare_batch(self, driver: str, batch: list[CachedClaim]) -> None:
        for cached, answer in self._answers(driver, batch, "NodePrepareResources", PrepareError):
            self._take_devices(cached, driver, answer.devices)

    def _answers(
        self,
        driver: str,
        batch: list[CachedClaim],
        call: Literal["NodePrepareResources", "NodeUnprepareResources"],
        failure: type[PrepareError | UnprepareError],
    ) -> Iterator[tuple[CachedClaim, Any]]:
        """Call a driver, and give each claim with its answer, checked as the kubelet checks them. Raises `failure`."""
        connection = self._drivers(driver)
        if connection is None:
            raise failure(f"DRA driver {driver} is not registered")
        send = connection.prepare if call == "NodePrepareResources" else connection.unprepare
        try:
            answers = dict(send([cached.ref for cached in batch]).claims)
        except CallError as error:
            raise failure(f"{call}: {error}") from error
        by_uid = {cached.ref.uid: cached for cached in batch}
        for uid, answer in answers.items():
            if uid not in by_uid:
                raise failure(f"{call} returned result for unknown claim UID {uid}")
            if answer.error:
                raise failure(f"{call} failed for ResourceClaim {by_uid[uid].ref.name}: {answer.error}")
            yield by_uid[uid], answer
        if len(answers) < len(batch):
            raise failure(f"{call} skipped {len(batch) - len(answers)} ResourceClaims")

    def _take_devices(self, cached: CachedClaim, driver: str, returned: Iterable[Any]) -> None:
        devices = [
            Device(
                driver,
                tuple(entry.request_names),
                entry.pool_name,
                entry.device_name,
                tuple(entry.cdi_device_ids),
                entry.share_id
                if "share_id" in entry.DESCRIPTOR.fields_by_name and entry.HasField("share_id")
                else None,
            )
            for entry in returned
        ]
        with self._lock:
            if self._replace_devices:
                cached.devices = [device for device in cached.devices if device.driver != driver]
            cached.devices.extend(devices)
            self.cache.save()

    def _unprepare_for(self, pod_uids: set[str]) -> None:
        with self._lock:
            mine = [cached for cached in self.cache.claims.values() if cached.pod_uids & pod_uids]
            last = [cached for cached in mine if not cached.pod_uids - pod_uids]
            for cached in mine:
                if cached not in last:
                    cached.pod_uids -= pod_uids
        batches: dict[str, list[CachedClaim]] = {}
        for cached in last:
            cached.prepared = False
            for driver in cached.drivers:
                batches.setdefault(driver, []).append(cached)
        for driver, batch in batches.items():
            self._unprepare_batch(driver, batch)
        with self._lock:
            for cached in last:
                self.cache.claims.pop((cached.ref.namespace, cached.ref.name), None)
            self.cache.save()

    def _unprepare_batch(self, driver: str, batch: list[CachedClaim]) -> None:
        for _ in self._answers(driver, batch, "NodeUnprepareResources", UnprepareError):
            pass  # that there is no error is all that is wanted


def drivers_of(claim: Json) -> tuple[str, ...]:
    """Give the drivers of a claim's allocation, each once."""
    results = claim["status"]["allocation"].get("devices", {}).get("results") or ()
    return tuple(dict.fromkeys(result["driver"] for result in results))


def claim_names(pod: Json) -> list[tuple[str, bool]]:
    """Give (claim name, made from a template) for each claim of a pod, that of extended resources last.

    Raises:
        PrepareError: a claim was not created yet.
    """
    found: list[tuple[str, bool]] = []
    for entry in pod["spec"].get("resourceClaims") or ():
        name = _resolve(pod, entry)
        if name is not None:
            found.append((name, "resourceClaimTemplateName" in entry))
    extended = (pod.get("status") or {}).get("extendedResourceClaimStatus")
    if extended:
        found.append((extended["resourceClaimName"], True))
    return list(dict.fromkeys(found))


def _resolve(pod: Json, entry: Json) -> str | None:
    if "resourceClaimName" in entry:
        return str(entry["resourceClaimName"])
    statuses = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    for status in statuses:
        if status["name"] == entry["name"]:
            name = status.get("resourceClaimName")
            return None if name is None else str(name)  # none: the pod needs no claim here
    raise PrepareError(f"ResourceClaim not created yet for pod claim {entry['name']}")


def container_requests(pod: Json, container: Json) -> list[tuple[str, str]]:
    """Give (claim name, request or empty for all) for what a container uses."""
    entries = {entry["name"]: entry for entry in pod["spec"].get("resourceClaims") or ()}
    found: list[tuple[str, str]] = []
    for use in (container.get("resources") or {}).get("claims") or ():
        name = _resolve(pod, entries[use["name"]])
        if name is not None:
            found.append((name, use.get("request", "")))
    extended = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    found.extend(
        (extended["resourceClaimName"], mapping["requestName"])
        for mapping in extended.get("requestMappings") or ()
        if mapping["containerName"] == container["name"]
    )
    return found
