"""Functions that this driver bound to vfio and that nobody wants any more: the claim's record was lost, and it is gone.

What is ours says its mark. What a record tells of is that record's business; a claim that is allocated the function finds
it bound with its next prepare, and its mark says how it was before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from dra.errors import DraError
from dra.prepare.holds import lock_name
from dra.prepare.passthrough.effect import BindVfio
from dra.prepare.passthrough.model import KIND, PassthroughNode, Patience
from dra.telemetry.log import error_fields, get_logger

if TYPE_CHECKING:
    from dra.prepare.node_state import NodeState
    from dra.prepare.passthrough.marks import PassthroughMark

log = get_logger()


def find_orphan_functions(state: NodeState) -> Mapping[str, PassthroughMark]:
    """Give the functions by device name. While a claim's record is lost or cannot be read, its devices are no orphans."""
    marks = state.passthrough_marks.read()
    if not marks:
        return {}
    state.store.refresh()
    boot_id = state.settings.boot_id
    told = {
        entry.args.get("device")
        for record in state.store.records()
        if record.holds(boot_id)
        for entry in record.journal
        if entry.kind == KIND
    }
    held = {hold.device for hold in state.store.holds(boot_id)}
    return {name: mark for name, mark in marks.items() if name not in told and name not in held}


def release_functions(
    state: NodeState, node: PassthroughNode, claimed: Collection[str], *, wait_seconds: float
) -> list[str]:
    """Give back the orphans that no claim is allocated; give their names. One that is in use waits for the next time."""
    done: list[str] = []
    for name, mark in find_orphan_functions(state).items():
        function = node.function(mark.address)
        # One without a driver is in no inventory, so that even the claim that is allocated it cannot be prepared.
        if (name in claimed and function.driver) or mark.may_still_go(function):
            continue
        locks = [name, *([lock_name(mark.before.gpu)] if mark.before.gpu else [])]
        try:
            with state.locked_devices(locks, wait_seconds):
                if name not in find_orphan_functions(state):
                    continue
                BindVfio(
                    node, name, mark.address,
                    before=mark.before, marks=state.passthrough_marks, patience=Patience(0.0),
                ).undo()  # fmt: skip
        except DraError as error:
            log.warning("orphan_gpu_not_given_back", **{"device": name, **error_fields(error)})
            continue
        log.warning("orphan_gpu_given_back", device=name, pci=str(mark.address), driver=mark.before.driver)
        done.append(name)
    return done
