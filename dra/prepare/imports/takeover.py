"""Taking over a node from NVIDIA's driver: its checkpoint becomes our records, and is then retired.

Order, so that a kill at any instruction loses nothing: all records first, each whole; then the checkpoint is renamed to
`checkpoint.json.imported-<n>` in one step. Until that, the next start does it again and leaves alone what is there. It
happens before anything is served, under the lock that NVIDIA's plugin takes alone for each prepare.

Containers go on undisturbed: CDI files, the hook beside the checkpoint and MPS daemons stay as they are until the claim
is unprepared, or prepared again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.api.claim import AllocatedDevice, ClaimRef, ClaimView, parse_claim
from dra.api.config import decode_configs, effective_config
from dra.errors import DraError, HostError, RecordError, ValueFormatError
from dra.host.files import read_bytes
from dra.inventory.names import parse_vfio_name
from dra.prepare.cdi_files import CdiFiles
from dra.prepare.imports.checkpoint import (
    Checkpoint,
    CheckpointClaim,
    CheckpointDevice,
    DeviceGroup,
    parse_checkpoint,
)
from dra.prepare.imports.foreign_mps import ForeignMps
from dra.prepare.imports.names import CHECKPOINT, ORIGIN
from dra.prepare.imports.retired import put_by
from dra.prepare.locks import LOCK_WAIT_SECONDS, lock_file
from dra.prepare.model import PreparedDevice, is_safe_uid
from dra.prepare.partitions import DEVICE_KIND, MODE_KIND, device_args
from dra.prepare.passthrough.model import KIND as VFIO_KIND
from dra.prepare.passthrough.model import NVIDIA, Before
from dra.prepare.record import EntryState, JournalEntry, Record
from dra.prepare.setup import EngineSettings
from dra.prepare.store import RecordStore
from dra.telemetry.log import error_fields, get_logger
from dra.values import PciAddress

TAKEN = "imported"
SET_ASIDE = "corrupt"


@dataclass(frozen=True, slots=True)
class Takeover:
    """What an import needs.

    `knows` says whether an effect of a kind can be undone here, `gpus` gives the addresses of all GPUs on the bus.
    """

    settings: EngineSettings
    store: RecordStore
    cdi: CdiFiles
    knows: Callable[[str], bool]
    step: Callable[[str], None]
    gpus: Callable[[], Sequence[PciAddress]] = tuple

    @property
    def path(self) -> Path:
        """Where NVIDIA's driver keeps its checkpoint."""
        return self.settings.state_dir / CHECKPOINT

    def run(self) -> int:
        """Import what is there; give how many claims were taken over. Nothing is done where there is no checkpoint.

        A checkpoint that cannot be read is set aside: the janitor rebuilds its claims from their CDI files and the API.

        Raises:
            HostError: the disk refuses, or NVIDIA's plugin holds its lock: nothing is lost, call again.
        """
        give_up = time.monotonic() + LOCK_WAIT_SECONDS
        lock = lock_file(
            self.settings.state_dir / "pu.lock",
            exclusive=True, give_up_at=give_up, monotonic=time.monotonic, what="the import of NVIDIA's checkpoint",
        )  # fmt: skip
        try:
            return self._import()
        finally:
            os.close(lock)

    def _import(self) -> int:
        log = get_logger()
        data = read_bytes(self.path)
        if data is None:
            return 0
        try:
            checkpoint = parse_checkpoint(data)
        except RecordError as error:
            target = put_by(self.path, SET_ASIDE, action="retire")
            log.error("checkpoint_set_aside", path=str(target), **error_fields(error))  # noqa: TRY400 - for people
            return 0
        taken = 0
        for claim in checkpoint.claims:
            taken += self._take(claim, checkpoint)
            self.step(f"import:record-written:{claim.uid}")
        self.step("import:records-written")
        target = put_by(self.path, TAKEN, action="retire")
        self.step("import:retired")
        log.info(
            "checkpoint_imported",
            claims=taken,
            of=len(checkpoint.claims),
            path=str(target),
            form=f"v{checkpoint.version}",
        )
        return taken

    def _take(self, claim: CheckpointClaim, checkpoint: Checkpoint) -> bool:
        """Write a claim's record, unless there is one."""
        log = get_logger()
        if not is_safe_uid(claim.uid):
            log.warning("checkpoint_claim_ignored", claim_uid=claim.uid[:140], reason="it is no UID")
            return False
        if self.store.path(claim.uid).exists():
            # An import that was cut short, or a claim that we prepared since.
            return False
        try:
            record = self._record(claim, checkpoint)
        except DraError as error:
            # A status that we cannot read: the claim's devices count as held, and the janitor asks the API.
            log.warning("checkpoint_claim_unclear", claim_uid=claim.uid, **error_fields(error))
            self.store.mark_lost(claim.uid, "its entry in NVIDIA's checkpoint cannot be read")
            return False
        self.store.put(record, fsync=True, fsync_name=True)
        log.info(
            "claim_imported", claim_uid=claim.uid, state=record.state,
            devices=[device.device for device in record.devices], effects=[entry.kind for entry in record.journal],
        )  # fmt: skip
        return True

    def _record(self, claim: CheckpointClaim, checkpoint: Checkpoint) -> Record:
        driver = self.settings.driver
        view = parse_claim(
            {
                "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
                "status": dict(claim.status),
            },
            driver=driver,
        )
        told = [device for group in claim.groups for device in group.devices]
        devices = tuple(_prepared(device) for device in told)
        # Before v0.4 no boot was kept: as NVIDIA's own later releases do, such a claim is taken for one of this boot.
        boot_id = checkpoint.boot_id or self.settings.boot_id
        path = self.cdi.path(claim.uid)
        spec = read_bytes(path)
        return Record(
            ref=ClaimRef(claim.namespace, claim.name, claim.uid),
            state="prepared" if claim.completed else "preparing",
            boot_id=boot_id,
            results=view.results or tuple(_result(device, driver) for device in told),
            configs=view.configs,
            consumers=view.reserved_for,
            journal=(*self._effects(claim, view), JournalEntry("cdi-file", {"file": str(path)})),
            devices=devices,
            cdi_file=str(path),
            cdi_sha256="" if spec is None else hashlib.sha256(spec).hexdigest(),
            extra={ORIGIN: {"driver": "nvidia", "form": checkpoint.version}},
        )

    # -- what unprepare has to undo --------------------------------------------------------------------------

    def _effects(self, claim: CheckpointClaim, view: ClaimView) -> list[JournalEntry]:
        entries: dict[str, JournalEntry] = {}
        for group in claim.groups:
            for entry in (*self._partitions(group), *self._sharing(group, view)):
                entries.setdefault(entry.key, entry)
        return [*self._functions(claim, view), *entries.values()]

    def _functions(self, claim: CheckpointClaim, view: ClaimView) -> list[JournalEntry]:
        """Give the functions that NVIDIA's driver passed through, or had begun to.

        What they were before it does not say: like it we bind them to nvidia again, and switch persistence mode on.
        """
        if not self.knows(VFIO_KIND):
            return []
        told = {device.device: device for group in claim.groups for device in group.devices}
        wanted = [result.device for result in view.results if not result.admin_access] or list(told)
        found = []
        for device in dict.fromkeys(wanted):
            name = parse_vfio_name(device)
            if name is None:
                continue
            try:
                # Before v0.4, and of a claim that was under way, there is no address.
                place = told[device].pci_bus_id if device in told else ""
                address = PciAddress.parse(place) if place else self.gpus()[name.index]
            except (ValueFormatError, IndexError):
                get_logger().warning("checkpoint_device_unclear", claim_uid=claim.uid, device=device)
                continue
            state: EntryState = "applied" if claim.completed else "pending"
            before = Before(NVIDIA, persistence=True)
            found.append(
                JournalEntry(VFIO_KIND, {"device": device, "pci": str(address)}, state, before.outcome)
            )
        return found

    def _partitions(self, group: DeviceGroup) -> list[JournalEntry]:
        """Give the partitions that NVIDIA's driver made: all of its MIG devices if it had its gate DynamicMIG on.

        Its checkpoint does not tell; by default they are an administrator's, and stay.
        """
        if not (self.settings.imported_partitions_are_ours and self.knows(DEVICE_KIND)):
            return []
        found = []
        for device in group.devices:
            if device.kind != "mig" or device.instances is None or not device.parent_uuid:
                continue
            outcome = {"gi": device.instances[0], "ci": device.instances[1], "uuid": device.uuid}
            found += [
                JournalEntry(MODE_KIND, {"gpu": device.parent_uuid}, "applied"),
                JournalEntry(DEVICE_KIND, device_args(device.device, device.parent_uuid), "applied", outcome),
            ]
        return found

    def _sharing(self, group: DeviceGroup, view: ClaimView) -> list[JournalEntry]:
        gpus = [device.uuid for device in group.devices if device.kind == "gpu" and device.uuid]
        found = []
        if group.time_slice_applied and self.knows("time-slice"):
            interval = _interval(group, view)
            found += [
                JournalEntry("time-slice", {"gpu": gpu, "interval": interval}, "applied") for gpu in gpus
            ]
        if group.mps_daemon:
            if self.knows("compute-mode"):
                mode = {"mode": "EXCLUSIVE_PROCESS"}
                found += [
                    JournalEntry("compute-mode", {"gpu": gpu, **mode}, "applied", {"before": "DEFAULT"})
                    for gpu in gpus
                ]
            found.append(JournalEntry(ForeignMps.kind, {"id": group.mps_daemon}, "applied"))
        return found


def _prepared(device: CheckpointDevice) -> PreparedDevice:
    bases = tuple(dict.fromkeys(request.partition("/")[0] for request in device.requests))
    return PreparedDevice(bases, device.pool, device.device, device.cdi_ids, device.share_id)


def _result(device: CheckpointDevice, driver: str) -> AllocatedDevice:
    request = device.requests[0] if device.requests else ""
    return AllocatedDevice(request, driver, device.pool, device.device, share_id=device.share_id)


def _interval(group: DeviceGroup, view: ClaimView) -> str:
    """Give the time-slice that the claim asked for; what is undone does not depend on it."""
    names = {device.device for device in group.devices}
    try:
        result = next(result for result in view.results if result.device in names)
        config = effective_config(result, decode_configs(view.configs), device_type="gpu")
        sharing: Any = getattr(config.parameters, "sharing", None) if config is not None else None
        return str(sharing.timeSlicingConfig.interval)
    except (DraError, StopIteration, AttributeError):
        return "Default"


def stands(record: Record, path: Path) -> bool:
    """Whether an imported claim is still as NVIDIA's driver prepared it, and must stay so while it is in use.

    That is so with MPS: its daemon serves running containers, and a new one would take their GPU from them.
    """
    if all(entry.kind != ForeignMps.kind for entry in record.journal):
        return False
    try:
        spec = read_bytes(path)
    except HostError:
        return False
    return spec is not None and hashlib.sha256(spec).hexdigest() == record.cdi_sha256
