"""Which claims have a node's GPUs, as the API says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, VfioName, parse_device_name, parse_vfio_name

PCI_BUS_ID = "resource.kubernetes.io/pciBusID"


def claims_on_gpus(
    claims: Iterable[Mapping[str, Any]], *, driver: str, pool: str, sides: Mapping[str, str]
) -> dict[int, tuple[str, ...]]:
    """Give the claims (namespace/name) that the API says are on each GPU, by its minor number.

    `sides` says which GPU a `gpu-vfio-<index>` is: whoever has one side has the GPU.
    """
    found: dict[int, set[str]] = {}
    for claim in claims:
        metadata = claim.get("metadata") or {}
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            if result.get("driver") != driver or result.get("pool") != pool:
                continue
            device = str(result.get("device") or "")
            name = parse_device_name(sides.get(device, device))
            if isinstance(name, GpuName | MigName):
                found.setdefault(name.minor, set()).add(
                    f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
                )
    return {minor: tuple(sorted(names)) for minor, names in found.items()}


def sides_on_node(inventory: Inventory) -> dict[str, str]:
    """Give the GPU (`gpu-<minor>`) that each `gpu-vfio-<index>` of a node is while NVIDIA's driver has it."""
    return {
        str(VfioName(function.index)): str(GpuName(function.gpu_minor))
        for function in inventory.vfio
        if function.gpu_minor is not None
    }


def sides_in_pool(devices: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Give the same of a pool's devices, as its slices have them: two names of one place on the bus."""
    gpus: dict[str, str] = {}
    bare: dict[str, str] = {}
    for device in devices:
        name = str(device.get("name") or "")
        place = ((device.get("attributes") or {}).get(PCI_BUS_ID) or {}).get("string")
        if not place:
            continue
        if isinstance(parse_device_name(name), GpuName):
            gpus[place] = name
        elif parse_vfio_name(name) is not None:
            bare[name] = place
    return {name: gpus[place] for name, place in bare.items() if place in gpus}
