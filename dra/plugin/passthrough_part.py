"""What GPUs that are passed through add to the daemon; each is the plain thing where none may be.

Nothing of it is loaded by the many daemons that never pass a GPU through.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dra.inventory.model import Inventory
from dra.plugin.machine import Machine
from dra.plugin.settings import PluginSettings, offers_passthrough

if TYPE_CHECKING:
    from dra.errors import DraError
    from dra.host.pci_binding import PciBus
    from dra.plugin.passthrough import PassedThrough

Measure = Callable[[str], "AbstractContextManager[list[DraError]]"]


def pci_bus_of(settings: PluginSettings, machine: Machine) -> PciBus | None:
    """Give the way to bind PCI functions, where GPUs may be passed through."""
    if not offers_passthrough(settings.gates):
        return None
    from dra.host.pci_binding import PciBus

    return PciBus(machine.paths, machine.kernel)


def passed_through(pci: PciBus | None, devices_in_use: Callable[[], set[str]]) -> PassedThrough | None:
    """Give what knows which GPUs are passed through."""
    if pci is None:
        return None
    from dra.plugin.passthrough import PassedThrough

    return PassedThrough(pci, devices_in_use)


def scan_of(
    scan: Callable[[], Inventory],
    pci: PciBus | None,
    machine: Machine,
    devices_in_use: Callable[[], set[str]],
) -> Callable[[], Inventory]:
    """Give the look at the hardware, with the functions that can be passed through."""
    if pci is None:
        return scan
    from dra.inventory.passthrough import scan_with_passthrough

    return scan_with_passthrough(scan, pci, machine.paths, in_use=devices_in_use)


def measure_of(measure: Measure, pci: PciBus | None, holds_changed: Callable[[], None]) -> Measure:
    """Give what runs around each call; afterwards the pool hears what claims hold."""
    if pci is None:
        return measure
    from dra.plugin.passthrough import telling

    return telling(measure, holds_changed)
