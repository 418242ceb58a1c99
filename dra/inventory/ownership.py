"""Which partitions this driver made: marked in the inventory, so that those made by hand are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import MigName, profile_slug


@dataclass(frozen=True, slots=True)
class Owned:
    """What the records of this boot say that we made: device names, and UUIDs of GPUs whose MIG mode we switched."""

    devices: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()

    def __or__(self, other: Owned) -> Owned:
        """Give what either has."""
        return Owned(self.devices | other.devices, self.modes | other.modes)


def scan_with_owned(scan: Callable[[], Inventory], owned: Callable[[], Owned]) -> Callable[[], Inventory]:
    """Give a scan that marks what is ours.

    A partition is recorded before it is made and struck after it is destroyed. So the records are read before
    and after the look: what the look saw is in one of the two, and nothing of ours is ever taken for handmade.
    """

    def look() -> Inventory:
        before = owned()
        found = scan()
        return mark_owned(found, before | owned())

    return look


def mark_owned(inventory: Inventory, owned: Owned) -> Inventory:
    """Mark the partitions and MIG modes that are ours. Pure."""
    return replace(inventory, gpus=tuple(_mark(gpu, owned) for gpu in inventory.gpus))


def _mark(gpu: Gpu, owned: Owned) -> Gpu:
    devices = tuple(
        replace(
            mig,
            ours=str(MigName(gpu.minor, profile_slug(mig.profile.name), mig.profile.profile_id, mig.start))
            in owned.devices,
        )
        for mig in gpu.mig_devices
    )
    return replace(gpu, mig_devices=devices, mig_mode_ours=gpu.mig_enabled and gpu.uuid in owned.modes)
