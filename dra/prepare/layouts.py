"""A GPU's static MIG layout, made to order: its own small journal beside the claims' records.

One file a GPU, `<state dir>/layouts/<uuid>.json`, is written before the first partition is touched and says what was
there and what is wanted. A process that dies in between leaves it to the next one, which goes on from what it finds.
The caller has seen to it that no claim has the GPU; that is looked at once more under the GPU's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dra.errors import DeviceError
from dra.host.files import ensure_dir, read_bytes, remove_durable, write_durable
from dra.inventory.mig_layout import Place
from dra.inventory.model import Gpu, MigDevice
from dra.inventory.names import GpuName
from dra.prepare.holds import Hold, lock_name
from dra.prepare.locks import LockDirectory
from dra.prepare.partitions import RESET_ARCHITECTURES, MigControl, Partition
from dra.telemetry.log import get_logger

log = get_logger()

BUSY = "DRA-LAYOUT-BUSY"
NEEDS_RESET = "DRA-MIG-MODE-NEEDS-RESET"
_VERSION = 1
_LOCK_WAIT_SECONDS = 5.0

# Profile id and first memory slice.
Spot = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """What is known of one GPU's layout.

    Args:
        before: what stood there when the change began; what of it is not wanted is destroyed.
        wanted: what is to stand there.
        mode_ours: MIG mode was off before the first layout; it is switched off after the last.
        done: the GPU is as wanted.
    """

    gpu_uuid: str
    boot_id: str
    before: tuple[Spot, ...]
    wanted: tuple[Spot, ...]
    mode_ours: bool
    done: bool = False

    def to_json(self) -> bytes:
        """Give the file's content."""
        return json.dumps(
            {
                "version": _VERSION, "gpu": self.gpu_uuid, "bootID": self.boot_id, "before": self.before,
                "wanted": self.wanted, "modeOurs": self.mode_ours, "done": self.done,
            }
        ).encode()  # fmt: skip

    @classmethod
    def from_json(cls, data: bytes) -> LayoutRecord | None:
        """Read a file; None if it cannot be used: then what is on the GPU is taken as somebody's own."""
        try:
            body: dict[str, Any] = json.loads(data)
            return cls(
                gpu_uuid=str(body["gpu"]),
                boot_id=str(body["bootID"]),
                before=tuple((int(a), int(b)) for a, b in body["before"]),
                wanted=tuple((int(a), int(b)) for a, b in body["wanted"]),
                mode_ours=bool(body["modeOurs"]),
                done=bool(body["done"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


class LayoutChanger:
    """Makes and unmakes layouts. Thread-safe; one change of a GPU at a time.

    Args:
        control: the hardware.
        locks: the locks of the claims' GPUs: no claim is prepared meanwhile.
        directory: where the records are.
        holds: what the claims of this node hold.
        step: hears the name of each step that is done, for tests that end the process there.
    """

    def __init__(
        self,
        control: MigControl,
        *,
        locks: LockDirectory,
        directory: Path,
        boot_id: str,
        holds: Callable[[], Iterable[Hold]],
        step: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._control, self._locks, self._directory, self._boot_id = control, locks, directory, boot_id
        self._holds, self._step = holds, step

    def record(self, gpu_uuid: str) -> LayoutRecord | None:
        """Give the record of a GPU; None if it has no layout of ours."""
        data = read_bytes(self._path(gpu_uuid))
        return None if data is None else LayoutRecord.from_json(data)

    def change(self, gpu: Gpu, places: Sequence[Place]) -> None:
        """Make a GPU's partitions exactly these; none: also give its MIG mode back, if it was off before.

        Args:
            gpu: as it was just seen.
            places: without overlaps.

        Raises:
            DeviceError: DRA-LAYOUT-BUSY: a claim has the GPU; DRA-MIG-MODE-NEEDS-RESET; those of `MigControl`. What
                was done by then stays, and a further call goes on with it.
            HostError: the disk refuses.
        """
        check_mode(gpu, places)
        wanted = tuple((profile.profile_id, start) for profile, start, _ in places)
        with self._locks.hold(
            [lock_name(str(GpuName(gpu.minor)))], what="layout change", wait_seconds=_LOCK_WAIT_SECONDS
        ):
            if any(_spot(mig) not in wanted for mig in gpu.mig_devices) or not gpu.mig_enabled:
                # Completing what a reboot took is in nobody's way.
                self._refuse_if_held(gpu)
            record = self._begin(gpu, wanted)
            self._step("layout:written")
            self._destroy(gpu, record)
            there = {_spot(mig) for mig in gpu.mig_devices}
            for spot in wanted:
                if spot not in there:
                    self._control.create(gpu.uuid, profile_id=spot[0], start=spot[1])
                    self._step("layout:created")
            self._finish(gpu, record)

    def _begin(self, gpu: Gpu, wanted: tuple[Spot, ...]) -> LayoutRecord:
        old = self.record(gpu.uuid)
        there = tuple(_spot(mig) for mig in gpu.mig_devices)
        # What an attempt that was cut short had wanted may lie there half-made.
        before = dict.fromkeys((*there, *(() if old is None else (*old.before, *old.wanted))))
        record = LayoutRecord(
            gpu.uuid,
            self._boot_id,
            before=tuple(before),
            wanted=wanted,
            mode_ours=old.mode_ours if old is not None else not gpu.mig_enabled,
        )
        ensure_dir(self._directory, mode=0o700)
        write_durable(self._path(gpu.uuid), record.to_json(), mode=0o600)
        return record

    def _destroy(self, gpu: Gpu, record: LayoutRecord) -> None:
        there = {_spot(mig): mig for mig in gpu.mig_devices}
        for spot in record.before:
            if spot in record.wanted:
                continue
            profile_id, start = spot
            mig = there.get(spot)
            if mig is not None:
                part = Partition(mig.gpu_instance_id, mig.compute_instance_id, mig.uuid)
                self._control.destroy(gpu.uuid, part, profile_id=profile_id, start=start)
                self._step("layout:destroyed")
            elif gpu.mig_enabled:
                self._control.clear_half_made(gpu.uuid, profile_id=profile_id, start=start)

    def _finish(self, gpu: Gpu, record: LayoutRecord) -> None:
        if record.wanted:
            done = replace(record, before=record.wanted, done=True)
            write_durable(self._path(gpu.uuid), done.to_json(), mode=0o600)
        else:
            if record.mode_ours:
                self._control.leave_mode(gpu.uuid)
                self._step("layout:mode-left")
            remove_durable(self._path(gpu.uuid))
        self._step("layout:done")
        log.info(
            "layout_changed", gpu=gpu.uuid, device=str(GpuName(gpu.minor)), partitions=len(record.wanted)
        )

    def _refuse_if_held(self, gpu: Gpu) -> None:
        mine = lock_name(str(GpuName(gpu.minor)))
        for hold in self._holds():
            if lock_name(hold.device) == mine:
                raise DeviceError(
                    BUSY,
                    f"the layout of {GpuName(gpu.minor)} cannot be changed while {hold.holder} has {hold.device}",
                    remedy="It is done when that claim is unprepared.",
                    retryable=True,
                )

    def _path(self, gpu_uuid: str) -> Path:
        return self._directory / f"{''.join(c for c in gpu_uuid if c.isalnum() or c == '-')}.json"


def check_mode(gpu: Gpu, places: Sequence[Place]) -> None:
    """See whether a GPU can be in the MIG mode that a layout needs, before anything is touched.

    Raises:
        DeviceError: DRA-MIG-MODE-NEEDS-RESET.
    """
    if places and not gpu.mig_enabled and gpu.architecture in RESET_ARCHITECTURES:
        raise DeviceError(
            NEEDS_RESET,
            f"{GpuName(gpu.minor)} ({gpu.product_name}) is not in MIG mode, which an {gpu.architecture} GPU enters "
            "only by a reset",
            remedy=f"Drain the node, run `nvidia-smi -i {gpu.pci_address} -mig 1`, and reset the GPU or reboot.",
        )


def matches(gpu: Gpu, places: Iterable[Place]) -> bool:
    """Whether a GPU has exactly these partitions."""
    return {_spot(mig) for mig in gpu.mig_devices} == {
        (profile.profile_id, start) for profile, start, _ in places
    }


def is_rest_of(gpu: Gpu, record: LayoutRecord | None) -> bool:
    """Whether what a GPU has is what a reboot left of a layout: nothing that is not in it. It is then only completed."""
    if record is None or not record.done:
        return False
    return {_spot(mig) for mig in gpu.mig_devices} <= set(record.wanted)


def _spot(mig: MigDevice) -> Spot:
    return mig.profile.profile_id, mig.start
