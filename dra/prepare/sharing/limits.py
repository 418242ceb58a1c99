"""MPS's default limits of pinned device memory, from what users write to what the control daemon is told. Pure.

Source: NVIDIA's DRA driver, normalisation of defaultPerDevicePinnedMemoryLimit: whole MiB, cut off; an index counts
the group's UUIDs in their sorted order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dra.api.config import MIB_NANO, limit_key_kind
from dra.errors import ConfigError
from dra.values import Quantity

_FIELD = "sharing.mpsConfig"


def pinned_memory_mib(
    uuids: Sequence[str], default: Quantity | None, per_device: Mapping[str, Quantity] | None
) -> dict[str, int]:
    """Give the limit in MiB by UUID; without any limit nothing.

    Args:
        uuids: those of the devices of one group.
        default: for each of them.
        per_device: over it, by UUID or by index.

    Raises:
        ConfigError: DRA-CONFIG-DEVICE: no such device in the group; DRA-CONFIG-FIELD: less than 1 MiB.
    """
    order = sorted(set(uuids))
    limits: dict[str, int] = {}
    if default is not None:
        size = _mib(default, "defaultPinnedDeviceMemoryLimit")
        limits = dict.fromkeys(order, size)
    overlay: dict[str, int] = {}
    by_uuid: dict[str, int] = {}
    for key, limit in (per_device or {}).items():
        field = f"defaultPerDevicePinnedMemoryLimit[{key}]"
        uuid = _device(key, order, field)
        (by_uuid if key == uuid else overlay)[uuid] = _mib(limit, field)
    # One device may be named by both its index and its UUID: the exacter word counts.
    return limits | overlay | by_uuid


def in_words(limits: Mapping[str, int]) -> dict[str, str]:
    """Give the limits as the control daemon takes them: `10240M`."""
    return {uuid: f"{size}M" for uuid, size in limits.items()}


def _device(key: str, order: Sequence[str], field: str) -> str:
    if key in order:
        return key
    if limit_key_kind(key) == "index" and re.fullmatch(r"[+-]?[0-9]+", key, re.ASCII):
        index = int(key)
        if 0 <= index < len(order):
            return order[index]
    known = f"0 to {len(order) - 1}, {', '.join(order)}" if order else "none"
    raise ConfigError(
        "DRA-CONFIG-DEVICE",
        f"{_FIELD}.{field} names no device of the group (known: {known})",
        remedy="Write the index of a device of the group, counted from 0 in the order of their UUIDs, or its UUID.",
        field=f"{_FIELD}.{field}",
    )


def _mib(limit: Quantity, field: str) -> int:
    size = limit.nano // MIB_NANO
    if size <= 0:
        raise ConfigError(
            "DRA-CONFIG-FIELD",
            f"{_FIELD}.{field} is {limit}, which is less than 1Mi",
            remedy="Write at least 1Mi; MPS counts in whole MiB.",
            field=f"{_FIELD}.{field}",
        )
    return size
