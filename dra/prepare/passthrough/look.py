"""Looking at a claim's functions before it is planned: the bus, the claim's own record, the marks."""

from __future__ import annotations

from dra.api.claim import ClaimView
from dra.inventory.model import Inventory, VfioFunction
from dra.inventory.names import GpuName
from dra.prepare.node_state import NodeState
from dra.prepare.passthrough import errors
from dra.prepare.passthrough.marks import PassthroughMark, mark_of
from dra.prepare.passthrough.model import KIND, NVIDIA, Before, PassthroughNode, function_of, is_passthrough
from dra.prepare.passthrough.view import NO_PASSTHROUGH, PassthroughView
from dra.prepare.record import Record
from dra.prepare.setup import EnginePorts


def look_at_functions(
    view: ClaimView, inventory: Inventory, previous: Record | None, *, state: NodeState, ports: EnginePorts
) -> PassthroughView:
    """Give what planning must know of the claim's functions. Costs nothing for a claim of GPUs and partitions.

    How a function was before is what the claim's record says, else a mark that outlived it; else how it is now.

    Raises:
        DeviceError: DRA-VFIO-MOVED: the name stands for another function than the one that the claim got.
    """
    wanted = [result for result in view.results if is_passthrough(result) and not result.admin_access]
    node = ports.passthrough
    if not wanted or node is None:
        return NO_PASSTHROUGH
    told = {} if previous is None or not previous.holds(state.settings.boot_id) else _told(previous)
    known = {**state.passthrough_marks.read([result.device for result in wanted]), **told}
    before: dict[str, Before] = {}
    for result in wanted:
        function = function_of(result.device, inventory)
        if function is None:
            continue
        mark = known.get(result.device)
        if mark is not None and mark.address == function.pci_address:
            before[result.device] = mark.before
            continue
        if result.device in told and previous is not None and previous.is_complete(state.settings.boot_id):
            raise errors.moved(result.device, told[result.device].address, function.pci_address)
        before[result.device] = _now(function, inventory, node)
    return PassthroughView(node, before, state.passthrough_marks, ports.patience)


def is_outdated(view: ClaimView, inventory: Inventory, node: PassthroughNode | None) -> bool:
    """Whether one of the claim's functions changed its driver since the inventory was looked at.

    Then the inventory does not say which GPU it is, nor what is to be given back. Costs a look at each function.
    """
    if node is None:
        return False
    for result in view.results:
        function = None if result.admin_access else function_of(result.device, inventory)
        if function is not None:
            driver = node.function(function.pci_address).driver
            if driver != function.driver or (driver == NVIDIA and function.gpu_minor is None):
                return True
    return False


def _told(record: Record) -> dict[str, PassthroughMark]:
    marks = [mark_of(entry.args, entry.outcome) for entry in record.journal if entry.kind == KIND]
    return {mark.device: mark for mark in marks}


def _now(function: VfioFunction, inventory: Inventory, node: PassthroughNode) -> Before:
    gpu = next((each for each in inventory.gpus if each.pci_address == function.pci_address), None)
    return Before(
        # As it is at this moment: the inventory may be a look old.
        node.function(function.pci_address).driver,
        "" if gpu is None else str(GpuName(gpu.minor)),
        gpu is not None and gpu.persistence,
    )
