"""MIG partitions as prepare sees them: what stands at a placement, whose it is, and the port that changes it.

A partition is ours only if a record of this boot says that we made it: by its UUID or, where the process died before
the UUID could be written down, by its placement, which was seen to be empty just before. All others were made by
somebody's hand; they are used as they are and never destroyed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import MigName, is_profile, parse_device_name
from dra.prepare.record import JournalEntry, Record

# The kinds of the two effects in the journal.
DEVICE_KIND = "mig-device"
MODE_KIND = "mig-mode"
# GPUs of these architectures change their MIG mode only by a reset: it is never switched while the node runs.
RESET_ARCHITECTURES = frozenset({"Ampere"})


@dataclass(frozen=True, slots=True)
class Partition:
    """A MIG device: a GPU instance and the compute instance over all of it."""

    gpu_instance: int
    compute_instance: int
    uuid: str

    @property
    def instances(self) -> tuple[int, int]:
        """The ids that name its capability nodes."""
        return self.gpu_instance, self.compute_instance


@dataclass(frozen=True, slots=True)
class Look:
    """What a GPU has at one placement: whether it is in MIG mode, and the partition that stands there."""

    mode_on: bool
    partition: Partition | None = None


@dataclass(frozen=True, slots=True)
class MadePartition:
    """A partition that this driver made, or may have made: `uuid` is empty while that is not known."""

    device: str
    gpu_uuid: str
    uuid: str
    claim_uid: str


class MigControl(Protocol):
    """The hardware's side; all calls raise DraError. What changes a GPU is called under its lock only."""

    def look(self, gpu_uuid: str, *, profile_id: int, start: int) -> Look:
        """Give what stands at a placement. Half of a partition (no compute instance) counts as none."""
        ...

    def create(self, gpu_uuid: str, *, profile_id: int, start: int) -> Partition:
        """Make a partition at exactly this placement, or nothing; switches the MIG mode on if it is off.

        Half of one that stands there is completed. DRA-MIG-OCCUPIED: nothing was made, the place is taken.
        """
        ...

    def destroy(self, gpu_uuid: str, partition: Partition, *, profile_id: int, start: int) -> bool:
        """Destroy a partition, or what an earlier attempt left of it; False if it is gone, or another one by now.

        DRA-MIG-IN-USE: a process uses it.
        """
        ...

    def clear_half_made(self, gpu_uuid: str, *, profile_id: int, start: int) -> bool:
        """Destroy half of a partition at a placement; whether there was one."""
        ...

    def leave_mode(self, gpu_uuid: str) -> None:
        """Switch the MIG mode off if nothing is left on the GPU. DRA-MIG-IN-USE: something uses the GPU."""
        ...

    def neighbours(self, gpu_uuid: str) -> Sequence[tuple[int, int, str]]:
        """Give what is on the GPU as (start, size, description), for errors."""
        ...


def look_in(gpu: Gpu, name: MigName) -> Look:
    """Give what the inventory has at a placement; for where nothing can look at the hardware itself."""
    for mig in gpu.mig_devices:
        if mig.profile.profile_id == name.profile_id and mig.start == name.start:
            return Look(gpu.mig_enabled, Partition(mig.gpu_instance_id, mig.compute_instance_id, mig.uuid))
    return Look(gpu.mig_enabled)


def looks_at(devices: Iterable[str], inventory: Inventory, control: MigControl | None) -> Mapping[str, Look]:
    """Look at the placement of each MIG device of a claim.

    Raises:
        DraError: the GPU does not answer.
    """
    found: dict[str, Look] = {}
    for device in devices:
        name = parse_device_name(device)
        if not isinstance(name, MigName) or device in found:
            continue
        gpu = next((gpu for gpu in inventory.gpus if gpu.minor == name.minor and not gpu.unusable), None)
        if gpu is None:
            continue
        if control is None or not gpu.mig_capable:
            found[device] = look_in(gpu, name)
        else:
            found[device] = control.look(gpu.uuid, profile_id=name.profile_id, start=name.start)
    return found


def device_args(device: str, gpu_uuid: str) -> dict[str, Any]:
    """Give what a partition is called in the journal."""
    return {"device": device, "gpu": gpu_uuid}


def is_ours(device: str, gpu_uuid: str, partition: Partition, journal: Iterable[JournalEntry]) -> bool:
    """Whether this driver made what stands at the placement of `device`.

    Args:
        device: its name.
        gpu_uuid: the GPU.
        partition: what stands there.
        journal: the effects of all records of this boot.
    """
    args = device_args(device, gpu_uuid)
    for entry in journal:
        if entry.kind != DEVICE_KIND or dict(entry.args) != args:
            continue
        if is_made(partition, entry.outcome):
            return True
    return False


def is_made(partition: Partition, outcome: Mapping[str, Any]) -> bool:
    """Whether a partition is the one that an effect with this outcome made, or may have made.

    Without an outcome the process died before there was one.
    """
    return not outcome or partition.uuid == outcome.get("uuid")


def is_mode_ours(gpu_uuid: str, journal: Iterable[JournalEntry]) -> bool:
    """Whether this driver switched the MIG mode of a GPU on."""
    return any(entry.kind == MODE_KIND and entry.args.get("gpu") == gpu_uuid for entry in journal)


def offers(gpu: Gpu, name: MigName) -> bool | None:
    """Whether a GPU has a placement; None if its profiles are not known (they are read in MIG mode, or on request)."""
    if not gpu.mig_profiles:
        return None if gpu.mig_capable else False
    return any(
        profile.profile_id == name.profile_id
        and is_profile(name, profile.name)
        and any(start == name.start for start, _ in profile.placements)
        for profile in gpu.mig_profiles
    )


def blockers(neighbours: Sequence[tuple[int, int, str]], *, start: int, size: int | None) -> tuple[str, ...]:
    """Name what takes memory slices of a placement; everything on the GPU where its size is not known."""
    if size is None:
        return tuple(text for _, _, text in neighbours)
    overlapping = [text for at, length, text in neighbours if at < start + size and start < at + length]
    return tuple(overlapping or (text for _, _, text in neighbours))


def made_partitions(records: Iterable[Record], boot_id: str) -> tuple[MadePartition, ...]:
    """Give the partitions that the records of this boot say were made, or may have been."""
    return tuple(
        MadePartition(
            device=str(entry.args.get("device", "")),
            gpu_uuid=str(entry.args.get("gpu", "")),
            uuid=str(entry.outcome.get("uuid", "")),
            claim_uid=record.ref.uid,
        )
        for record in records
        if record.boot_id == boot_id
        for entry in record.journal
        if entry.kind == DEVICE_KIND and (not entry.outcome or entry.outcome.get("uuid"))
    )


def holds_no_device(record: Record) -> bool:
    """Whether nothing is left of a claim but a MIG mode that could not be switched off yet."""
    return (
        record.state == "unpreparing"
        and bool(record.journal)
        and all(entry.kind == MODE_KIND for entry in record.journal)
    )
