"""Inventories to test with."""

from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile, ScanProblem
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


def inventory(*gpus, problems=(), driver="580.95.05"):
    return Inventory(driver, (13, 0), tuple(gpus), tuple(problems))


def problem(code, subject="node", message="it is so"):
    return ScanProblem(subject, code, message)
