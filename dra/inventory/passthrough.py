"""Which GPUs can be passed through to a virtual machine: read from sysfs, whatever driver has them. No NVML.

Loaded only where GPUs may be passed through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace

from dra.host.paths import HostPaths
from dra.host.pci import numa_node, pcie_root
from dra.host.pci_binding import NVIDIA, PciBus, PciFunction
from dra.host.pci_names import addressable_bytes, board_name
from dra.inventory.keep import with_siblings
from dra.inventory.model import Inventory, ScanProblem, VfioFunction
from dra.inventory.names import VfioName

NO_IOMMU = "DRA-VFIO-NO-IOMMU"
# The subject of the problem: not a GPU's.
IOMMU = "iommu"


def scan_with_passthrough(
    scan: Callable[[], Inventory],
    bus: PciBus,
    paths: HostPaths,
    *,
    in_use: Callable[[], Collection[str]] = tuple,
) -> Callable[[], Inventory]:
    """Give a scan that also tells which GPUs can be passed through.

    Args:
        scan: the scan without.
        bus: the node's PCI bus.
        paths: the node's files.
        in_use: names of the devices that claims hold. One of them stays, whatever its function looks like now: between
            two drivers it has none.

    The bus is looked at after NVML: a GPU that is given away meanwhile is then seen as given away, and not as lost.
    """
    name = functools.cache(functools.partial(board_name, paths))

    def look() -> Inventory:
        found = scan()
        if not bus.has_iommu():
            return replace(found, problems=(*found.problems, no_iommu()))
        listed = bus.functions()
        # Asked after the bus: a function without a driver is on its way for a claim that is written down already.
        held = set() if all(map(can_be_passed, listed)) else set(in_use())
        functions = tuple(
            _vfio_function(index, function, bus, paths, name)
            for index, function in enumerate(listed)
            if can_be_passed(function) or str(VfioName(index)) in held
        )
        return with_siblings(replace(found, vfio=functions))

    return look


def can_be_passed(function: PciFunction) -> bool:
    """Whether a GPU may be given to a virtual machine as a whole.

    It has an IOMMU group, NVIDIA's driver or one of the vfio family has it, and no virtual function is cut from it. One
    that has no driver at all is broken, or somebody else's.
    """
    return (
        function.iommu_group is not None
        and (function.on_vfio or function.driver == NVIDIA)
        and not function.sriov_vfs
    )


def _vfio_function(
    index: int, function: PciFunction, bus: PciBus, paths: HostPaths, name: Callable[[int], str]
) -> VfioFunction:
    address = function.address
    return VfioFunction(
        index=index,
        pci_address=address,
        driver=function.driver,
        on_vfio=function.on_vfio,
        iommu_group=function.iommu_group or 0,
        vendor_id=function.vendor_id,
        device_id=function.device_id,
        product_name=name(function.device_id),
        addressable_bytes=addressable_bytes(paths, address),
        vfio_device=function.vfio_device,
        iommufd=bus.has_iommufd(),
        numa_node=numa_node(paths, address),
        pcie_root=pcie_root(paths, address),
    )


def no_iommu() -> ScanProblem:
    """Give what is said of a node whose kernel runs without an IOMMU."""
    return ScanProblem(
        IOMMU,
        NO_IOMMU,
        "no GPU of this node can be passed through to a virtual machine, for its kernel runs without an IOMMU",
        "Turn VT-d, AMD-Vi or the SMMU on in the firmware and, with Intel's, boot with intel_iommu=on; or leave the "
        "feature gate PassthroughSupport off here.",
    )
