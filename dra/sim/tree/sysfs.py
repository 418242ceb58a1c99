"""`/sys` of a simulated node: PCI devices below their root complexes, and modules."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dra.sim.profiles import GpuSlot
from dra.sim.tree.facts import NodeFacts
from dra.sim.tree.nodes import make_link, write_text
from dra.values import PciAddress

_DISPLAY_3D, _BRIDGE = 0x030200, 0x060400


def sync_sys(root: Path, facts: NodeFacts) -> None:
    """Make `<root>/sys` show the GPUs that are on the bus, and the modules that are loaded."""
    sys = root / "sys"
    present = {str(slot.pci_address) for slot in facts.gpus}
    for slot in facts.machine.gpus:
        address = str(slot.pci_address)
        if address in present:
            _add_gpu(sys, slot, facts)
        else:
            _remove_device(sys, address)
    module = sys / "module/nvidia"
    if facts.loaded:
        write_text(module / "version", facts.driver_version + "\n")
        write_text(module / "refcnt", f"{2 + 4 * len(facts.gpus)}\n")
    else:
        shutil.rmtree(module, ignore_errors=True)
    write_text(sys / "module/firmware_class/parameters/path", "\n")
    for node in range(facts.machine.numa_nodes):
        (sys / f"devices/system/node/node{node}").mkdir(parents=True, exist_ok=True)


def link_pci_devices(root: Path, section: Mapping[str, Mapping[str, Any]]) -> None:
    """Write recorded PCI devices (`/<address>/drm/card1`) as sysfs has them: links into a root complex.

    A recording holds no topology; each device hangs on the root complex of its own bus, on NUMA node -1.
    """
    sys = root / "sys"
    for path in sorted(section):
        name, _, child = path.lstrip("/").partition("/")
        address = PciAddress.parse(name)
        device = _device_directory(sys, address, f"pci{address.domain:04x}:{address.bus:02x}", "")
        if not (device / "vendor").exists():
            _write_identity(device, 0x000010DE, 0x10DE, _DISPLAY_3D, numa_node=-1)
        (device / child).mkdir(parents=True, exist_ok=True)


def _add_gpu(sys: Path, slot: GpuSlot, facts: NodeFacts) -> None:
    if slot.bridge:
        bridge = _device_directory(sys, PciAddress.parse(slot.bridge), slot.root, "")
        _write_identity(bridge, 0x352A8086, 0x352A8086, _BRIDGE, numa_node=slot.numa_node)
    device = _device_directory(sys, slot.pci_address, slot.root, slot.bridge)
    _write_identity(
        device, slot.model.pci_device, slot.model.pci_subsystem, _DISPLAY_3D, numa_node=slot.numa_node
    )
    driver = facts.pci_driver_of(slot)
    write_text(device / "driver_override", (facts.overrides.get(slot.uuid) or "(null)") + "\n")
    if slot.drm is not None and driver == "nvidia":
        card, render = slot.drm
        write_text(device / f"drm/card{card}/dev", f"226:{card}\n")
        write_text(device / f"drm/renderD{render}/dev", f"226:{render}\n")
    else:
        shutil.rmtree(device / "drm", ignore_errors=True)
    link = device / "driver"
    if driver:
        drivers = sys / "bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        make_link(link, os.path.relpath(drivers, device))
    else:
        link.unlink(missing_ok=True)


def _device_directory(sys: Path, address: PciAddress, root: str, bridge: str) -> Path:
    """Make a device's directory and the link to it."""
    parts = [part for part in (root, bridge, str(address)) if part]
    device = sys.joinpath("devices", *parts)
    device.mkdir(parents=True, exist_ok=True)
    make_link(sys / "bus/pci/devices" / str(address), "/".join(("../../../devices", *parts)))
    return device


def _write_identity(directory: Path, device: int, subsystem: int, class_code: int, *, numa_node: int) -> None:
    values: Iterable[tuple[str, str]] = (
        ("vendor", f"0x{device & 0xFFFF:04x}"),
        ("device", f"0x{device >> 16:04x}"),
        ("subsystem_vendor", f"0x{subsystem & 0xFFFF:04x}"),
        ("subsystem_device", f"0x{subsystem >> 16:04x}"),
        ("class", f"0x{class_code:06x}"),
        ("modalias", _modalias(device, subsystem, class_code)),
        ("numa_node", str(numa_node)),
    )
    for name, value in values:
        write_text(directory / name, value + "\n", mode=0o444)


def _modalias(device: int, subsystem: int, class_code: int) -> str:
    """Give what the kernel looks a driver up by. Source: Linux, pci_uevent."""
    return (
        f"pci:v{device & 0xFFFF:08X}d{device >> 16:08X}sv{subsystem & 0xFFFF:08X}sd{subsystem >> 16:08X}"
        f"bc{class_code >> 16:02X}sc{class_code >> 8 & 0xFF:02X}i{class_code & 0xFF:02X}"
    )


def _remove_device(sys: Path, address: str) -> None:
    link = sys / "bus/pci/devices" / address
    if link.is_symlink():
        shutil.rmtree(link.resolve(), ignore_errors=True)
        link.unlink()
