"""Who holds which device, and whether two claims get in each other's way. Pure.

A device is held by every record of this boot that names it, in whatever state: what is half prepared or half
unprepared is still on the hardware. Access for monitoring neither holds nor is held. Two shares of one device
(distinct share ids, made by the scheduler for devices that allow several allocations) go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer
from dra.errors import DeviceError
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, is_profile, parse_device_name, parse_vfio_name
from dra.prepare.passthrough.model import KIND as VFIO_KIND
from dra.prepare.passthrough.model import Before, function_of
from dra.values import Quantity

if TYPE_CHECKING:
    from dra.prepare.record import Record

# Memory slices of the largest MIG layout; a partition of unknown size is taken to reach to the end.
_ALL_SLICES = 1 << 10


@dataclass(frozen=True, slots=True)
class Footprint:
    """What of the hardware a device takes: memory slices `start` to `end` (exclusive) of a GPU.

    `gpu` is the GPU's minor as text, or the whole name of a device that has none at the moment.
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

    `consumed`: what a share takes of the device's capacities; empty where that is not known. `gpu` and `pci`: of a
    function that is passed through, the device that it was with NVIDIA's driver (`gpu-0`), and where it is.
    """

    ref: ClaimRef
    device: str
    share_id: str | None
    consumers: tuple[Consumer, ...] = ()
    consumed: Mapping[str, Quantity] = field(default_factory=dict)
    gpu: str = ""
    pci: str = ""

    @property
    def holder(self) -> str:
        """The claim and its pods, for an error text."""
        if not self.ref.name:
            return f"a claim with UID {self.ref.uid}, whose record was lost and is being rebuilt"
        pods = ", ".join(str(consumer) for consumer in self.consumers)
        return f"claim {self.ref} (UID {self.ref.uid}{', used by ' + pods if pods else ''})"


def hold_of(record: Record, result: AllocatedDevice) -> Hold:
    """Give what a claim's record says of one of its devices."""
    hold = Hold(record.ref, result.device, result.share_id, record.consumers, result.consumed_capacity)
    for entry in record.journal:
        if entry.kind == VFIO_KIND and entry.args.get("device") == result.device:
            return replace(hold, gpu=Before.of(entry.outcome).gpu, pci=str(entry.args.get("pci", "")))
    return hold


def footprint(device: str, inventory: Inventory) -> Footprint:
    """Give what a device takes; the size of a MIG placement comes from its GPU's profiles."""
    name = parse_device_name(device)
    if isinstance(name, GpuName):
        return Footprint(str(name.minor), 0, _ALL_SLICES)
    if isinstance(name, MigName):
        return Footprint(str(name.minor), name.start, name.start + _mig_size(name, inventory))
    function = function_of(device, inventory)
    minor = None if function is None else function.gpu_minor
    return Footprint(device if minor is None else str(minor), 0, _ALL_SLICES)


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
    if name is None and parse_vfio_name(device) is not None:
        return device
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
        if (
            wanted.overlaps(footprint(hold.device, inventory))
            or _was(hold, wanted, inventory)
            or _is_group_mate(hold, result, inventory)
        ):
            return hold
    return None


def _was(hold: Hold, wanted: Footprint, inventory: Inventory) -> bool:
    """Whether what is wanted is the GPU that a function was before it was passed through.

    NVIDIA's driver may give its number to another GPU meanwhile.
    """
    name = parse_device_name(hold.gpu)
    if name is None or wanted.gpu != str(name.minor):
        return False
    now = next((gpu for gpu in inventory.gpus if gpu.minor == name.minor), None)
    return now is None or str(now.pci_address) == hold.pci


def _is_group_mate(hold: Hold, result: AllocatedDevice, inventory: Inventory) -> bool:
    """Whether both are functions of one IOMMU group: who has the group's node reaches all of its functions.

    Source: kernel documentation, driver-api/vfio: the group is the smallest set that can be kept apart.
    """
    one, other = function_of(hold.device, inventory), function_of(result.device, inventory)
    return one is not None and other is not None and one != other and one.iommu_group == other.iommu_group


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
        if _is_group_mate(hold, result, inventory):
            part = f", with all of its IOMMU group (through {hold.device}),"
        raise DeviceError(
            "DRA-DEVICE-HELD",
            f"device {result.device} is held{part} by {hold.holder}",
            remedy="It is prepared once that claim is unprepared; if its pod is gone, that happens by itself.",
            retryable=True,
            device=result.device,
            holder_uid=hold.ref.uid,
        )
