"""Looking at a claim's MIG devices before it is planned: the hardware, the records, the marks."""

from __future__ import annotations

from dra.api.claim import ClaimView
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName
from dra.prepare.devices import NO_MIG, MigView, is_mig
from dra.prepare.holds import lock_name
from dra.prepare.node_state import NodeState
from dra.prepare.partitions import looks_at
from dra.prepare.setup import EnginePorts
from dra.slices.sharing import identity_of


def look_at_partitions(
    view: ClaimView, inventory: Inventory, *, state: NodeState, ports: EnginePorts
) -> MigView:
    """Give what planning must know of the claim's MIG devices. Costs nothing for a claim of whole GPUs.

    Raises:
        DraError: a GPU does not answer, or the records cannot be read.
    """
    devices = [result.device for result in view.results if is_mig(result)]
    if not devices:
        return NO_MIG
    boot_id = state.settings.boot_id
    state.store.refresh()
    minors = {lock_name(device) for device in devices}
    gpus = [gpu.uuid for gpu in inventory.gpus if f"gpu-{gpu.minor}" in minors]
    return MigView(
        control=ports.mig,
        may_create=state.settings.create_partitions or _any_dynamic(view, inventory, ports),
        looks=looks_at(devices, inventory, ports.mig),
        journal=tuple(
            entry for record in state.store.records() if record.holds(boot_id) for entry in record.journal
        ),
        marks=state.marks.read_of(devices, gpus),
        directory=state.marks,
    )


def _any_dynamic(view: ClaimView, inventory: Inventory, ports: EnginePorts) -> bool:
    """Whether a policy says of one of the claim's GPUs that its partitions are made on demand."""
    locks = {lock_name(result.device) for result in view.results}
    settings = ports.settings()
    return any(
        settings.of(identity_of(gpu)).mig.mode == "dynamic"
        for gpu in inventory.gpus
        if lock_name(str(GpuName(gpu.minor))) in locks
    )
