"""Attributes of one PCI function, read from its directory in sysfs. What is not there is nothing; none of these raises.

Source: Linux, Documentation/ABI/testing/sysfs-bus-pci, sysfs-kernel-iommu_groups, sysfs-devices-vfio-dev.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def driver_in(directory: Path) -> str:
    """Give the kernel driver that has the function; empty for none."""
    try:
        return (directory / "driver").readlink().name
    except OSError:
        return ""


def iommu_group_in(directory: Path) -> int | None:
    """Give the number of the group; None without one, or where the kernel only pretends (no-IOMMU mode of vfio)."""
    try:
        group = (directory / "iommu_group").readlink().name
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if "noiommu" in (directory / "iommu_group/name").read_text(encoding="ascii", errors="replace"):
            return None
    return int(group) if group.isdigit() else None


def vfio_device_in(directory: Path) -> str:
    """Give the device of IOMMUFD; without a number of its own (`dev`) there is no node for it. Empty for none."""
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(directory / "vfio-dev"))  # noqa: PTH208
        return next((name for name in names if (directory / "vfio-dev" / name / "dev").exists()), "")
    return ""


def count_in(directory: Path, prefix: str) -> int:
    """Give how many entries begin so (`virtfn0`, `virtfn1`, ...)."""
    with contextlib.suppress(OSError):
        return sum(name.startswith(prefix) for name in os.listdir(directory))  # noqa: PTH208
    return 0


def hex_in(path: Path) -> int:
    """Give the number in an attribute (`0x10de`); 0 where it cannot be read."""
    try:
        return int(path.read_text(encoding="ascii"), 16)
    except (OSError, ValueError):
        return 0
