"""Who holds what: claims by device, and what they take of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra.allocator.allocate import allocated_state
from dra.allocator.model import AllocatedState, Device, DeviceId, Pool
from dra.allocator.pod_filters import is_done
from dra.allocator.pools import counters_left
from dra.diagnose.explain.cluster import CLAIM, POD, Cluster, Json, full_name


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim that holds a device. `pods` are those it is reserved for; `idle` says why nobody needs it any more."""

    claim: str
    pods: tuple[str, ...]
    idle: str = ""

    def __str__(self) -> str:
        """Give `ns/claim (pod a, b)`."""
        if self.idle:
            return f"{self.claim} ({self.idle})"
        return f"{self.claim} (pod {', '.join(self.pods)})" if self.pods else self.claim


class Holdings:
    """What all claims of a cluster hold."""

    def __init__(self, cluster: Cluster) -> None:
        claims = list(cluster.all(CLAIM))
        self.allocated: AllocatedState = allocated_state(claims)
        self.by_device: dict[DeviceId, list[Holder]] = {}
        # Admin access holds nothing, but shows who looks.
        self._left: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
        self._of_counter: dict[tuple[str, str], dict[tuple[str, str], list[DeviceId]]] = {}
        uids = {str(pod["metadata"].get("uid")): pod for pod in cluster.all(POD)}
        for claim in claims:
            self._add(claim, uids if cluster.knows(POD) else None)

    def _add(self, claim: Json, pods: Mapping[str, Json] | None) -> None:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        results = (allocation.get("devices") or {}).get("results") or []
        if not results:
            return
        reserved = (claim.get("status") or {}).get("reservedFor") or []
        names = tuple(str(entry.get("name")) for entry in reserved)
        holder = Holder(full_name(claim), names, _idle(reserved, pods))
        for result in results:
            if not result.get("adminAccess"):
                device = DeviceId(result["driver"], result["pool"], result["device"])
                holders = self.by_device.setdefault(device, [])
                if holder not in holders:
                    holders.append(holder)

    def of(self, device: DeviceId) -> Sequence[Holder]:
        """Give who holds a device."""
        return self.by_device.get(device, ())

    def left(self, pool: Pool) -> dict[tuple[str, str], int]:
        """Give what is left of a pool's counters, in billionths."""
        key = (pool.driver, pool.name)
        known = self._left.get(key)
        if known is None:
            known = self._left[key] = counters_left(pool, self.allocated)
        return known

    def users_of(self, pool: Pool, counters: Iterable[tuple[str, str]]) -> list[DeviceId]:
        """Give the allocated devices of a pool that take from one of the counters."""
        key = (pool.driver, pool.name)
        known = self._of_counter.get(key)
        if known is None:
            known = self._of_counter[key] = {}
            for device in pool.all_devices:
                if device.id in self.by_device:
                    for counter in device.consumes:
                        known.setdefault(counter, []).append(device.id)
        found: dict[DeviceId, None] = {}
        for counter in counters:
            found.update(dict.fromkeys(known.get(counter, ())))
        return list(found)

    def in_use(self, device: Device, *, admin: bool, shares: bool) -> bool:
        """Tell whether others keep a request from a device, as the allocator sees it."""
        if admin:
            return False
        if device.multi and shares:
            return device.id in self.allocated.devices
        return device.id in self.allocated.devices or device.id in self.allocated.shared


def _idle(reserved: Sequence[Json], pods: Mapping[str, Json] | None) -> str:
    if not reserved:
        return "reserved for no pod"
    if pods is None:
        return ""
    for entry in reserved:
        if entry.get("resource") != "pods":
            return ""
        pod = pods.get(str(entry.get("uid")))
        if pod is not None and not is_done(pod):
            return ""
    name = reserved[0].get("name")
    return f"its pod {name} {'has ended' if str(reserved[0].get('uid')) in pods else 'is gone'}"
