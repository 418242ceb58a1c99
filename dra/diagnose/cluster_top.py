"""`dra top --all`: the GPUs of a whole cluster and who holds them, from what the API has. Pure over a `Cluster`.

Loads are not in the API: those are what `dra top` shows on a node, and what the metrics have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from dra.allocator.model import Device, DeviceId
from dra.allocator.pools import parse_slices
from dra.diagnose.explain.cluster import SLICE, Cluster
from dra.diagnose.explain.devices import taint_text
from dra.diagnose.explain.holders import Holder, Holdings
from dra.inventory.allocations import sides_in_pool
from dra.values import Quantity

_GPU_TYPES = frozenset({"gpu", "mig", "vfio"})


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One GPU, or one partition that is held or stands for itself.

    Attributes:
        node: the pool's name, which is the node's.
        device: its name in the pool.
        product: the model; empty where it says none.
        memory: its memory as published.
        state: `free`, `held` (as a whole), `shared` (by claims with shares) or `cut` (partitions of it are held).
        used: what claims take of a shared one, by capacity: `20 of 100`.
        holders: the claims that hold it, with their pods.
        taints: `key=value:effect since TIME`.
    """

    node: str
    device: str
    product: str
    memory: str
    state: str
    used: Mapping[str, str]
    holders: tuple[Holder, ...]
    taints: tuple[str, ...]


def cluster_rows(cluster: Cluster, *, driver: str) -> list[DeviceRow]:
    """Give the GPUs of all nodes, by node and device; of partitions on demand only those that claims hold.

    A GPU that can be passed through stands twice in its pool and is one row: that of the side which is held, else the GPU's.
    """
    holdings = Holdings(cluster)
    rows: list[DeviceRow] = []
    for node, devices in sorted(_pools(cluster, driver).items()):
        whole = {_text(device, "uuid") for device in devices if _kind(device) == "gpu"}
        cut = {
            _text(device, "parentUUID")
            for device in devices
            if _kind(device) == "mig" and holdings.of(device.id)
        }
        hidden = _other_sides(devices, holdings, cut)
        for device in devices:
            holders = tuple(holdings.of(device.id))
            if _kind(device) not in _GPU_TYPES or device.id in hidden:
                continue
            if _kind(device) == "mig" and not holders and _text(device, "parentUUID") in whole:
                continue
            rows.append(_row(node, device, holders, holdings, cut=_text(device, "uuid") in cut))
    return rows


def _other_sides(devices: Sequence[Device], holdings: Holdings, cut: AbstractSet[str]) -> set[DeviceId]:
    """Give, of each GPU that is published as itself and as one to pass through, the side that nobody has and nobody can get."""
    by_name = {device.id.device: device for device in devices}
    hidden: set[DeviceId] = set()
    for name, gpu in sides_in_pool({**device.raw, "name": device.id.device} for device in devices).items():
        bare, whole = by_name[name], by_name[gpu]
        if not holdings.of(bare.id):
            hidden.add(bare.id)
        elif not holdings.of(whole.id) and _text(whole, "uuid") not in cut:
            hidden.add(whole.id)
    return hidden


def _pools(cluster: Cluster, driver: str) -> dict[str, list[Device]]:
    """Give the devices of a driver's pools at their newest generation."""
    slices = [item for item in parse_slices(cluster.all(SLICE)) if item.driver == driver]
    newest: dict[str, int] = {}
    for item in slices:
        newest[item.pool] = max(newest.get(item.pool, 0), item.generation)
    found: dict[str, list[Device]] = {pool: [] for pool in newest}
    for item in slices:
        if item.generation == newest[item.pool]:
            found[item.pool] += item.devices
    return found


def _row(
    node: str, device: Device, holders: tuple[Holder, ...], holdings: Holdings, *, cut: bool
) -> DeviceRow:
    used = dict(_used(device, holdings.allocated.capacity))
    state = "free"
    if holders:
        state = "shared" if device.id in holdings.allocated.shared else "held"
    elif cut:
        state = "cut"
    memory = ((device.raw.get("capacity") or {}).get("memory") or {}).get("value") or ""
    return DeviceRow(
        node, device.id.device, _text(device, "productName"), str(memory), state, used, holders,
        tuple(taint_text(taint) for taint in device.taints),
    )  # fmt: skip


def _used(device: Device, taken: Mapping[DeviceId, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    capacities = device.raw.get("capacity") or {}
    for name, amount in sorted((taken.get(device.id) or {}).items()):
        if amount and name in capacities:
            total = Quantity.of(capacities[name]["value"])
            yield name.rpartition("/")[2], f"{Quantity(amount, total.format)} of {total}"


def _attribute(device: Device, name: str) -> Mapping[str, Any]:
    found = (device.raw.get("attributes") or {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _text(device: Device, name: str) -> str:
    return str(_attribute(device, name).get("string") or "")


def _kind(device: Device) -> str:
    return _text(device, "type")


def rows_json(rows: Sequence[DeviceRow], cluster: Cluster) -> dict[str, Any]:
    """Give it for programs. Keys stay; new ones may be added."""
    return {
        "devices": [
            {
                "node": row.node, "device": row.device, "product": row.product, "memory": row.memory, "state": row.state,
                "used": dict(row.used), "taints": list(row.taints),
                "holders": [
                    {"claim": each.claim, "pods": list(each.pods), "idle": each.idle} for each in row.holders
                ],
            }
            for row in rows
        ],
        "notKnown": dict(cluster.unread),
    }  # fmt: skip
