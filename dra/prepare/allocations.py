"""Who holds which piece of hardware, as the claim records say it. Pure, for metrics and `dra top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer
from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import MigName, parse_device_name
from dra.prepare.partitions import DEVICE_KIND, look_in
from dra.prepare.record import Record


@dataclass(frozen=True, slots=True)
class Allocation:
    """One device of one prepared claim.

    `uuid` is the GPU's or the MIG device's, `gpu_uuid` the GPU's, both empty if the hardware is not found; `profile` is
    empty for a GPU. `instances` are a MIG device's GPU instance and compute instance where known. `sole`: nobody else
    holds the device. `memory_bytes` is what of the device's memory the claim was given, None for all.
    `prepared` is in seconds since 1970, None if not known.
    """

    ref: ClaimRef
    request: str
    device: str
    share: str = ""
    admin: bool = False
    consumers: tuple[Consumer, ...] = ()
    container: str = ""
    uuid: str = ""
    gpu_uuid: str = ""
    profile: str = ""
    gpu_instance: int | None = None
    sole: bool = True
    memory_bytes: int | None = None
    prepared: float | None = None


def allocations(
    records: Iterable[Record],
    inventory: Inventory,
    *,
    boot_id: str,
    prepared_at: Callable[[str], float | None] = lambda _uid: None,
) -> tuple[Allocation, ...]:
    """Give what prepared claims hold, in the order of the records. `prepared_at` tells the time for a claim's UID."""
    gpus = {gpu.minor: gpu for gpu in inventory.gpus}
    complete = [record for record in records if record.is_complete(boot_id)]
    holders = Counter(
        result.device for record in complete for result in record.results if not result.admin_access
    )
    found = []
    for record in complete:
        prepared = prepared_at(record.ref.uid)
        found += [
            _allocation(record, result, gpus, sole=holders[result.device] == 1, prepared=prepared)
            for result in record.results
        ]
    return tuple(found)


def _allocation(
    record: Record, result: AllocatedDevice, gpus: dict[int, Gpu], *, sole: bool, prepared: float | None
) -> Allocation:
    name = parse_device_name(result.device)
    gpu = gpus.get(name.minor) if name is not None else None
    gpu_uuid = gpu.uuid if gpu is not None else ""
    uuid, profile, instance = gpu_uuid, "", None
    if isinstance(name, MigName):
        uuid, profile, instance = _partition(record, name, gpu)
    memory = next(
        (given for key, given in result.consumed_capacity.items() if key.rpartition("/")[2] == "memory"), None
    )
    return Allocation(
        ref=record.ref,
        request=result.request_name,
        device=result.device,
        share=result.share_id or "",
        admin=result.admin_access,
        consumers=record.consumers,
        uuid=uuid,
        gpu_uuid=gpu_uuid,
        profile=profile,
        gpu_instance=instance,
        sole=sole and not result.admin_access,
        memory_bytes=None if memory is None else int(memory.value),
        prepared=prepared,
    )


def _partition(record: Record, name: MigName, gpu: Gpu | None) -> tuple[str, str, int | None]:
    """Give a MIG device's UUID, profile and GPU instance: as it was made for the claim, else as it was seen."""
    profile = next(
        (each.name for each in (gpu.mig_profiles if gpu else ()) if each.profile_id == name.profile_id), ""
    )
    for entry in record.journal:
        if entry.kind == DEVICE_KIND and entry.args.get("device") == str(name) and entry.outcome.get("uuid"):
            made = entry.outcome.get("gi")
            return str(entry.outcome["uuid"]), profile or name.profile, None if made is None else int(made)
    seen = look_in(gpu, name).partition if gpu is not None else None
    if seen is None:
        return "", profile or name.profile, None
    return seen.uuid, profile or name.profile, seen.gpu_instance
