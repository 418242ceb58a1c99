"""PCI functions and the kernel drivers that they are bound to: look, bind, let go.

    bus = PciBus(paths)
    function = bus.function(address)
    driver = bus.vfio_driver_for(address)
    bus.load_module(driver)
    bus.bind(address, driver)        # from whatever driver has it; also back again: bus.bind(address, "nvidia")

Nothing is remembered: each answer is a new look. Looking raises nothing for a function that is not there; it has then no
driver and no group. Nothing here knows of claims; who may call what, and when, is the caller's affair.

Source: Linux, Documentation/ABI/testing/sysfs-bus-pci; Documentation/driver-api/vfio.rst.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from dra.errors import HostError
from dra.host.kernel import HostKernel, RealKernel
from dra.host.module_aliases import PLAIN_MODULE, aliases_file, best_vfio_module
from dra.host.open_files import Holder, holders_of
from dra.host.paths import HostPaths
from dra.host.pci import device_dir, drm_nodes
from dra.host.pci_attributes import count_in, driver_in, hex_in, iommu_group_in, vfio_device_in
from dra.values import PciAddress

__all__ = ["GroupMember", "Holder", "PciBus", "PciFunction", "is_vfio_driver"]

NVIDIA = "nvidia"
_VENDOR = 0x10DE
# VGA and 3D controllers; the rest of a card (audio, USB) is not what a claim asks for.
_DISPLAY_CLASSES = (0x0300, 0x0302)
# PCI-to-PCI bridges. Others of that base class (NVSwitches, host bridges) have drivers that keep a group from a guest.
_BRIDGE_CLASSES = (0x0604, 0x0609)
_VFIO_NAME = re.compile(r"(?:\w+[-_])?vfio[-_]pci", re.ASCII)
# Drivers that the kernel lets stand beside a vfio driver in one IOMMU group: they start no transfers to memory.
_HARMLESS = frozenset({"pci-stub", "pcieport"})
# A driver's probe goes on after the write has come back, where it is asynchronous.
_SETTLE_SECONDS = 5.0
_LOOK_SECONDS = 0.02


def is_vfio_driver(driver: str) -> bool:
    """Whether a driver gives its devices to virtual machines: vfio-pci or a variant (`nvgrace_gpu_vfio_pci`)."""
    return _VFIO_NAME.fullmatch(driver) is not None


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Another function of an IOMMU group, which is no PCI-to-PCI bridge; `driver` is empty where it has none."""

    address: PciAddress
    driver: str

    @property
    def in_the_way(self) -> bool:
        """Whether its driver keeps the group from being given to a virtual machine."""
        return bool(self.driver) and not is_vfio_driver(self.driver) and self.driver not in _HARMLESS


@dataclass(frozen=True, slots=True)
class PciFunction:
    """A PCI function as it is now.

    Args:
        address: where it is.
        driver: of the kernel, as `/sys/bus/pci/drivers` names it; empty: none.
        iommu_group: its number, which also names `/dev/vfio/<group>`; None without an IOMMU.
        group_members: the other functions of that group without PCI-to-PCI bridges, by address.
        vfio_device: `vfio3` below `/dev/vfio/devices`, for IOMMUFD; empty where the kernel has it not, or it is not
            bound to a vfio driver.
        sriov_vfs: how many virtual functions are cut from it.
        vendor_id, device_id: of PCI, 0 where they cannot be read.
    """

    address: PciAddress
    driver: str = ""
    iommu_group: int | None = None
    group_members: tuple[GroupMember, ...] = ()
    vfio_device: str = ""
    sriov_vfs: int = 0
    vendor_id: int = 0
    device_id: int = 0

    @property
    def on_vfio(self) -> bool:
        """Whether it is bound to a vfio driver."""
        return is_vfio_driver(self.driver)


class PciBus:
    """The PCI bus of a node. Has no state; safe from several threads that leave one another's functions alone.

    Args:
        paths: where the node's files are.
        kernel: what writes take effect in; None: this machine's.
    """

    def __init__(self, paths: HostPaths, kernel: HostKernel | None = None) -> None:
        self._paths = paths
        self._kernel = RealKernel(paths) if kernel is None else kernel

    # -- looking -----------------------------------------------------------------------------------

    def function(self, address: PciAddress) -> PciFunction:
        """Give a function as it is now."""
        directory = device_dir(self._paths, address)
        group = iommu_group_in(directory)
        return PciFunction(
            address,
            driver=driver_in(directory),
            iommu_group=group,
            group_members=() if group is None else self._members(group, address),
            vfio_device=vfio_device_in(directory),
            sriov_vfs=count_in(directory, "virtfn"),
            vendor_id=hex_in(directory / "vendor"),
            device_id=hex_in(directory / "device"),
        )

    def driver_of(self, address: PciAddress) -> str:
        """Give the driver that a function is bound to, empty for none. One look at a link."""
        return driver_in(device_dir(self._paths, address))

    def is_there(self, address: PciAddress) -> bool:
        """Whether the bus has such a function at all."""
        return device_dir(self._paths, address).exists()

    def functions(self) -> tuple[PciFunction, ...]:
        """Give the GPUs: NVIDIA's display functions by address, bound to whatever, without virtual functions.

        The position in this list is the index in `gpu-vfio-<index>`. Source: reference driver.
        """
        found = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._paths.sys / "bus/pci/devices"):  # noqa: PTH208
                with contextlib.suppress(ValueError):
                    address = PciAddress.parse(name)
                    if self._is_gpu(device_dir(self._paths, address)):
                        found.append(address)
        return tuple(self.function(address) for address in sorted(found))

    def has_iommu(self) -> bool:
        """Whether the node's IOMMU is on, so that functions have groups."""
        try:
            return any((self._paths.sys / "kernel/iommu_groups").iterdir())
        except OSError:
            return False

    def has_iommufd(self) -> bool:
        """Whether the kernel offers IOMMUFD: `/dev/iommu` is there."""
        return (self._paths.dev / "iommu").exists()

    def holders(self, *addresses: PciAddress) -> tuple[Holder, ...]:
        """Give the processes that have a GPU's device nodes open (`/dev/nvidia<N>` and its DRM nodes), this one too.

        Nobody holds what the NVIDIA driver does not have. A GPU that is held cannot be unbound: the kernel waits.
        """
        return holders_of(self._paths.proc, [node for each in addresses for node in self._nodes(each)])

    def vfio_driver_for(self, address: PciAddress) -> str:
        """Give the driver of the vfio family that the kernel has for this very device, `vfio-pci` if no other.

        Its name as `load_module` and `bind` take it; it need not be loaded. Source: see `dra.host.module_aliases`.
        """
        try:
            modalias = (device_dir(self._paths, address) / "modalias").read_text(encoding="ascii")
            table = aliases_file(self._paths)
            if table is not None:
                with table.open(encoding="ascii", errors="replace") as lines:
                    module = best_vfio_module(lines, modalias)
                    return "vfio-pci" if module == PLAIN_MODULE else module
        except (OSError, UnicodeDecodeError):
            pass
        return "vfio-pci"

    def is_loaded(self, driver: str) -> bool:
        """Whether a driver is there to take functions."""
        return bool(self._registered(driver))

    # -- changing ----------------------------------------------------------------------------------

    def load_module(self, driver: str) -> None:
        """Have the kernel load the module of a driver; done at once if it is there.

        Raises:
            HostError: DRA-VFIO-MODULE.
        """
        if self._registered(driver):
            return
        why = self._kernel.load_module(driver)
        if not why and not self._registered(driver):
            why = "the module is loaded, and the PCI bus has no driver of that name"
        if why:
            raise HostError(
                "DRA-VFIO-MODULE",
                f"the kernel module of the driver {driver} cannot be loaded: {why}",
                remedy=f"Install the kernel's modules on the node, or load it at boot (modprobe {driver}).",
                driver=driver,
            )

    def bind(self, address: PciAddress, driver: str) -> None:
        """Bind a function to a driver, away from the one that has it; afterwards nothing overrides its choice of driver
        except, while a vfio driver has it, that one. Done at once if it is bound so.

        Blocks while somebody has the device open, until the time for a write is over (10 s). A function that the new
        driver does not take is left without a driver.

        Raises:
            HostError: DRA-VFIO-NO-DRIVER: the driver is not loaded, and nothing was done; DRA-VFIO-BIND. Retryable.
        """
        name = self._registered(driver)
        if not name:
            raise HostError(
                "DRA-VFIO-NO-DRIVER",
                f"PCI device {address}: it cannot be bound to {driver}, for no such driver is loaded",
                remedy=f"Load the kernel module (modprobe {driver}), or wait for the driver container that does.",
                pci=str(address),
                driver=driver,
            )
        directory = device_dir(self._paths, address)
        held_by = driver_in(directory)
        if held_by != name:
            # First of all: nothing else may take the function in between.
            self._write(address, directory / "driver_override", f"{name}\n", f"choose {name}")
            if held_by:
                self._write(address, directory / "driver/unbind", str(address), f"take it from {held_by}")
            self._write(
                address, self._paths.sys / "bus/pci/drivers_probe", str(address), f"give it to {name}"
            )
            self._wait_for(address, name)
        if not is_vfio_driver(name):
            self._write(address, directory / "driver_override", "\n", "let any driver have it again")

    def unbind(self, address: PciAddress) -> None:
        """Take a function from its driver and let none have it by itself; fine if it has none. See `bind`.

        Raises:
            HostError: DRA-VFIO-BIND.
        """
        directory = device_dir(self._paths, address)
        held_by = driver_in(directory)
        if held_by:
            self._write(address, directory / "driver/unbind", str(address), f"take it from {held_by}")
        self._write(address, directory / "driver_override", "\n", "let any driver have it again")

    # -- parts -------------------------------------------------------------------------------------

    def _write(self, address: PciAddress, path: Path, text: str, aim: str) -> None:
        why = self._kernel.write(path, text)
        if why:
            raise HostError(
                "DRA-VFIO-BIND",
                f"PCI device {address}: the kernel refused to {aim}: {why} ({path})",
                remedy="Look into the node's kernel log (dmesg); a device that is in use must be let go of first.",
                pci=str(address),
                path=str(path),
            )

    def _wait_for(self, address: PciAddress, driver: str) -> None:
        end = time.monotonic() + _SETTLE_SECONDS
        while (found := driver_in(device_dir(self._paths, address))) != driver:
            if time.monotonic() > end:
                raise HostError(
                    "DRA-VFIO-BIND",
                    f"PCI device {address}: the driver {driver} did not take it; it is "
                    + (f"bound to {found}" if found else "bound to no driver"),
                    remedy="Look into the node's kernel log (dmesg) for what that driver says about the device.",
                    pci=str(address),
                )
            time.sleep(_LOOK_SECONDS)

    def _registered(self, driver: str) -> str:
        """Give the driver's name as the bus spells it, empty if it is not there.

        A module's name and its driver's differ in the stroke at times: module vfio_pci, driver vfio-pci.
        """
        drivers = self._paths.sys / "bus/pci/drivers"
        spellings = (driver, driver.replace("_", "-"), driver.replace("-", "_"))
        return next((name for name in spellings if name and (drivers / name).is_dir()), "")

    def _members(self, group: int, address: PciAddress) -> tuple[GroupMember, ...]:
        members = []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._paths.sys / f"kernel/iommu_groups/{group}/devices"):  # noqa: PTH208
                with contextlib.suppress(ValueError):
                    other = PciAddress.parse(name)
                    directory = device_dir(self._paths, other)
                    if other != address and hex_in(directory / "class") >> 8 not in _BRIDGE_CLASSES:
                        members.append(GroupMember(other, driver_in(directory)))
        return tuple(sorted(members, key=lambda member: member.address))

    def _is_gpu(self, directory: Path) -> bool:
        return (
            hex_in(directory / "vendor") == _VENDOR
            and hex_in(directory / "class") >> 8 in _DISPLAY_CLASSES
            and not (directory / "physfn").exists()
        )

    def _nodes(self, address: PciAddress) -> list[Path]:
        root = self._paths.dev_root()[0] / "dev"
        names = [f"dri/{name}" for name in drm_nodes(self._paths, address)]
        minor = self._minor(address)
        if minor is not None:
            names.append(f"nvidia{minor}")
        return [root / name for name in names] + [self._paths.dev / name for name in names]

    def _minor(self, address: PciAddress) -> int | None:
        """Give N of `/dev/nvidia<N>`. Source: /proc/driver/nvidia/gpus/<address>/information."""
        try:
            file = self._paths.proc / f"driver/nvidia/gpus/{address}/information"
            text = file.read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        match = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else None
