"""Who holds which device, and whether two claims get in each other's way. Pure.

A device is held by every record of this boot that names it, in whatever state: what is half prepared or half
unprepared is still on the hardware. Access for monitoring neither holds nor is held. Two shares of one device
(distinct share ids, made by the scheduler for devices that allow several allocations) go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer
from dra.errors import DeviceError
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, is_profile, parse_device_name
from dra.values import Quantity

# Memory slices of the largest MIG layout; a partition of unknown size is taken to reach to the end.
_ALL_SLICES = 1 << 10


@dataclass(frozen=True, slots=True)
class Footprint:
    """What of the hardware a device takes: memory slices `start` to `end` (exclusive) of a GPU.

    `gpu` is the GPU's minor as text, or the whole name of a device of another kind.
    """

    gpu: str
    start: int
    end: int

    def overlaps(self, other: Footprint) -> bool:
        """Whether both take some of the same hardware."""
        return self.gpu == other.gpu and self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class Hold:
    """One device held by one claim. `ref.name` is empty where only the UID is known (a lost record).

    `consumed`: what a share takes of the device's capacities; empty where that is not known.
    """

    ref: ClaimRef
    device: str
    share_id: str | None
    consumers: tuple[Consumer, ...] = ()
    consumed: Mapping[str, Quantity] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """The claim and its pods, for an error text."""
        if not self.ref.name:
            return f"a claim with UID {self.ref.uid}, whose record was lost and is being rebuilt"
        pods = ", ".join(str(consumer) for consumer in self.consumers)
        return f"claim {self.ref} (UID {self.ref.uid}{', used by ' + pods if pods else ''})"


def footprint(device: str, inventory: Inventory) -> Footprint:
    """Give what a device takes; the size of a MIG placement comes from its GPU's profiles."""
    name = parse_device_name(device)
    if isinstance(name, GpuName):
        return Footprint(str(name.minor), 0, _ALL_SLICES)
    if isinstance(name, MigName):
        return Footprint(str(name.minor), name.start, name.start + _mig_size(name, inventory))
    return Footprint(device, 0, _ALL_SLICES)


def _mig_size(name: MigName, inventory: Inventory) -> int:
    for gpu in inventory.gpus:
        if gpu.minor != name.minor:
            continue
        for profile in gpu.mig_profiles:
            if profile.profile_id == name.profile_id and is_profile(name, profile.name):
                for start, size in profile.placements:
                    if start == name.start:
                        return size
    return _ALL_SLICES


def lock_name(device: str) -> str:
    """Give the name of the lock that guards the GPU of a device."""
    name = parse_device_name(device)
    if name is None:
        return "device-" + "".join(c if c.isalnum() or c == "-" else "_" for c in device)[:100]
    return f"gpu-{name.minor}"


def find_conflict(
    result: AllocatedDevice, holds: Iterable[Hold], *, uid: str, inventory: Inventory
) -> Hold | None:
    """Give the hold of another claim that a result collides with; None if it may be prepared."""
    if result.admin_access:
        return None
    wanted = footprint(result.device, inventory)
    for hold in holds:
        if hold.ref.uid == uid:
            continue
        if hold.device == result.device and _are_shares(hold.share_id, result.share_id):
            continue
        if wanted.overlaps(footprint(hold.device, inventory)):
            return hold
    return None


def _are_shares(one: str | None, other: str | None) -> bool:
    # A share of a lost record is known by its first eight characters only.
    if one is None or other is None:
        return False
    length = min(len(one), len(other))
    return one[:length] != other[:length]


def check_exclusive(
    results: Sequence[AllocatedDevice], holds: Sequence[Hold], *, uid: str, inventory: Inventory
) -> None:
    """Refuse results that another claim holds.

    Raises:
        DeviceError: DRA-DEVICE-HELD naming the holder and its pods; retryable, since holders go.
    """
    for result in results:
        hold = find_conflict(result, holds, uid=uid, inventory=inventory)
        if hold is None:
            continue
        part = "" if hold.device == result.device else f" (as {hold.device})"
        raise DeviceError(
            "DRA-DEVICE-HELD",
            f"device {result.device} is held{part} by {hold.holder}",
            remedy="It is prepared once that claim is unprepared; if its pod is gone, that happens by itself.",
            retryable=True,
            device=result.device,
            holder_uid=hold.ref.uid,
        )
