"""Which kernel module is for a device: the aliases that depmod wrote. Pure but for reading the file.

A driver of the vfio family says in its aliases, with `vfio_pci:` in front, for which devices it may stand in for the
device's own driver. The plain `vfio_pci` takes every device; a variant such as `nvgrace_gpu_vfio_pci` only the few that
it was made for, and those need it.

Source: Linux, Documentation/driver-api/vfio.rst and vfio-pci-device-specific-driver-acceptance.rst.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

from dra.host.paths import HostPaths
from dra.host.rooted import resolve

VFIO_PREFIX = "vfio_pci:"
PLAIN_MODULE = "vfio_pci"
_RELEASE = re.compile(r"[\w.+~-]+", re.ASCII)


def aliases_file(paths: HostPaths) -> Path | None:
    """Give the alias table of the running kernel (`/lib/modules/<release>/modules.alias`); None without one."""
    try:
        release = (paths.proc / "sys/kernel/osrelease").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not _RELEASE.fullmatch(release):
        return None
    return resolve(paths.host_root, f"/lib/modules/{release}/modules.alias")


def best_vfio_module(lines: Iterable[str], modalias: str) -> str:
    """Give the module of the vfio family that is made for a device the most, `vfio_pci` if none is made for it.

    Args:
        lines: of modules.alias: `alias <pattern> <module>`.
        modalias: the device's own (`pci:v000010DEd00002342sv…`).

    The pattern with the fewest stars is the closest one; among equals the name decides, so that the answer stays.
    """
    device = VFIO_PREFIX + modalias.strip().removeprefix("pci:")
    found: list[tuple[int, str]] = []
    for line in lines:
        if not line.startswith(f"alias {VFIO_PREFIX}"):
            continue
        words = line.split()
        if len(words) == 3 and fnmatch.fnmatchcase(device, words[1]):
            found.append((words[1].count("*"), words[2]))
    return min(found)[1] if found else PLAIN_MODULE
