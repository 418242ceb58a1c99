"""IOMMU groups of a simulated node, its drivers of the vfio family, and their device nodes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dra.sim.profiles import GpuSlot
from dra.sim.tree.facts import KERNEL_RELEASE, VFIO_MAJORS, NodeFacts
from dra.sim.tree.nodes import device_numbers, make_device_node, make_link, write_text

_MISC = 10
_VFIO_MINOR, _IOMMU_MINOR = 196, 125
# What is mapped of a GPU: registers, memory, more registers.
_REGISTERS, _DOORBELLS = 16 << 20, 32 << 20

# Which devices have a driver of their own in the vfio family. Source: Linux, drivers/vfio/pci.
_GRACE = (0x2342, 0x2345, 0x2348, 0x2941, 0x31C2)
_ALIASES = "".join(
    f"alias vfio_pci:v000010DEd{device:08X}sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n" for device in _GRACE
)


def group_of(slot: GpuSlot, facts: NodeFacts) -> int:
    """Give the number of a GPU's IOMMU group; each has one of its own, and it is no other number of it."""
    return 20 + 3 * facts.machine.gpus.index(slot)


def write_module_aliases(root: Path) -> None:
    """Write what depmod found in the kernel's modules."""
    text = "# Aliases extracted from modules themselves.\nalias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia\n"
    text += f"alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci\n{_ALIASES}"
    write_text(root / "lib/modules" / KERNEL_RELEASE / "modules.alias", text)


def sync_vfio(root: Path, facts: NodeFacts, *, real: bool | None) -> None:
    """Make groups, drivers and nodes agree with the facts; what is not a GPU's stays."""
    sys, dev = root / "sys", root / "dev"
    groups = sys / "kernel/iommu_groups"
    if facts.iommu:
        groups.mkdir(parents=True, exist_ok=True)
    else:
        shutil.rmtree(groups, ignore_errors=True)
    drivers = sys / "bus/pci/drivers"
    for driver in facts.vfio_drivers:
        (drivers / driver).mkdir(parents=True, exist_ok=True)
    for gone in drivers.glob("*vfio*"):
        if gone.name not in facts.vfio_drivers:
            # A reboot unloads what nobody loads at boot.
            shutil.rmtree(gone)
    nodes: dict[str, tuple[int, int]] = {"iommu": (_MISC, _IOMMU_MINOR)} if facts.iommufd else {}
    if facts.vfio_drivers:
        nodes["vfio/vfio"] = (_MISC, _VFIO_MINOR)
    for number, slot in enumerate(facts.machine.gpus):
        device = sys / "bus/pci/devices" / str(slot.pci_address)
        on_vfio = slot in facts.gpus and bool(facts.pci_drivers.get(slot.uuid))
        if slot in facts.gpus:
            _sync_device(device, slot, facts, cdev=f"vfio{number}" if on_vfio and facts.iommufd else "")
        if not facts.iommu:
            (device / "iommu_group").unlink(missing_ok=True)
        else:
            group = group_of(slot, facts)
            _sync_group(groups / str(group), device, there=slot in facts.gpus)
            if on_vfio:
                nodes[f"vfio/{group}"] = (VFIO_MAJORS["vfio"], group)
                if facts.iommufd:
                    nodes[f"vfio/devices/vfio{number}"] = (VFIO_MAJORS["vfio-dev"], number)
    _sync_nodes(dev, nodes, real=real)


def _sync_device(device: Path, slot: GpuSlot, facts: NodeFacts, *, cdev: str) -> None:
    write_text(device / "resource", _resource_text(slot), mode=0o444)
    for other in (device / "vfio-dev").glob("*"):
        if other.name != cdev:
            shutil.rmtree(other)
    if cdev:
        number = cdev.removeprefix("vfio")
        write_text(device / f"vfio-dev/{cdev}/dev", f"{VFIO_MAJORS['vfio-dev']}:{number}\n")
    for virtual in device.glob("virtfn*"):
        virtual.unlink()
    for virtual_function in range(facts.vfs.get(slot.uuid, 0)):
        make_link(device / f"virtfn{virtual_function}", f"../{slot.pci_address}.vf{virtual_function}")


def _sync_group(group: Path, device: Path, *, there: bool) -> None:
    member = group / "devices" / device.name
    if there:
        make_link(member, os.path.relpath(device.resolve(), member.parent))
        make_link(device / "iommu_group", os.path.relpath(group, device.resolve()))
    elif member.is_symlink():
        member.unlink()


def _sync_nodes(dev: Path, nodes: dict[str, tuple[int, int]], *, real: bool | None) -> None:
    for name, (major, minor) in nodes.items():
        found = device_numbers(dev / name)
        if found is None or (found.major, found.minor) != (major, minor):
            mode = 0o666 if name == "vfio/vfio" else 0o600
            make_device_node(dev / name, major, minor, mode=mode, real=real)
    for path in (*dev.glob("iommu"), *dev.glob("vfio/*"), *dev.glob("vfio/devices/*")):
        if str(path.relative_to(dev)) not in nodes and not path.is_dir():
            path.unlink()


def _resource_text(slot: GpuSlot) -> str:
    """Give the BARs of a GPU: registers, then memory as large as the board's, in a power of two.

    Source: Linux, resource_show: start, end, flags of each region.
    """
    memory = 1 << max(28, ((slot.model.memory_mib or 256) * (1 << 20) - 1).bit_length())
    at, lines = 0x2000_0000_0000 + (slot.pci_address.bus << 40), []
    for size, flags in ((_REGISTERS, 0x40200), (0, 0), (memory, 0x14220C), (0, 0), (_DOORBELLS, 0x14220C)):
        if size == 0:
            lines.append(f"0x{0:016x} 0x{0:016x} 0x{0:016x}")
            continue
        at = (at + size - 1) // size * size
        lines.append(f"0x{at:016x} 0x{at + size - 1:016x} 0x{flags:016x}")
        at += size
    return "\n".join([*lines, *[f"0x{0:016x} 0x{0:016x} 0x{0:016x}"] * 8]) + "\n"
