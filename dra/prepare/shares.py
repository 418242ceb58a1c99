"""What a claim's share of a device is, and whether the shares of all claims fit on it. Pure.

The scheduler adds up what claims consume; the node does it again, for a scheduler may work with an old view, and a
share that is one too many breaks the promise that was made to all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra.api.claim import AllocatedDevice
from dra.api.gpu_settings import NodeSettings, SharingSettings
from dra.errors import DeviceError
from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import MigName, is_profile, parse_device_name
from dra.prepare.holds import Hold
from dra.slices.sharing import MEMORY, MIB, SHARES, identity_of, shared_memory

_NANO = 10**9


@dataclass(frozen=True, slots=True)
class Share:
    """What one allocated share comes to.

    Args:
        sharing: how its GPU is shared.
        memory_bytes: what it may use of the device's memory, whole MiB; None: as much as there is.
        percent: its part of the multiprocessors, 1 to 100; None: all.
        whole: it is all that there is of the device, so that nobody else can have a part.
    """

    sharing: SharingSettings
    memory_bytes: int | None
    percent: int | None
    whole: bool = False

    @property
    def limited(self) -> bool:
        """Whether there is anything to hold it to."""
        return not self.whole and (self.memory_bytes is not None or self.percent is not None)


def share_of(result: AllocatedDevice, gpu: Gpu, settings: NodeSettings) -> Share | None:
    """Give what a result is a share of; None for a device that is a claim's alone.

    A number of shares is that part of the device's memory and of its multiprocessors; memory that a claim names itself
    counts in place of that part. Bytes are known only here: the request does not know the model of the card.
    """
    if result.share_id is None:
        return None
    sharing = settings.of(identity_of(gpu)).sharing
    total = device_memory(result.device, gpu)
    asked = result.consumed_capacity.get(MEMORY)
    memory = None if asked is None or asked.nano <= 0 else asked.value // MIB * MIB
    percent: int | None = None
    # Of a card that is shared by memory, who takes all of it has the card.
    whole = (
        sharing.strategy == "memory" and None not in (memory, total) and memory == shared_memory(total or 0)
    )
    count = result.consumed_capacity.get(SHARES)
    if count is not None and sharing.strategy == "shares" and count.nano > 0:
        taken = min(count.value, sharing.shares)
        whole = taken == sharing.shares and (memory is None or memory == shared_memory(total or 0))
        percent = max(1, taken * 100 // sharing.shares)
        if memory is None and total is not None:
            # A device of less than a MiB a share has nothing to share out.
            memory = max(MIB, shared_memory(total) * taken // sharing.shares // MIB * MIB)
    return Share(sharing, memory, percent, whole)


def device_memory(device: str, gpu: Gpu) -> int | None:
    """Give the bytes of memory of a GPU or of a partition of it; None where they are not known."""
    name = parse_device_name(device)
    if not isinstance(name, MigName):
        return gpu.memory_bytes
    profiles = (*gpu.mig_profiles, *(mig.profile for mig in gpu.mig_devices))
    for profile in profiles:
        if profile.profile_id == name.profile_id and is_profile(name, profile.name):
            return profile.memory_mib * MIB
    return None


def check_shares(
    results: Sequence[AllocatedDevice],
    holds: Iterable[Hold],
    *,
    uid: str,
    inventory: Inventory,
    settings: NodeSettings,
) -> None:
    """Refuse shares for which there is no room beside those of other claims.

    Raises:
        DeviceError: DRA-SHARE-OVERBOOKED naming the claims that hold the others; retryable, since holders go.
    """
    by_device: dict[str, list[Hold]] = {}
    for hold in holds:
        if hold.ref.uid != uid and hold.share_id is not None:
            by_device.setdefault(hold.device, []).append(hold)
    wanted: dict[str, dict[str, int]] = {}
    for result in results:
        if result.share_id is not None and not result.admin_access:
            sums = wanted.setdefault(result.device, {})
            _add(sums, {name: amount.nano for name, amount in result.consumed_capacity.items()})
    for device, sums in wanted.items():
        others = by_device.get(device, [])
        for hold in others:
            _add(sums, {name: amount.nano for name, amount in hold.consumed.items()})
        for name, total in _totals(device, inventory, settings).items():
            if sums.get(name, 0) > total * _NANO:
                raise _overbooked(device, name, total=total, wanted=sums[name], others=others)


def _totals(device: str, inventory: Inventory, settings: NodeSettings) -> dict[str, int]:
    """Give what of a device can be shared out; nothing of one that is not known, which fails elsewhere."""
    name = parse_device_name(device)
    gpu = next((gpu for gpu in inventory.gpus if name is not None and gpu.minor == name.minor), None)
    if gpu is None:
        return {}
    found: dict[str, int] = {}
    memory = device_memory(device, gpu)
    if memory is not None:
        found[MEMORY] = shared_memory(memory)
    sharing = settings.of(identity_of(gpu)).sharing
    if sharing.strategy == "shares":
        found[SHARES] = sharing.shares
    return found


def _add(sums: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0) + amount


def _overbooked(device: str, name: str, *, total: int, wanted: int, others: Sequence[Hold]) -> DeviceError:
    holders = "; ".join(sorted({hold.holder for hold in others})) or "this claim alone"
    return DeviceError(
        "DRA-SHARE-OVERBOOKED",
        f"device {device} has {total} of {name}, and {wanted // _NANO} would be taken, with the shares of {holders}"[
            :900
        ],
        remedy="It is prepared once there is room. If the number of shares was lowered, delete a pod so that it is "
        "scheduled again.",
        retryable=True,
        device=device,
        capacity=name,
    )
