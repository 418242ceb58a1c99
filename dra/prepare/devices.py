"""From an allocated device to the hardware that it stands for. Pure.

A whole GPU is there or not. A MIG device is a partition that exists, made by hand or by an earlier prepare, or one that
is made now; which of these decides whether the claim's journal has it, and so whether it is ever destroyed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra.api.claim import AllocatedDevice
from dra.api.config import DeviceType
from dra.errors import DeviceError, StackError
from dra.inventory.model import NODE, Gpu, Inventory
from dra.inventory.names import GpuName, MigName, is_profile, parse_device_name
from dra.prepare.effects import Effect
from dra.prepare.mig_effects import CreateMig, MigMode
from dra.prepare.mig_marks import NO_MARKS, MarkDirectory, Marks
from dra.prepare.partitions import (
    RESET_ARCHITECTURES,
    Look,
    MigControl,
    Partition,
    is_mode_ours,
    is_ours,
    offers,
)
from dra.prepare.record import JournalEntry


@dataclass(frozen=True, slots=True)
class MigView:
    """What planning must know of MIG beside the inventory.

    Args:
        control: what changes the hardware; None: nothing is ever made.
        may_create: whether partitions are made on demand.
        looks: what stands at the placements of the claim's MIG devices, by device name.
        journal: the effects of all records of this boot.
        marks: what is ours though its record was lost; `directory` is where they are kept.
    """

    control: MigControl | None = None
    may_create: bool = False
    looks: Mapping[str, Look] | None = None
    journal: Sequence[JournalEntry] = ()
    marks: Marks = NO_MARKS
    directory: MarkDirectory | None = None

    def owns(self, device: str, gpu_uuid: str, partition: Partition) -> bool:
        """Whether this driver made what stands at the placement of `device`."""
        mark = self.marks.partitions.get(device)
        marked = mark is not None and (mark.gpu_uuid, mark.partition.uuid) == (gpu_uuid, partition.uuid)
        return marked or is_ours(device, gpu_uuid, partition, self.journal)

    def owns_mode(self, gpu_uuid: str) -> bool:
        """Whether this driver switched the MIG mode of a GPU on."""
        return gpu_uuid in self.marks.modes or is_mode_ours(gpu_uuid, self.journal)


NO_MIG = MigView()


@dataclass(frozen=True, slots=True)
class Found:
    """The hardware of one allocated device.

    `partition` is that of a MIG device which was made by somebody's hand, or is only monitored; where it is ours, or is
    still to be made, `effects` has what gives it.
    """

    gpu: Gpu
    device_type: DeviceType = "gpu"
    partition: Partition | None = None
    effects: tuple[Effect, ...] = ()


def find_device(result: AllocatedDevice, inventory: Inventory, mig: MigView) -> Found:
    """Give the hardware of an allocated device.

    Raises:
        DeviceError: DRA-DEVICE-UNKNOWN, DRA-DEVICE-LOST, DRA-DEVICE-MIG-MODE, DRA-MIG-MODE-OFF.
        StackError: DRA-DRIVER-ABSENT; the code of what keeps the whole node's driver from answering.
    """
    name = parse_device_name(result.device)
    gpu = next((gpu for gpu in inventory.gpus if name is not None and gpu.minor == name.minor), None)
    if gpu is None or name is None:
        raise _unknown_device(result, inventory)
    if gpu.unusable:
        raise _unusable_device(result, gpu, inventory)
    if isinstance(name, MigName):
        return _find_partition(result, gpu, name, mig)
    if name != GpuName(gpu.minor):
        raise _unknown_device(result, inventory)
    if gpu.mig_enabled and not result.admin_access:
        raise DeviceError(
            "DRA-DEVICE-MIG-MODE",
            f"device {result.device} is in MIG mode, a container could not use it as a whole GPU",
            remedy="Switch MIG mode off on that GPU (nvidia-smi -mig 0), or allocate MIG devices.",
            retryable=True,
            device=result.device,
        )
    return Found(gpu)


def is_mig(result: AllocatedDevice) -> bool:
    """Whether a device is a partition, by its name."""
    return isinstance(parse_device_name(result.device), MigName)


def _find_partition(result: AllocatedDevice, gpu: Gpu, name: MigName, mig: MigView) -> Found:
    device = result.device
    look = (mig.looks or {}).get(device, Look(gpu.mig_enabled))
    there = look.partition
    if result.admin_access:
        if there is None:
            raise _no_partition(device, gpu, "access for monitoring needs one that exists")
        return Found(gpu, "mig", there)
    if there is not None and not mig.owns(device, gpu.uuid, there):
        return Found(gpu, "mig", there)
    if mig.control is None or not (mig.may_create or there is not None):
        raise _no_partition(device, gpu, "partitions are not made on demand on this node")
    if there is None:
        _check_can_create(device, gpu, name, look)
    made_by = CreateMig(
        mig.control, device, gpu.uuid, found=there, size=_size(gpu, name), marks=mig.directory
    )
    effects: list[Effect] = []
    if not look.mode_on or mig.owns_mode(gpu.uuid):
        effects.append(MigMode(mig.control, gpu.uuid, marks=mig.directory))
    return Found(gpu, "mig", None, (*effects, made_by))


def _check_can_create(device: str, gpu: Gpu, name: MigName, look: Look) -> None:
    if offers(gpu, name) is False:
        raise _no_partition(device, gpu, "the GPU does not have this profile at this place")
    if not look.mode_on and gpu.architecture in RESET_ARCHITECTURES:
        # Source: MIG user guide; before Hopper a change of mode waits for a reset of the GPU.
        raise DeviceError(
            "DRA-MIG-MODE-OFF",
            f"device {device} cannot be made: GPU {gpu.uuid} ({gpu.architecture}) is not in MIG mode, and would have "
            "to be reset to get there",
            remedy="Switch its MIG mode on while the node is drained (nvidia-smi -mig 1, then reset the GPU or "
            "reboot), or delete the pod so that it gets another device.",
            retryable=True,
            device=device,
        )


def _size(gpu: Gpu, name: MigName) -> int | None:
    sizes = (
        size
        for profile in gpu.mig_profiles
        if profile.profile_id == name.profile_id and is_profile(name, profile.name)
        for start, size in profile.placements
        if start == name.start
    )
    return next(sizes, None)


def _no_partition(device: str, gpu: Gpu, why: str) -> DeviceError:
    return DeviceError(
        "DRA-DEVICE-UNKNOWN",
        f"MIG device {device} does not exist on GPU {gpu.uuid}, and {why}",
        remedy="If the layout was changed by hand or by a reboot, make it again (nvidia-smi mig -cgi, -C); or delete "
        "the pod so that it gets another device.",
        retryable=True,
        device=device,
    )


def _unusable_device(result: AllocatedDevice, gpu: Gpu, inventory: Inventory) -> DeviceError | StackError:
    """Say what is wrong with a GPU: it may be nothing with the GPU itself, but with the node's driver."""
    address = str(gpu.pci_address)
    told = next(
        (
            each
            for each in inventory.problems
            if each.code == gpu.unusable and each.subject in (NODE, address)
        ),
        None,
    )
    if told is not None and told.subject == NODE:
        return StackError(
            told.code,
            f"device {result.device} cannot be prepared until the node's NVIDIA driver answers: {told.message}",
            remedy=f"{told.remedy} The call is retried by itself; the GPU is not at fault.",
            device=result.device,
        )
    return DeviceError(
        "DRA-DEVICE-LOST",
        f"device {result.device} ({gpu.uuid}) cannot be used: "
        + (gpu.unusable if told is None else f"{told.message} ({told.code})"),
        remedy="Delete the pod so that it gets another GPU; reset or replace this one.",
        retryable=True,
        device=result.device,
    )


def _unknown_device(result: AllocatedDevice, inventory: Inventory) -> DeviceError | StackError:
    if not inventory.gpus:
        told = inventory.problems[0] if inventory.problems else None
        reason = f": {told.message}" if told else ""
        return StackError(
            "DRA-DRIVER-ABSENT",
            f"device {result.device} cannot be prepared, no NVIDIA driver answers on this node{reason}",
            remedy=(told and told.remedy)
            or "Install or start the NVIDIA driver; the call is retried by itself.",
            device=result.device,
        )
    return DeviceError(
        "DRA-DEVICE-UNKNOWN",
        f"device {result.device} does not exist on this node",
        remedy="It may have been removed since it was allocated; delete the pod so that it gets another one.",
        retryable=True,
        device=result.device,
    )
