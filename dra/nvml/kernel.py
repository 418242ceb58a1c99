"""What the NVIDIA kernel module says about GPUs in /proc, which wakes nothing.

Source: /proc/driver/nvidia/gpus/<address>/information; /proc/driver/nvidia/capabilities/gpu<minor>/mig.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dra.errors import ValueFormatError
from dra.host.paths import HostPaths
from dra.values import PciAddress


@dataclass(frozen=True, slots=True)
class KernelGpu:
    """A GPU that the kernel module has taken. `uuid` is empty until something has woken the GPU once."""

    address: PciAddress
    minor: int | None
    uuid: str
    model: str
    mig_layout: tuple[str, ...]


def kernel_gpus(paths: HostPaths) -> dict[PciAddress, KernelGpu]:
    """Give the GPUs the module lists, by address; empty where it is not loaded or /proc hides it.

    GPUs that an administrator has excluded from the driver are left out.
    """
    found: dict[PciAddress, KernelGpu] = {}
    folder = f"{paths.proc}/driver/nvidia/gpus"
    for name in _listing(folder):
        try:
            address = PciAddress.parse(name)
        except ValueFormatError:
            continue
        fields = _information(f"{folder}/{name}/information")
        if fields.get("GPU Excluded", "No") != "No":
            continue
        minor = fields.get("Device Minor", "")
        uuid = fields.get("GPU UUID", "")
        number = int(minor) if minor.isdecimal() else None
        found[address] = KernelGpu(
            address,
            number,
            "" if "?" in uuid else uuid,
            fields.get("Model", ""),
            _mig_layout(paths, f"gpu{number}"),
        )
    return found


def mig_layouts(paths: HostPaths) -> dict[str, tuple[str, ...]]:
    """Give the instances of every GPU that can have some, by the name of its directory (`gpu3`)."""
    folder = f"{paths.proc}/driver/nvidia/capabilities"
    return {name: _mig_layout(paths, name) for name in _listing(folder) if name.startswith("gpu")}


def _information(path: str) -> dict[str, str]:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _mig_layout(paths: HostPaths, gpu: str) -> tuple[str, ...]:
    """Give the instances of a GPU (`gi7`, `gi7/ci0`); a change tells that somebody has partitioned it."""
    folder = f"{paths.proc}/driver/nvidia/capabilities/{gpu}/mig"
    found: list[str] = []
    for instance in _listing(folder):
        if instance.startswith("gi"):
            found.append(instance)
            found += [
                f"{instance}/{part}" for part in _listing(f"{folder}/{instance}") if part.startswith("ci")
            ]
    return tuple(sorted(found))


def _listing(folder: str) -> list[str]:
    # Every two seconds, for each GPU: text, and no path objects.
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except OSError:
        return []
