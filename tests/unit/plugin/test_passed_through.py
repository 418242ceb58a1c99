"""Which GPUs are with a virtual machine, and which are ill."""

from __future__ import annotations

import shutil

from dra.host.pci_binding import PciBus
from dra.inventory.diff import InventoryDiff
from dra.plugin.passthrough import PassedThrough
from dra.values import PciAddress
from tests.unit.host.pci_files import GPU, PlainBus
from tests.unit.inventory.inventory_samples import gpu, inventory, vfio


def test_a_gpu_is_away_while_another_driver_or_a_claim_has_it_and_lost_once_the_bus_has_it_no_more(tmp_path):
    node = PlainBus(tmp_path)
    place = node.root / node.device(GPU, group=7)
    address, claimed = PciAddress.parse(GPU), set()
    uuid = gpu().uuid
    found = inventory(gpu(pci_address=address), vfio=(vfio(pci_address=address),))
    passed = PassedThrough(PciBus(node.paths), lambda: claimed)
    assert uuid not in passed
    passed.inventory_changed(found, InventoryDiff())
    assert uuid not in passed
    claimed.add("gpu-vfio-4")
    assert uuid in passed
    claimed.clear()
    for driver in ("vfio-pci", ""):
        # Without one it is on its way.
        (place / "driver").unlink()
        node.device(GPU, group=7, driver=driver)
        assert uuid in passed
    # Unplugged, or fallen off the bus: no virtual machine has it, and a claim of it must hear so.
    shutil.rmtree(place)
    claimed.add("gpu-0")
    assert uuid not in passed
