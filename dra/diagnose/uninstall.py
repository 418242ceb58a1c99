"""May the driver be taken away? Not while pods use its claims: without it they could neither be unprepared nor end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dra.diagnose.explain.cluster import Json


@dataclass(frozen=True, slots=True)
class ClaimInUse:
    """A claim that is prepared, or about to be: where, which devices, for whom."""

    name: str
    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    users: tuple[str, ...]

    def __str__(self) -> str:
        """Give a line for people."""
        return f"claim {self.name} on {', '.join(self.nodes)}: {', '.join(self.devices)}, used by {', '.join(self.users)}"


def claims_in_use(claims: Iterable[Json], *, driver: str) -> list[ClaimInUse]:
    """Give the claims with devices of this driver that somebody is reserved for, by name.

    Source: kubelet; a claim is prepared from the start of its first pod to the end of its last, and reserved for each.
    """
    found = []
    for claim in claims:
        meta, status = claim.get("metadata") or {}, claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
        ours = [result for result in results if result.get("driver") == driver]
        users = [
            f"{ref.get('resource', 'pods').removesuffix('s')} {ref.get('name')}"
            for ref in status.get("reservedFor") or []
        ]
        if ours and users:
            found.append(
                ClaimInUse(
                    f"{meta.get('namespace')}/{meta.get('name')}",
                    tuple(dict.fromkeys(str(result.get("pool")) for result in ours)),
                    tuple(str(result.get("device")) for result in ours),
                    tuple(users),
                )
            )
    return sorted(found, key=lambda each: each.name)
