"""Looking at a claim's functions before it is planned: the bus, the claim's own record, the marks."""

from __future__ import annotations

from dra.api.claim import ClaimView
from dra.inventory.model import Inventory, VfioFunction
from dra.inventory.names import GpuName
from dra.prepare.node_state import NodeState
from dra.prepare.passthrough.model import KIND, NVIDIA, Before, PassthroughNode, function_of, is_passthrough
from dra.prepare.passthrough.view import NO_PASSTHROUGH, PassthroughView
from dra.prepare.record import Record
from dra.prepare.setup import EnginePorts


def look_at_functions(
    view: ClaimView, inventory: Inventory, previous: Record | None, *, state: NodeState, ports: EnginePorts
) -> PassthroughView:
    """Give what planning must know of the claim's functions. Costs nothing for a claim of GPUs and partitions.

    How a function was before is what the claim's record says, else a mark that outlived it; else how it is now.
    """
    wanted = [result for result in view.results if is_passthrough(result) and not result.admin_access]
    node = ports.passthrough
    if not wanted or node is None:
        return NO_PASSTHROUGH
    known = {} if previous is None or not previous.holds(state.settings.boot_id) else _told(previous)
    marks = state.passthrough_marks.read([result.device for result in wanted])
    before = known | {name: mark.before for name, mark in marks.items() if name not in known}
    for result in wanted:
        function = function_of(result.device, inventory)
        if result.device not in before and function is not None:
            before[result.device] = _now(function, inventory, node)
    return PassthroughView(node, before, state.passthrough_marks, ports.patience)


def is_outdated(view: ClaimView, inventory: Inventory, node: PassthroughNode | None) -> bool:
    """Whether one of the claim's functions changed its driver since the inventory was looked at.

    Then the inventory does not say which GPU it is, nor what is to be given back. Costs a link for each function.
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


def _told(record: Record) -> dict[str, Before]:
    return {
        str(entry.args.get("device")): Before.of(entry.outcome)
        for entry in record.journal
        if entry.kind == KIND
    }


def _now(function: VfioFunction, inventory: Inventory, node: PassthroughNode) -> Before:
    gpu = next((each for each in inventory.gpus if each.pci_address == function.pci_address), None)
    return Before(
        # As it is at this moment: the inventory may be a look old.
        node.function(function.pci_address).driver,
        "" if gpu is None else str(GpuName(gpu.minor)),
        gpu is not None and gpu.persistence,
    )
