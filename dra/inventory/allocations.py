"""Which claims have a node's GPUs, as the API says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dra.inventory.names import GpuName, MigName, parse_device_name


def claims_on_gpus(
    claims: Iterable[Mapping[str, Any]], *, driver: str, pool: str
) -> dict[int, tuple[str, ...]]:
    """Give the claims (namespace/name) that the API says are on each GPU, by its minor number."""
    found: dict[int, set[str]] = {}
    for claim in claims:
        metadata = claim.get("metadata") or {}
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            if result.get("driver") != driver or result.get("pool") != pool:
                continue
            name = parse_device_name(str(result.get("device") or ""))
            if isinstance(name, GpuName | MigName):
                found.setdefault(name.minor, set()).add(
                    f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
                )
    return {minor: tuple(sorted(names)) for minor, names in found.items()}
