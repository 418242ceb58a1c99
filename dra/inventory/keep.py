"""What becomes of GPUs that a scan does not show. Pure.

A scan that could not look says nothing about the GPUs, and a GPU that is gone may still be in somebody's claim.
Both stay listed, marked unusable, so that the pool keeps its shape and nothing new is given out: an autoscaler
takes a node whose device count drops for a broken one, and a device that leaves the slices while it is allocated
stops consuming counters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from dra.inventory.model import NODE, Gpu, Inventory, ScanProblem
from dra.inventory.names import GpuName, VfioName, parse_device_name
from dra.values import PciAddress

GONE = "DRA-GPU-GONE"

# Let go of on purpose: the GPUs are as they were.
_ON_PURPOSE = frozenset({"DRA-NVML-RELEASED"})
# May be over at the next look; believed when seen this often in a row.
_PASSING = frozenset(
    {"DRA-NVML-TIMEOUT", "DRA-NVML-UNKNOWN", "DRA-NVML-SESSION-LOST", "DRA-NVML-BUSY", "DRA-NVML-MEMORY"}
)
BELIEVED_AFTER = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """An inventory to go on with, and how many scans in a row could not look."""

    inventory: Inventory
    blind_scans: int = 0


def plan_inventory(
    before: Kept,
    scanned: Inventory,
    *,
    in_use: Collection[str] = (),
    on_bus: Callable[[PciAddress], bool] = lambda _address: False,
) -> Kept:
    """Give the inventory to go on with after a scan.

    Args:
        before: what there was.
        scanned: what the scan gave.
        in_use: names of devices that claims hold.
        on_bus: whether a GPU's PCI device is there and still the NVIDIA driver's.

    A GPU that a virtual machine has, or is about to get, is neither lost nor gone: it is not listed as long as that lasts.
    """
    kept = _plan(before, scanned, in_use=in_use, on_bus=on_bus)
    if not scanned.vfio:
        return kept
    return replace(kept, inventory=without_passed(with_siblings(kept.inventory), in_use=in_use))


def _plan(
    before: Kept,
    scanned: Inventory,
    *,
    in_use: Collection[str],
    on_bus: Callable[[PciAddress], bool],
) -> Kept:
    blind = next((problem for problem in scanned.problems if problem.subject == NODE), None)
    if blind is not None and not scanned.gpus:
        return _without_looking(before, scanned, blind)
    old = before.inventory
    seen = {gpu.uuid for gpu in scanned.gpus}
    places = {gpu.pci_address for gpu in scanned.gpus} | {gpu.minor for gpu in scanned.gpus}
    used = {name.minor for name in map(parse_device_name, in_use) if name is not None}
    kept: list[Gpu] = []
    problems: list[ScanProblem] = []
    for gpu in old.gpus:
        if gpu.uuid in seen or gpu.pci_address in places or gpu.minor in places:
            continue
        held = gpu.minor in used
        if not held and not on_bus(gpu.pci_address):
            continue
        kept.append(replace(gpu, unusable=GONE))
        problems.append(_gone(gpu, held=held))
    if not kept:
        return Kept(scanned)
    gpus = sorted((*scanned.gpus, *kept), key=lambda gpu: gpu.pci_address)
    return Kept(replace(scanned, gpus=tuple(gpus), problems=(*scanned.problems, *problems)))


def _without_looking(before: Kept, scanned: Inventory, blind: ScanProblem) -> Kept:
    old = before.inventory
    count = before.blind_scans + 1
    as_it_was = blind.code in _ON_PURPOSE or (blind.code in _PASSING and count < BELIEVED_AFTER)
    gpus = old.gpus if as_it_was else tuple(replace(gpu, unusable=blind.code) for gpu in old.gpus)
    return Kept(replace(old, gpus=gpus, problems=scanned.problems, vfio=scanned.vfio), count)


def with_siblings(inventory: Inventory) -> Inventory:
    """Note with each GPU that can be passed through which `Gpu` it is, if NVIDIA's driver has it."""
    minors = {gpu.pci_address: gpu.minor for gpu in inventory.gpus}
    vfio = (replace(each, gpu_minor=minors.get(each.pci_address)) for each in inventory.vfio)
    return replace(inventory, vfio=tuple(vfio))


def without_passed(inventory: Inventory, *, in_use: Collection[str]) -> Inventory:
    """Leave out the GPUs that a vfio driver has, and those that do not answer while a claim has them passed through.

    One that a claim holds as a GPU stays: somebody took it away by hand.
    """
    held = {name.minor for name in map(parse_device_name, in_use) if name is not None}
    passed = {
        each.pci_address: each.on_vfio for each in inventory.vfio
        if each.on_vfio or str(VfioName(each.index)) in in_use
    }  # fmt: skip
    away = {
        gpu.pci_address
        for gpu in inventory.gpus
        if gpu.minor not in held and (passed.get(gpu.pci_address) or (gpu.unusable and gpu.pci_address in passed))
    }  # fmt: skip
    if not away:
        return inventory
    subjects = {str(address) for address in away}
    return with_siblings(
        replace(
            inventory,
            gpus=tuple(gpu for gpu in inventory.gpus if gpu.pci_address not in away),
            problems=tuple(each for each in inventory.problems if each.subject not in subjects),
        )
    )


def _gone(gpu: Gpu, *, held: bool) -> ScanProblem:
    why = "a claim still holds it" if held else "its PCI device is still the NVIDIA driver's"
    return ScanProblem(
        str(gpu.pci_address),
        GONE,
        f"GPU {GpuName(gpu.minor)} ({gpu.uuid}) is no longer reported by the driver; it stays listed because {why}",
        "Look for 'NVRM' in the kernel log (dmesg); reset the GPU or reboot the node.",
    )
