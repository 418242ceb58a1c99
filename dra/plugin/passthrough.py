"""What the daemon does more where GPUs may be passed through to virtual machines. Loaded only there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager

from dra.errors import DraError
from dra.host.pci_binding import NVIDIA, PciBus
from dra.inventory.diff import InventoryDiff
from dra.inventory.model import Inventory
from dra.inventory.names import VfioName
from dra.values import PciAddress

Measure = Callable[[str], AbstractContextManager[list[DraError]]]


class PassedThrough:
    """Knows which GPUs are away with a virtual machine, or on their way there: those are not ill.

    Args:
        bus: the node's PCI bus.
        in_use: names of the devices that claims hold.
    """

    def __init__(self, bus: PciBus, in_use: Callable[[], Collection[str]]) -> None:
        self._bus, self._in_use = bus, in_use
        # By UUID; a GPU that is away is in no inventory.
        self._addresses: dict[str, PciAddress] = {}
        self._names: dict[PciAddress, str] = {}

    def inventory_changed(self, inventory: Inventory, _difference: InventoryDiff) -> None:
        """Take where the GPUs are (a subscriber of the live inventory)."""
        self._names = {each.pci_address: str(VfioName(each.index)) for each in inventory.vfio}
        self._addresses |= {gpu.uuid: gpu.pci_address for gpu in inventory.gpus}

    def __contains__(self, gpu_uuid: str) -> bool:
        """Whether a GPU is away, or a claim has it that will take it away. One that the bus has no more is lost."""
        address = self._addresses.get(gpu_uuid)
        if address is None:
            return False
        if self._names.get(address) in self._in_use():
            return True
        return self._bus.driver_of(address) != NVIDIA and self._bus.is_there(address)

    def layout(self) -> object:
        """Give which drivers have the GPUs that can be passed through, and what claims hold; only compared."""
        return [self._bus.driver_of(address) for address in self._names], frozenset(self._in_use())


def telling(measure: Measure, changed: Callable[[], None]) -> Measure:
    """Give what measures a call and then tells that claims may hold other devices."""

    @contextlib.contextmanager
    def call(operation: str) -> Iterator[list[DraError]]:
        try:
            with measure(operation) as errors:
                yield errors
        finally:
            changed()

    return call
