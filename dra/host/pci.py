"""What sysfs says about a PCI device: its root complex, its NUMA node, its DRM nodes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dra.host.paths import HostPaths
from dra.values import PciAddress

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", re.ASCII)
_DRM = re.compile(r"(?:card|renderD)\d+", re.ASCII)


def device_dir(paths: HostPaths, address: PciAddress) -> Path:
    """Give the device's directory as the bus lists it (a link on a real machine)."""
    return paths.sys / "bus/pci/devices" / str(address)


def pcie_root(paths: HostPaths, address: PciAddress) -> str | None:
    """Give the root complex (`pci0000:64`); None where sysfs does not tell.

    The first component below /sys/devices of the real path of the device. A virtual machine may put another
    bus in front (`/sys/devices/LNXSYSTM:00/…/pci0000:00/…`); then it is the first component of that form.

    Source: standard attribute resource.kubernetes.io/pcieRoot (Kubernetes 1.34).
    """
    try:
        real = os.path.realpath(device_dir(paths, address), strict=True)
    except OSError:
        return None
    parts = Path(real).parts
    if str(address) != parts[-1]:
        return None
    return next((part for part in parts[:-1] if _ROOT.fullmatch(part)), None)


def numa_node(paths: HostPaths, address: PciAddress) -> int | None:
    """Give the NUMA node; None where the kernel says -1 or nothing.

    Source: /sys/bus/pci/devices/<address>/numa_node.
    """
    try:
        node = int((device_dir(paths, address) / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def drm_nodes(paths: HostPaths, address: PciAddress) -> tuple[str, ...]:
    """Give the names of the device's DRM nodes (`card1`, `renderD128`), cards first, by number.

    Empty where nvidia-drm is not loaded, which is normal on a headless server. The number of a card is not the
    number of the GPU.

    Source: /sys/bus/pci/devices/<address>/drm.
    """
    try:
        names = os.listdir(f"{paths.sys}/bus/pci/devices/{address}/drm")  # noqa: PTH208 - at each prepare
    except OSError:
        return ()
    found = [name for name in names if _DRM.fullmatch(name)]
    return tuple(sorted(found, key=lambda name: (name.startswith("r"), int(name.lstrip("cardenD")))))
