"""What one node keeps of its claims on disk: records, CDI specs, locks, marks of partitions.

Prepare, unprepare and the janitor all work on this, each claim under its locks. A second process may do the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, VfioName
from dra.prepare.cdi_files import CdiFiles
from dra.prepare.devices import is_mig
from dra.prepare.effects import EffectCatalog, Revive, WriteCdi
from dra.prepare.holds import lock_name
from dra.prepare.imports import revive_foreign_mps, take_over
from dra.prepare.imports.names import CHECKPOINT
from dra.prepare.locks import CLAIM_PREFIX, LockDirectory, hold_shared
from dra.prepare.mig_effects import mig_effects
from dra.prepare.mig_marks import MarkDirectory
from dra.prepare.model import Notice
from dra.prepare.passthrough.effect import BindVfio
from dra.prepare.passthrough.marks import PassthroughMarks
from dra.prepare.passthrough.model import KIND as VFIO_KIND
from dra.prepare.passthrough.model import Before, function_of, is_passthrough
from dra.prepare.record import Record
from dra.prepare.setup import (
    MIG_WORK_SECONDS,
    VFIO_WORK_SECONDS,
    WORK_SECONDS,
    EnginePorts,
    EngineSettings,
)
from dra.prepare.store import Damage, RecordStore
from dra.prepare.timing import LOCK


class NodeState:
    """The directories of a node. Thread-safe; what changes a claim is called under its locks (`locked`)."""

    def __init__(self, settings: EngineSettings, ports: EnginePorts) -> None:
        self.settings = settings
        self._ports = ports
        self.cdi = CdiFiles(settings.cdi_root, driver=settings.driver)
        self.store = RecordStore(
            settings.state_dir / "claims", report=self._report_damage, salvage=self.cdi.devices
        )
        self.locks = LockDirectory(settings.state_dir / "locks")
        self.marks = MarkDirectory(settings.state_dir, boot_id=settings.boot_id)
        self.passthrough_marks = PassthroughMarks(settings.state_dir, boot_id=settings.boot_id)
        self.catalog = self._catalog()
        self._opened = False

    def open(self) -> None:
        """Make the directories, read the records, and remove the CDI specs of an earlier boot; done once.

        Raises:
            HostError: the disk refuses; nothing is lost, call again.
        """
        if self._opened:
            return
        self.locks.make()
        self.store.open()
        passthrough = self._ports.passthrough
        take_over(
            self.settings, self.store, self.cdi,
            knows=self.catalog.knows, step=self._ports.step,
            gpus=tuple if passthrough is None else passthrough.gpus,
        )  # fmt: skip
        for record in self.store.records():
            if record.boot_id != self.settings.boot_id:
                # Device numbers may have changed. The kubelet prepares again what still runs here.
                self.cdi.remove(self.cdi.path(record.ref.uid))
        self._opened = True

    def open_if_taking_over(self) -> None:
        """Open if NVIDIA's driver left claims: one that it prepared would pass for an unknown one else."""
        if not self._opened and (self.settings.state_dir / CHECKPOINT).exists():
            self.open()

    def is_known(self, uid: str) -> bool:
        """Whether anything on disk tells of a claim."""
        return (
            uid in self.store.damaged()
            or uid in self.store.unreadable()
            or any(path.exists() for path in (self.store.path(uid), self.cdi.path(uid)))
        )

    @contextlib.contextmanager
    def locked_devices(self, names: Sequence[str], wait_seconds: float) -> Iterator[None]:
        """Hold the locks of devices, of no claim. Raises HostError: DRA-LOCK-TIMEOUT, DRA-HOST-..."""
        what = f"the clean-up of {', '.join(names)}"
        with (
            hold_shared(self.settings.state_dir / "pu.lock", what=what, wait_seconds=wait_seconds),
            self.locks.hold(names, what=what, wait_seconds=wait_seconds),
        ):
            yield

    @contextlib.contextmanager
    def locked(self, ref: ClaimRef, gpus: Sequence[str], verb: str, wait_seconds: float) -> Iterator[None]:
        """Hold the locks of a claim and of GPUs (`gpus_to_lock`) while the block runs.

        Raises:
            HostError: DRA-LOCK-TIMEOUT; DRA-HOST-... where no lock file can be had.
        """
        what = f"the {verb} of claim {ref}"
        began = time.monotonic()
        # NVIDIA's plugin takes this one alone: the two never work at the same time during a change-over.
        with hold_shared(self.settings.state_dir / "pu.lock", what=what, wait_seconds=wait_seconds):
            left = max(0.0, wait_seconds - (time.monotonic() - began))
            with self.locks.hold([f"{CLAIM_PREFIX}{ref.uid}", *gpus], what=what, wait_seconds=left):
                if verb == "prepare":
                    self._ports.timing(LOCK, time.monotonic() - began)
                yield

    def lock_wait(self, results: Sequence[AllocatedDevice], give_up_at: float | None = None) -> float:
        """Give for how many seconds a claim waits for its locks: there must be time left to make what it needs.

        Args:
            results: its devices.
            give_up_at: when the caller stops listening, by `time.monotonic`; None: never.
        """
        wait, work = self.settings.lock_wait_seconds, WORK_SECONDS
        left = float("inf") if give_up_at is None else give_up_at - time.monotonic()
        if any(is_mig(result) for result in results):
            wait, work = max(wait, self.settings.mig_lock_wait_seconds), MIG_WORK_SECONDS
        elif any(is_passthrough(result) for result in results):
            # Mostly it takes a second or two, and who comes too late finds it done with the next call.
            work = min(VFIO_WORK_SECONDS, left / 2)
        return max(0.0, min(wait, left - work))

    def _catalog(self) -> EffectCatalog:
        ports = self._ports
        return EffectCatalog(
            {
                WriteCdi.kind: lambda args: WriteCdi.revive(args, files=self.cdi),
                **({} if ports.mig is None else mig_effects(ports.mig, self.marks)),
                **self._passthrough_effects(),
                "nvidia-mps": lambda args: revive_foreign_mps(
                    args, self.settings.state_dir, ports.delete_deployment
                ),
                **ports.effects,
                **({} if ports.metadata is None else ports.metadata.effects()),
            }
        )

    def _passthrough_effects(self) -> dict[str, Revive]:
        node, marks, patience = self._ports.passthrough, self.passthrough_marks, self._ports.patience
        if node is None:
            return {}
        return {BindVfio.kind: lambda args: BindVfio.revive(args, node=node, marks=marks, patience=patience)}

    def _report_damage(self, damage: Damage) -> None:
        self._ports.notify(
            Notice(
                damage.ref if damage.ref.name else None,
                "ClaimRecordLost",
                f"the record of claim UID {damage.ref.uid} was lost ({damage.reason}); "
                "it is rebuilt, until then its devices count as held",
            )
        )


def gpus_to_lock(results: Sequence[AllocatedDevice], inventory: Inventory) -> list[str]:
    """Give the names of the locks of the GPUs that a claim takes; access for monitoring takes none.

    A function that is passed through has its own, that of the GPU that it is with NVIDIA's driver, and those of the other
    functions of its IOMMU group, of which two claims must not take one each.
    """
    names = _own_locks(results)
    for result in results:
        function = None if result.admin_access else function_of(result.device, inventory)
        if function is None:
            continue
        if function.gpu_minor is not None:
            names.append(lock_name(str(GpuName(function.gpu_minor))))
        group = [each for each in inventory.vfio if each.iommu_group == function.iommu_group]
        names += [lock_name(str(VfioName(each.index))) for each in group if each != function]
    return names


def gpus_of(record: Record | None) -> list[str]:
    """Give the names of the locks of the GPUs that a record's claim has."""
    if record is None:
        return []
    was = [Before.of(entry.outcome).gpu for entry in record.journal if entry.kind == VFIO_KIND]
    return [*_own_locks(record.results), *(lock_name(gpu) for gpu in was if gpu)]


def _own_locks(results: Sequence[AllocatedDevice]) -> list[str]:
    return [lock_name(result.device) for result in results if not result.admin_access]
