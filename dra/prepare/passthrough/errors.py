"""What is said of a function that cannot be passed through now. Each names the device and what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dra.errors import DeviceError
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.host.pci_binding import GroupMember, Holder, PciFunction

IN_USE = "DRA-VFIO-IN-USE"
# As many as fit into an Event's text.
_SHOWN = 5


def in_use(device: str, address: PciAddress, holders: Sequence[Holder], *, seconds: float) -> DeviceError:
    """Give the error of a function that processes have open; the kernel would wait for them for ever."""
    names = ", ".join(f"{each.comm or 'a process'} (pid {each.pid})" for each in holders[:_SHOWN])
    more = f" and {len(holders) - _SHOWN} more" if len(holders) > _SHOWN else ""
    after = f", still after {seconds:g} s" if seconds else ""
    return DeviceError(
        IN_USE,
        f"device {device} (PCI {address}) is in use by {names}{more}{after}: its kernel driver cannot be changed, and was "
        "not",
        remedy="End these processes on the node (monitoring, nvidia-persistenced, X), or take the GPU out of what they "
        "watch; the call is retried by itself.",
        retryable=True,
        device=device,
        pids=[each.pid for each in holders],
    )


def wrong_driver(device: str, function: PciFunction) -> DeviceError:
    """Give the error of a function that has a driver of which nothing is known."""
    return DeviceError(
        "DRA-VFIO-DRIVER",
        f"device {device} (PCI {function.address}) is bound to the kernel driver {function.driver}, from which it is not "
        "taken away",
        remedy="Bind it to nvidia or to vfio-pci on the node; the call is retried by itself.",
        retryable=True,
        device=device,
    )


def moved(device: str, was: PciAddress, now: PciAddress) -> DeviceError:
    """Give the error of a name that stands for another function than when the claim was prepared."""
    return DeviceError(
        "DRA-VFIO-MOVED",
        f"device {device} was PCI {was} when this claim was prepared and is PCI {now} now: a GPU before it on the bus was "
        "removed or added",
        remedy="Delete the pod, so that it gets a device anew; what it has is given back then.",
        retryable=True,
        device=device,
    )


def no_iommu_group(device: str, function: PciFunction) -> DeviceError:
    """Give the error of a function without IOMMU group."""
    return DeviceError(
        "DRA-VFIO-NO-GROUP",
        f"device {device} (PCI {function.address}) has no IOMMU group, so that it cannot be passed through",
        remedy="Switch the IOMMU on in the firmware and on the kernel's command line (intel_iommu=on or amd_iommu=on), and "
        "reboot the node.",
        retryable=True,
        device=device,
    )


def group_in_the_way(device: str, function: PciFunction, members: Sequence[GroupMember]) -> DeviceError:
    """Give the error of an IOMMU group of which the kernel has other functions in use."""
    names = ", ".join(f"{each.address} ({each.driver})" for each in members)
    return DeviceError(
        "DRA-VFIO-GROUP",
        f"device {device} (PCI {function.address}) shares IOMMU group {function.iommu_group} with {names}: the kernel "
        "gives a group to a virtual machine only as a whole",
        remedy="Bind these functions to vfio-pci, or to no driver, on the node (an audio or USB function of the same card "
        "may be bound too); the call is retried by itself.",
        retryable=True,
        device=device,
    )


def cut_into_vfs(device: str, function: PciFunction) -> DeviceError:
    """Give the error of a function of which virtual functions are in use."""
    return DeviceError(
        "DRA-VFIO-SRIOV",
        f"device {device} (PCI {function.address}) is cut into {function.sriov_vfs} virtual functions, which would go "
        "with its driver",
        remedy="Give up the virtual functions (echo 0 > sriov_numvfs), or delete the pod so that it gets another device.",
        retryable=True,
        device=device,
    )
