"""Inventories to test with."""

from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile, ScanProblem, VfioFunction
from dra.values import PciAddress

PROFILE = MigProfile("1g.5gb", 19, 4864, 14, 1, 0, 0, 0, 0, tuple((start, 1) for start in range(7)))


def gpu(minor=0, **fields):
    values = {
        "minor": minor,
        "uuid": f"GPU-00000000-0000-0000-0000-{minor:012d}",
        "pci_address": PciAddress(0, 0x10 + minor, 0, 0),
        "product_name": "NVIDIA A100-SXM4-40GB",
        "brand": "Nvidia",
        "architecture": "Ampere",
        "compute_capability": (8, 0),
        "memory_bytes": 40960 << 20,
    }
    return Gpu(**{**values, **fields})


def mig(start=0, *, profile=PROFILE, size=1, uuid=None):
    return MigDevice(uuid or f"MIG-{start}", profile, 7 + start, 0, start, size)


def inventory(*gpus, problems=(), driver="580.95.05", vfio=()):
    return Inventory(driver, (13, 0), tuple(gpus), tuple(problems), tuple(vfio))


def vfio(index=0, *, driver="nvidia", **fields):
    """Give the function of the GPU with this minor; its index is another."""
    values = {
        "index": index + 4,
        "pci_address": PciAddress(0, 0x10 + index, 0, 0),
        "driver": driver,
        "on_vfio": driver != "nvidia",
        "iommu_group": 30 + index,
        "vendor_id": 0x10DE,
        "device_id": 0x20B0,
        "product_name": "GA100 [A100 SXM4 40GB]",
        "addressable_bytes": 128 << 30,
    }
    return VfioFunction(**{**values, **fields})


def problem(code, subject="node", message="it is so"):
    return ScanProblem(subject, code, message)
