"""Devices that several claims may hold: multiple allocations, request policies, and attributes that tell. Pure.

Names and values of capacities and policies are NVIDIA's (consumable shares). What is ours stands in the domain
`gpudra.dev`, and only on devices that are shared: an exclusive device is published as NVIDIA's driver does it.

Of a device that draws on counters the first share takes them, as the scheduler counts, so that shares of a
partition go together with partitions that are made on demand. Source: KEP-5075, KEP-4815.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from dra.api.gpu_settings import GpuIdentity, NodeSettings, SharingSettings
from dra.inventory.model import Gpu
from dra.inventory.names import MigName, is_profile, parse_device_name
from dra.slices.devices import SliceProblem
from dra.slices.features import ServerFeatures
from dra.slices.rules import quantity_of
from dra.values import Quantity

DOMAIN = "gpudra.dev"
SHARING = f"{DOMAIN}/sharing"
REPLICAS = f"{DOMAIN}/replicas"
MEMORY_PER_SHARE = f"{DOMAIN}/memoryPerShare"
ENFORCEMENT = f"{DOMAIN}/enforcement"

# What really holds of an amount that a claim was given: nothing; what each process keeps by itself, and may unset;
# what the control daemon of the claim sets for each process.
Enforcement = Literal["none", "cooperative", "per-process"]

# Code of the problem that a server does not keep shares.
NOT_SHARED = "DRA-SLICE-NOT-SHARED"
MEMORY = "memory"
SHARES = "shares"
MIB = 1 << 20
# From this compute capability on (Volta) MPS knows limits. Source: MPS documentation, architecture.
_MPS_LIMITS_SINCE = (7, 0)
# Clients that one MPS server serves of one GPU from Volta on, and since which CUDA version of the driver it is more.
# Source: MPS documentation, client-server connection limits.
_CLIENTS, _MORE_CLIENTS, _MORE_SINCE = 48, 60, (13, 1)
# Compute slices of a GPU whose profiles are not known.
_USUAL_SLICES = 7
_SLICES = re.compile(r"(\d+)g")
# Code of the problem that the clients of a card are fewer than its shares.
TOO_MANY = "DRA-SLICE-CLIENTS"


def identity_of(gpu: Gpu) -> GpuIdentity:
    """Give by what a GPU's settings are found."""
    return GpuIdentity(gpu.uuid, gpu.product_name, gpu.pci_address)


def enforcement_of(gpu: Gpu, sharing: SharingSettings, *, mps: bool) -> Enforcement:
    """Say by what the shares of a GPU are held to their amounts.

    `mps`: whether MPS daemons can be had on this node. Where they are required, no claim is prepared without.
    """
    if not sharing.shared or sharing.enforcement == "none" or gpu.compute_capability < _MPS_LIMITS_SINCE:
        return "none"
    if sharing.enforcement == "required":
        return "per-process"
    if not mps:
        return "none"
    return "cooperative" if sharing.enforcement == "cooperative" else "per-process"


def mps_clients(gpu: Gpu, device: str, cuda_version: tuple[int, int] | None) -> int:
    """Give how many clients one MPS server serves of a device of a GPU at once.

    Of a MIG device it is the part that its compute slices are of the GPU's.
    Source: MPS documentation, client-server connection limits; MIG user guide, CUDA MPS.

    Args:
        gpu: of compute capability 7.0 or more.
        device: the GPU, or a MIG device of it, by its published name.
        cuda_version: the newest CUDA version that the driver knows; None: not known.
    """
    clients = _MORE_CLIENTS if cuda_version is not None and cuda_version >= _MORE_SINCE else _CLIENTS
    name = parse_device_name(device)
    if not isinstance(name, MigName):
        return clients
    profiles = (*gpu.mig_profiles, *(mig.profile for mig in gpu.mig_devices))
    most = max((_compute_slices(profile.name) for profile in gpu.mig_profiles), default=_USUAL_SLICES)
    own = next(
        (
            each.name
            for each in profiles
            if each.profile_id == name.profile_id and is_profile(name, each.name)
        ),
        name.profile,
    )
    return max(1, clients * min(_compute_slices(own), most) // most)


def _compute_slices(profile: str) -> int:
    """Give the compute slices of a profile by its name (`3g.40gb`)."""
    found = _SLICES.match(profile)
    return int(found[1]) if found else 1


def share_device(
    device: dict[str, Any],
    gpu: Gpu,
    *,
    settings: NodeSettings,
    features: ServerFeatures,
    mps: bool,
    cuda_version: tuple[int, int] | None,
    problems: list[SliceProblem],
) -> dict[str, Any]:
    """Give a device as its GPU's settings have it shared.

    A server that does not keep multiple allocations gets it as an exclusive one: half of the fields would be a
    device that is given out whole while shares of it are held.
    """
    sharing = settings.of(identity_of(gpu)).sharing
    if not sharing.shared:
        return device
    name = str(device["name"])
    if not features.consumable:
        problems.append(
            SliceProblem(
                name, "allowMultipleAllocations", NOT_SHARED,
                f"{name}: it is published as exclusive and not as {sharing.strategy}, for the API server does not "
                "keep shares of a device",
                "Turn on the feature gate DRAConsumableCapacity on all control-plane components, or upgrade to "
                "Kubernetes 1.36.",
            )
        )  # fmt: skip
        return device
    capacity = _capacities(device.get("capacity") or {}, sharing)
    attributes = {**device["attributes"], SHARING: {"string": sharing.strategy}}
    enforcement = enforcement_of(gpu, sharing, mps=mps)
    attributes[ENFORCEMENT] = {"string": enforcement}
    if enforcement == "cooperative":
        _check_clients(name, sharing, mps_clients(gpu, name, cuda_version), problems)
    if sharing.strategy == "shares":
        attributes[REPLICAS] = {"int": sharing.shares}
        total = _amount(capacity.get(MEMORY, {}))
        if total:
            attributes[MEMORY_PER_SHARE] = {"int": total // sharing.shares}
    shared = {**device, "attributes": attributes, "allowMultipleAllocations": True}
    return {**shared, "capacity": capacity} if capacity else shared


def _check_clients(name: str, sharing: SharingSettings, clients: int, problems: list[SliceProblem]) -> None:
    if sharing.strategy == "shares" and sharing.shares > clients:
        problems.append(
            SliceProblem(
                name, SHARES, TOO_MANY,
                f"{name}: of its {sharing.shares} shares no more than {clients} claims can be prepared: they have one MPS "
                f"server in common, which serves {clients} clients of the device",
                f"Cut it into {clients} shares or fewer, or give each claim a daemon of its own (per-process).",
            )
        )  # fmt: skip


def shared_memory(total: int) -> int:
    """Give the bytes of a device's memory that can be shared out: whole MiB."""
    return total // MIB * MIB


def _capacities(capacity: Mapping[str, Mapping[str, Any]], sharing: SharingSettings) -> dict[str, Any]:
    """Put a policy on each capacity: without one, a claim that does not name it would take all of it."""
    made: dict[str, Any] = {}
    if MEMORY in capacity:
        made[MEMORY] = _memory(_amount(capacity[MEMORY]), sharing)
    if sharing.strategy == "shares":
        limits = {"min": "1", "step": "1", "max": str(sharing.shares)}
        # One step above the least must be within the capacity; a single share leaves no choice.
        choice = {"validRange": limits} if sharing.shares > 1 else {"validValues": ["1"]}
        made[SHARES] = {"value": str(sharing.shares), "requestPolicy": {"default": "1", **choice}}
    for name, each in capacity.items():
        if name != MEMORY:
            made[name] = _optional(each)
    return made


def _memory(total: int, sharing: SharingSettings) -> dict[str, Any]:
    size = str(Quantity.of(shared_memory(total), binary=True))
    least = "1Mi" if sharing.strategy == "memory" else "0"
    default = size if sharing.strategy == "memory" else "0"
    room = total // MIB >= (2 if sharing.strategy == "memory" else 1)
    if not room:
        return {"value": size}
    limits = {"min": least, "step": "1Mi", "max": size}
    return {"value": size, "requestPolicy": {"default": default, "validRange": limits}}


def _optional(capacity: Mapping[str, Any]) -> dict[str, Any]:
    # What there is none of needs no policy: all of it is nothing.
    if not _amount(capacity):
        return dict(capacity)
    limits = {"min": "0", "max": capacity["value"]}
    return {**capacity, "requestPolicy": {"default": "0", "validRange": limits}}


def _amount(capacity: Mapping[str, Any]) -> int:
    amount = quantity_of(capacity.get("value"))
    return 0 if amount is None else amount.value
