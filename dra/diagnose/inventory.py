"""What `dra inventory` shows, as data: rows for people, JSON for programs, manifests for the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile, ScanProblem, VfioFunction
from dra.inventory.names import GpuName, VfioName
from dra.slices.devices import SliceProblem, mig_name

_MIB = 1 << 20

COLUMNS = ("NAME", "PCI ADDRESS", "PRODUCT", "MEMORY", "ARCHITECTURE", "CUDA", "MIG", "STATE")
WIDE_COLUMNS = (*COLUMNS, "UUID", "NUMA", "PCIE ROOT", "ADDRESSING", "BRAND")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a node stands: `ok`, `degraded` (something is wrong with some of it), `unusable` (nothing to give)."""

    word: str
    exit_code: int


OK = Verdict("ok", 0)
DEGRADED = Verdict("degraded", 1)
UNUSABLE = Verdict("unusable", 2)


def verdict(inventory: Inventory, problems: Sequence[SliceProblem] = ()) -> Verdict:
    """Judge an inventory and the problems of publishing it."""
    if not any(not gpu.unusable for gpu in inventory.gpus) and not any(
        each.on_vfio for each in inventory.vfio
    ):
        return UNUSABLE
    if inventory.problems or problems:
        return DEGRADED
    return OK


def rows(inventory: Inventory, *, wide: bool = False) -> list[tuple[str, ...]]:
    """Give the table's rows under `COLUMNS` or `WIDE_COLUMNS`; partitions follow their GPU, at the end stand those that a
    vfio driver has.
    """
    found: list[tuple[str, ...]] = []
    for gpu in inventory.gpus:
        found.append(_gpu_row(gpu))
        found += [_mig_row(gpu, mig) for mig in gpu.mig_devices]
    found += [_vfio_row(each) for each in inventory.vfio if each.on_vfio]
    count = len(WIDE_COLUMNS if wide else COLUMNS)
    return [row[:count] for row in found]


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    return (
        str(GpuName(gpu.minor)),
        str(gpu.pci_address),
        gpu.product_name or "-",
        "-" if gpu.memory_bytes is None else f"{gpu.memory_bytes // _MIB}MiB",
        gpu.architecture,
        "{}.{}".format(*gpu.compute_capability),
        ("on" if gpu.mig_enabled else "off") if gpu.mig_capable else "-",
        gpu.unusable or "ok",
        gpu.uuid,
        "-" if gpu.numa_node is None else str(gpu.numa_node),
        gpu.pcie_root or "-",
        gpu.addressing_mode or "-",
        gpu.brand,
    )


def _vfio_row(function: VfioFunction) -> tuple[str, ...]:
    return (
        str(VfioName(function.index)),
        str(function.pci_address),
        function.product_name,
        *("-",) * 4,
        f"on {function.driver}",
        "-",
        "-" if function.numa_node is None else str(function.numa_node),
        function.pcie_root or "-",
        *("-",) * 2,
    )


def _mig_row(gpu: Gpu, mig: MigDevice) -> tuple[str, ...]:
    return (
        f"  {mig_name(gpu, mig)}",
        str(gpu.pci_address),
        f"MIG {mig.profile.name}",
        f"{mig.profile.memory_mib}MiB",
        gpu.architecture,
        "{}.{}".format(*gpu.compute_capability),
        "-",
        gpu.unusable or "ok",
        mig.uuid,
        "-" if gpu.numa_node is None else str(gpu.numa_node),
        gpu.pcie_root or "-",
        gpu.addressing_mode or "-",
        gpu.brand,
    )


def as_json(inventory: Inventory) -> dict[str, Any]:
    """Give the inventory as plain JSON. Keys stay; new ones may be added."""
    cuda = inventory.cuda_version
    return {
        "driverVersion": inventory.driver_version,
        "cudaVersion": f"{cuda[0]}.{cuda[1]}" if cuda else None,
        "gpus": [_gpu_json(gpu) for gpu in inventory.gpus],
        **({"vfio": [_vfio_json(each) for each in inventory.vfio]} if inventory.vfio else {}),
        "problems": [_problem_json(problem) for problem in inventory.problems],
    }


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": str(GpuName(gpu.minor)),
        "minor": gpu.minor,
        "uuid": gpu.uuid,
        "pciAddress": str(gpu.pci_address),
        "productName": gpu.product_name,
        "brand": gpu.brand,
        "architecture": gpu.architecture,
        "cudaComputeCapability": "{}.{}".format(*gpu.compute_capability),
        "memoryBytes": gpu.memory_bytes,
        "addressingMode": gpu.addressing_mode,
        "numaNode": gpu.numa_node,
        "pcieRoot": gpu.pcie_root,
        "unusable": gpu.unusable or None,
        "mig": {
            "capable": gpu.mig_capable,
            "enabled": gpu.mig_enabled,
            "devices": [_mig_json(gpu, mig) for mig in gpu.mig_devices],
            "profiles": [_profile_json(profile) for profile in gpu.mig_profiles],
        },
    }


def _vfio_json(function: VfioFunction) -> dict[str, Any]:
    return {
        "name": str(VfioName(function.index)),
        "gpu": None if function.gpu_minor is None else str(GpuName(function.gpu_minor)),
        "pciAddress": str(function.pci_address),
        "driver": function.driver,
        "iommuGroup": function.iommu_group,
        "productName": function.product_name,
        "addressableBytes": function.addressable_bytes,
        "numaNode": function.numa_node,
        "pcieRoot": function.pcie_root,
    }


def _mig_json(gpu: Gpu, mig: MigDevice) -> dict[str, Any]:
    return {
        "name": mig_name(gpu, mig),
        "uuid": mig.uuid,
        "profile": mig.profile.name,
        "profileId": mig.profile.profile_id,
        "gpuInstance": mig.gpu_instance_id,
        "computeInstance": mig.compute_instance_id,
        "placement": {"start": mig.start, "size": mig.size},
        "madeForAClaim": mig.ours,
    }


def _profile_json(profile: MigProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "profileId": profile.profile_id,
        "memoryMiB": profile.memory_mib,
        "multiprocessors": profile.multiprocessors,
        "placements": [{"start": start, "size": size} for start, size in profile.placements],
    }


def _problem_json(problem: ScanProblem) -> dict[str, Any]:
    return {
        "subject": problem.subject,
        "code": problem.code,
        "message": problem.message,
        "remedy": problem.remedy,
    }
