"""What hardware stands behind the devices of a prepared claim: for `status.devices`, Events, metrics and `explain`. Pure.

The device's name in the pool says where a partition lies; which one it is at the moment (its UUID, and the ids of its
instances) is only known once it was made, and changes when it is made again after a reboot. `hardware_of` gives both.
"""

from __future__ import annotations

from dataclasses import dataclass

from dra.inventory.model import Gpu, Inventory, MigProfile
from dra.inventory.names import MigName, parse_device_name, profile_slug
from dra.prepare.partitions import DEVICE_KIND, Partition
from dra.prepare.record import Record
from dra.values import PciAddress


@dataclass(frozen=True, slots=True)
class MigHardware:
    """A partition: its UUID (`MIG-…`), profile (`1g.10gb`) and NVML's id of that, ids of its instances, and its place.

    `start` and `size` are in memory slices. `ours`: this driver made it for a claim, and destroys it after that.
    """

    uuid: str
    profile: str
    profile_id: int
    gpu_instance: int
    compute_instance: int
    start: int
    size: int
    ours: bool


@dataclass(frozen=True, slots=True)
class DeviceHardware:
    """One allocated device: its name in the pool, and the GPU that it is, or is part of."""

    device: str
    request: str
    share_id: str | None
    admin_access: bool
    gpu_uuid: str
    gpu_minor: int
    pci_address: PciAddress
    product_name: str
    mig: MigHardware | None = None

    @property
    def uuid(self) -> str:
        """What CUDA and nvidia-smi call it: the partition's UUID, else the GPU's."""
        return self.mig.uuid if self.mig is not None else self.gpu_uuid

    @property
    def parent_uuid(self) -> str:
        """The UUID of the GPU of a partition; empty for a whole GPU."""
        return self.gpu_uuid if self.mig is not None else ""


def hardware_of(record: Record, inventory: Inventory) -> tuple[DeviceHardware, ...]:
    """Give the hardware of each device of a prepared claim, in the order of the allocation's results.

    Call it with the record after prepare and the inventory as of the last look. A partition that was made for the claim
    is known from the record, which is ahead of the inventory; one that an administrator made, from the inventory. What
    cannot be told (a GPU that is gone, a partition that is not there) is left out.
    """
    gpus = {gpu.minor: gpu for gpu in inventory.gpus}
    found: list[DeviceHardware] = []
    for result in record.results:
        name = parse_device_name(result.device)
        gpu = None if name is None else gpus.get(name.minor)
        if gpu is None:
            continue
        mig = _partition(name, gpu, record) if isinstance(name, MigName) else None
        if mig is None and isinstance(name, MigName):
            continue
        found.append(
            DeviceHardware(
                device=result.device,
                request=result.request_name,
                share_id=result.share_id,
                admin_access=result.admin_access,
                gpu_uuid=gpu.uuid,
                gpu_minor=gpu.minor,
                pci_address=gpu.pci_address,
                product_name=gpu.product_name,
                mig=mig,
            )
        )
    return tuple(found)


def _partition(name: MigName, gpu: Gpu, record: Record) -> MigHardware | None:
    seen = next(
        (mig for mig in gpu.mig_devices if (mig.profile.profile_id, mig.start) == (name.profile_id, name.start)),
        None,
    )  # fmt: skip
    made = _made(name, gpu, record)
    profile = seen.profile if seen is not None else _profile(name, gpu)
    if made is None and seen is not None:
        made = Partition(seen.gpu_instance_id, seen.compute_instance_id, seen.uuid)
        ours = seen.ours
    else:
        ours = made is not None
    if made is None or profile is None:
        return None
    size = next((length for start, length in profile.placements if start == name.start), 0)
    return MigHardware(
        uuid=made.uuid,
        profile=profile.name,
        profile_id=name.profile_id,
        gpu_instance=made.gpu_instance,
        compute_instance=made.compute_instance,
        start=name.start,
        size=size if seen is None else seen.size,
        ours=ours,
    )


def _made(name: MigName, gpu: Gpu, record: Record) -> Partition | None:
    for entry in record.journal:
        outcome = entry.outcome
        if entry.kind != DEVICE_KIND or not outcome.get("uuid"):
            continue
        if (entry.args.get("device"), entry.args.get("gpu")) == (str(name), gpu.uuid):
            return Partition(int(outcome["gi"]), int(outcome["ci"]), str(outcome["uuid"]))
    return None


def _profile(name: MigName, gpu: Gpu) -> MigProfile | None:
    return next(
        (
            profile
            for profile in gpu.mig_profiles
            if profile.profile_id == name.profile_id and profile_slug(profile.name) == name.profile
        ),
        None,
    )
