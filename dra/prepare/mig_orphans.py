"""Partitions of ours that nobody wants any more: their claim's record was lost, and the claim is gone.

What is ours says its mark (`dra.prepare.mig_marks`). What a record tells of is that record's business; a claim that is
allocated a partition gets it back with its next prepare, since it is still ours.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dra.errors import DraError
from dra.prepare.holds import lock_name
from dra.prepare.mig_effects import CreateMig, MigMode
from dra.prepare.partitions import DEVICE_KIND, MODE_KIND, MigControl
from dra.telemetry.log import error_fields, get_logger

if TYPE_CHECKING:
    from dra.inventory.model import Inventory
    from dra.prepare.mig_marks import Mark
    from dra.prepare.node_state import NodeState

log = get_logger()


def find_orphans(state: NodeState) -> tuple[dict[str, Mark], frozenset[str]]:
    """Give the partitions by device name, and the GPUs whose MIG mode is ours for no partition any more.

    While a claim's record is lost or cannot be read, its devices are not orphans: it is rebuilt or released first.
    """
    marks = state.marks.read()
    if not marks.partitions and not marks.modes:
        return {}, frozenset()
    state.store.refresh()
    boot_id = state.settings.boot_id
    entries = [entry for record in state.store.records() if record.holds(boot_id) for entry in record.journal]
    told = {
        (entry.args.get("device"), entry.args.get("gpu")) for entry in entries if entry.kind == DEVICE_KIND
    }
    held = {hold.device for hold in state.store.holds(boot_id)}
    orphans = {
        name: mark
        for name, mark in marks.partitions.items()
        if (name, mark.gpu_uuid) not in told and name not in held
    }
    busy = {entry.args.get("gpu") for entry in entries if entry.kind in (MODE_KIND, DEVICE_KIND)}
    busy |= {mark.gpu_uuid for mark in marks.partitions.values()}
    return orphans, marks.modes - busy


def release_partitions(
    state: NodeState,
    control: MigControl,
    inventory: Inventory,
    claimed: Collection[str],
    *,
    wait_seconds: float,
) -> list[str]:
    """Destroy the orphans that no claim is allocated, then switch the modes off that were ours; give their names.

    What cannot be done now (a process uses it) is left for the next time.
    """
    done: list[str] = []
    for name, mark in find_orphans(state)[0].items():
        if name in claimed:
            continue
        try:
            with state.locked_devices([lock_name(name)], wait_seconds):
                if name not in find_orphans(state)[0]:
                    continue
                made = mark.partition
                outcome = {"gi": made.gpu_instance, "ci": made.compute_instance, "uuid": made.uuid}
                CreateMig(control, name, mark.gpu_uuid, outcome=outcome, marks=state.marks).undo()
        except DraError as error:
            log.warning("orphan_partition_not_destroyed", **{"device": name, **error_fields(error)})
            continue
        log.warning("orphan_partition_destroyed", device=name, gpu=mark.gpu_uuid, uuid=made.uuid)
        done.append(name)
    _leave_modes(state, control, inventory, wait_seconds)
    return done


def _leave_modes(state: NodeState, control: MigControl, inventory: Inventory, wait_seconds: float) -> None:
    minors = {gpu.uuid: gpu.minor for gpu in inventory.gpus}
    for gpu_uuid in find_orphans(state)[1]:
        if gpu_uuid not in minors:
            continue
        try:
            with state.locked_devices([f"gpu-{minors[gpu_uuid]}"], wait_seconds):
                if gpu_uuid in find_orphans(state)[1]:
                    MigMode(control, gpu_uuid, marks=state.marks).undo()
        except DraError as error:
            log.warning("mig_mode_not_left", **{"gpu": gpu_uuid, **error_fields(error)})
