"""GPUs to plan on: of this node's hardware, or of a cluster's slices and claims. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dra.diagnose.mig_plan.model import WHOLE, GpuState, Piece, Profile
from dra.inventory.allocations import sides_in_pool
from dra.inventory.model import Gpu, Inventory, MigProfile
from dra.inventory.names import GpuName, MigName, parse_device_name
from dra.slices.devices import gpu_device, partition_device, profile_amounts
from dra.slices.rules import quantity_of

Json = Mapping[str, Any]

_SLICE_COUNTER = re.compile(r"memory-slice-(\d+)", re.ASCII)
_SLICE_CAPACITY = re.compile(r"(?:.*/)?memorySlice(\d+)", re.ASCII)
_LIVE = (9, 0)


def gpus_of_inventory(inventory: Inventory, *, node: str, as_if_in_mig_mode: bool = False) -> list[GpuState]:
    """Give the GPUs with MIG that a node has, with the partitions on them.

    Args:
        inventory: read with profiles; partitions that were made for claims are marked as ours.
        node: the node's name.
        as_if_in_mig_mode: plan GPUs that need a reset for MIG mode as if they were in it.
    """
    return [_of_gpu(gpu, inventory, node, as_if_in_mig_mode) for gpu in inventory.gpus if gpu.mig_profiles]


def _of_gpu(gpu: Gpu, inventory: Inventory, node: str, as_if: bool) -> GpuState:
    pieces = tuple(
        Piece(
            mig.profile.name, mig.start, mig.size,
            holder="a claim" if mig.ours else "", fixed=not mig.ours, exists=True,
        )
        for mig in gpu.mig_devices
    )  # fmt: skip
    live = gpu.compute_capability >= _LIVE
    devices: dict[str, Json] = {
        profile.name: partition_device(
            gpu, profile, profile.placements[0][0], inventory=inventory, problems=[]
        )
        for profile in gpu.mig_profiles
        if profile.placements
    }
    if not gpu.mig_enabled or gpu.mig_mode_ours:
        devices[WHOLE] = gpu_device(gpu, inventory, [])
    return GpuState(
        node=node,
        name=str(GpuName(gpu.minor)),
        product=gpu.product_name,
        profiles=tuple(_profile(profile) for profile in gpu.mig_profiles),
        pieces=pieces,
        recut=not any(piece.fixed for piece in pieces) and (live or gpu.mig_enabled or as_if),
        devices=devices,
    )


def _profile(profile: MigProfile) -> Profile:
    return Profile(profile.name, profile.profile_id, profile_amounts(profile), profile.placements)


def gpus_in_cluster(
    slices: Iterable[Json], claims: Iterable[Json], *, driver: str = "gpu.nvidia.com", node: str = ""
) -> list[GpuState]:
    """Give the GPUs with MIG in a cluster: what the slices offer, and what the claims hold.

    Args:
        slices: ResourceSlices, in the shape of v1.
        claims: ResourceClaims; those that are allocated hold their devices.
        driver: the driver's name.
        node: only this one; empty: all.
    """
    holders = _holders(claims, driver)
    pools: dict[str, list[Json]] = {}
    for each in slices:
        spec = each["spec"]
        if spec.get("driver") == driver and node in ("", spec.get("nodeName")):
            pools.setdefault(str(spec.get("nodeName") or spec["pool"]["name"]), []).extend(
                spec.get("devices") or ()
            )
    found: list[GpuState] = []
    for name, devices in sorted(pools.items()):
        found += _of_pool(name, devices, holders)
    return found


def _holders(claims: Iterable[Json], driver: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for claim in claims:
        meta = claim["metadata"]
        results = (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get(
            "results"
        ) or ()
        for result in results:
            if result.get("driver") == driver and not result.get("adminAccess"):
                found[str(result["pool"]), str(result["device"])] = f"{meta.get('namespace')}/{meta['name']}"
    return found


def _of_pool(node: str, devices: Sequence[Json], holders: Mapping[tuple[str, str], str]) -> list[GpuState]:
    gpus: dict[int, list[tuple[GpuName | MigName, Json]]] = {}
    # Whoever has a GPU passed through has it as a whole.
    bare = {
        (node, gpu): holders[node, name]
        for name, gpu in sides_in_pool(devices).items()
        if (node, name) in holders
    }
    for device in devices:
        name = parse_device_name(str(device["name"]))
        if name is not None:
            gpus.setdefault(name.minor, []).append((name, device))
    found = []
    for minor, members in gpus.items():
        state = _of_members(node, minor, members, {**holders, **bare})
        if any(isinstance(name, MigName) for name, _ in members):
            found.append(state)
    return found


def _of_members(
    node: str,
    minor: int,
    members: Sequence[tuple[GpuName | MigName, Json]],
    holders: Mapping[tuple[str, str], str],
) -> GpuState:
    profiles: dict[str, Profile] = {}
    shown: dict[str, Json] = {}
    pieces: list[Piece] = []
    product = ""
    for name, device in members:
        attributes = device.get("attributes") or {}
        product = product or str((attributes.get("productName") or {}).get("string", ""))
        holder = holders.get((node, str(device["name"])), "")
        if isinstance(name, GpuName):
            shown[WHOLE] = device
            continue
        profile = str((attributes.get("profile") or {}).get("string", name.profile))
        shown.setdefault(profile, device)
        exists = "uuid" in attributes
        start, size = _place(device, name, exists)
        if exists or holder:
            pieces.append(Piece(profile, start, size, holder, fixed=exists, exists=True))
        before = profiles.get(profile)
        places = (() if before is None else before.places) + ((start, size),)
        profiles[profile] = Profile(profile, name.profile_id, _amounts(device), tuple(sorted(places)))
    return GpuState(
        node=node,
        name=str(GpuName(minor)),
        product=product,
        profiles=tuple(profiles.values()),
        pieces=tuple(sorted(pieces, key=lambda piece: piece.start)),
        recut=not any(piece.fixed for piece in pieces),
        whole_holder=holders.get((node, str(GpuName(minor))), ""),
        devices=shown,
    )


def _place(device: Json, name: MigName, exists: bool) -> tuple[int, int]:
    if exists:
        numbers = [int(m[1]) for key in device.get("capacity") or {} if (m := _SLICE_CAPACITY.fullmatch(key))]
    else:
        counters = [
            key for entry in device.get("consumesCounters") or () for key in entry.get("counters") or ()
        ]
        numbers = [int(match[1]) for key in counters if (match := _SLICE_COUNTER.fullmatch(key))]
    return name.start, max(1, len(numbers))


def _amounts(device: Json) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, capacity in (device.get("capacity") or {}).items():
        amount = quantity_of(capacity.get("value"))
        if amount is not None and not _SLICE_CAPACITY.fullmatch(key):
            found[key] = amount.value
    return found


def with_count(gpus: Sequence[GpuState], count: int) -> list[GpuState]:
    """Give so many GPUs like the first, named in order."""
    return [replace(gpus[0], name=f"gpu-{number}", devices=gpus[0].devices) for number in range(count)]
