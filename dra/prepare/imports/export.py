"""The way back: our records as a checkpoint that NVIDIA's driver goes on from. Pure, but for the files of `write`.

Its unprepare needs the hardware's UUIDs, which our records do not hold: they come from a look at the hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.api.claim import AllocatedDevice
from dra.errors import HostError
from dra.host.files import write_durable
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, parse_device_name
from dra.prepare.imports.checkpoint import (
    RELEASES,
    Checkpoint,
    CheckpointClaim,
    CheckpointDevice,
    DeviceGroup,
    encode_checkpoint,
    knows_vfio,
)
from dra.prepare.imports.names import CHECKPOINT
from dra.prepare.imports.retired import put_by
from dra.prepare.passthrough.model import KIND as VFIO_KIND
from dra.prepare.passthrough.model import NVIDIA, Before, function_of, is_passthrough
from dra.prepare.record import Record
from dra.slices.passthrough import vfio_uuid
from dra.values import PciAddress

# Effects that NVIDIA's driver does not know, or undoes in another way.
_NOT_THEIRS = {
    "mps-daemon": "it has an MPS daemon of ours",
    "nvidia-mps": "its MPS daemon's directory is kept by our record",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint, the claims in it, and those that cannot go into one, with the reason."""

    checkpoint: Checkpoint
    claims: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def export_records(
    records: Iterable[Record], inventory: Inventory, *, boot_id: str, release: str = RELEASES[-1]
) -> Exported:
    """Make a checkpoint of the claims that are prepared in this boot, for a release of NVIDIA's driver."""
    claims: list[CheckpointClaim] = []
    refused: list[tuple[str, str]] = []
    for record in sorted(records, key=lambda each: each.ref.uid):
        if record.boot_id != boot_id:
            continue
        reason = _refusal(record, release)
        devices = [_device(record, result, inventory) for result in record.results]
        missing = [
            result.device for result, device in zip(record.results, devices, strict=True) if device is None
        ]
        if not reason and missing:
            reason = _why_missing(missing[0], inventory)
        if reason:
            refused.append((str(record.ref) if record.ref.name else record.ref.uid, reason))
            continue
        claims.append(
            CheckpointClaim(
                uid=record.ref.uid,
                completed=True,
                groups=tuple(_groups(record, [device for device in devices if device is not None])),
                status=_status(record),
            )
        )
    return Exported(Checkpoint(tuple(claims), boot_id=boot_id), tuple(c.uid for c in claims), tuple(refused))


def _why_missing(device: str, inventory: Inventory) -> str:
    if not inventory.gpus and inventory.problems:
        # The look at the hardware failed: a wrong driver root, no driver.
        return f"device {device} was not found, because no GPU was: {inventory.problems[0].message}"
    return f"device {device} is not on this node any more"


def write_export(exported: Exported, state_dir: Path, *, release: str) -> Path:
    """Write the checkpoint, then put our records by; give where they are now.

    In this order, so that a kill in between leaves both: our own next start then keeps its records.

    Raises:
        HostError: the disk refuses; DRA-CHECKPOINT-EXISTS.
    """
    path = state_dir / CHECKPOINT
    if path.exists():
        raise HostError(
            "DRA-CHECKPOINT-EXISTS",
            f"{path} is there already",
            remedy="NVIDIA's driver runs or ran here: remove the file if it is stale.",
            retryable=False,
        )
    write_durable(path, encode_checkpoint(exported.checkpoint, release=release), mode=0o600)
    return put_by(state_dir / "claims", "exported", action="put by")


def _refusal(record: Record, release: str) -> str:
    if record.state != "prepared":
        return f"it is {record.state}"
    through = [result.device for result in record.results if is_passthrough(result)]
    if through and not knows_vfio(release):
        return f"{through[0]} is passed through, which {release} does not know"
    for entry in record.journal:
        if entry.kind == VFIO_KIND and (driver := Before.of(entry.outcome).driver) != NVIDIA:
            return f"{entry.args.get('device')} was bound to {driver} before, and NVIDIA's driver would bind it to {NVIDIA}"
    return next((_NOT_THEIRS[entry.kind] for entry in record.journal if entry.kind in _NOT_THEIRS), "")


def _device(record: Record, result: AllocatedDevice, inventory: Inventory) -> CheckpointDevice | None:
    told = next(
        (d for d in record.devices if (d.pool, d.device, d.share_id) == (result.pool, result.device, result.share_id)), None
    )  # fmt: skip
    common: dict[str, Any] = {
        "requests": (result.request,),
        "pool": result.pool,
        "device": result.device,
        "cdi_ids": told.cdi_ids if told is not None else (),
        "share_id": result.share_id,
    }
    if is_passthrough(result):
        address = _address(record, result, inventory)
        if address is None:
            return None
        return CheckpointDevice(kind="vfio", uuid=vfio_uuid(address), pci_bus_id=str(address), **common)
    name = parse_device_name(result.device)
    gpu = next((gpu for gpu in inventory.gpus if name is not None and gpu.minor == name.minor), None)
    if gpu is None:
        return None
    if isinstance(name, GpuName):
        return CheckpointDevice(kind="gpu", uuid=gpu.uuid, **common)
    assert isinstance(name, MigName)
    for mig in gpu.mig_devices:
        if (mig.profile.profile_id, mig.start) == (name.profile_id, name.start):
            return CheckpointDevice(
                kind="mig", uuid=mig.uuid, parent_uuid=gpu.uuid, parent_minor=gpu.minor,
                instances=(mig.gpu_instance_id, mig.compute_instance_id), pci_bus_id=str(gpu.pci_address), **common,
            )  # fmt: skip
    return None


def _address(record: Record, result: AllocatedDevice, inventory: Inventory) -> PciAddress | None:
    """Give where a function that is passed through is: as it was bound, else, for monitoring, as it was seen."""
    for entry in record.journal:
        if entry.kind == VFIO_KIND and entry.args.get("device") == result.device:
            return PciAddress.parse(str(entry.args["pci"]))
    function = function_of(result.device, inventory)
    return None if function is None else function.pci_address


def _groups(record: Record, devices: Sequence[CheckpointDevice]) -> list[DeviceGroup]:
    """Give one group for the devices with a time-slice, and one for the others."""
    sliced = {str(entry.args.get("gpu")) for entry in record.journal if entry.kind == "time-slice"}
    found = []
    for applied in (True, False):
        part = tuple(device for device in devices if (device.uuid in sliced) == applied)
        if part:
            found.append(DeviceGroup(part, time_slice_applied=True if applied else None))
    return found


def _status(record: Record) -> Mapping[str, Any]:
    results = []
    for result in record.results:
        entry: dict[str, Any] = {
            "request": result.request, "driver": result.driver, "pool": result.pool, "device": result.device,
        }  # fmt: skip
        if result.admin_access:
            entry["adminAccess"] = True
        if result.share_id:
            entry["shareID"] = result.share_id
        if result.consumed_capacity:
            entry["consumedCapacity"] = {
                name: str(amount) for name, amount in result.consumed_capacity.items()
            }
        results.append(entry)
    configs = [
        {
            "source": config.source,
            "requests": list(config.requests),
            "opaque": {"driver": config.driver, "parameters": dict(config.parameters)},
        }
        for config in record.configs
    ]
    return {
        "allocation": {"devices": {"results": results, "config": configs}},
        "reservedFor": [
            {"resource": consumer.resource, "name": consumer.name, "uid": consumer.uid}
            for consumer in record.consumers
        ],
    }
