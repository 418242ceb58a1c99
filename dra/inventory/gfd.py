"""GPU feature discovery's node labels: which attribute says the same, and the labels of a node for those who still need them.

Selecting nodes by label is what device plugins needed; with DRA a claim's selector says it to the scheduler.

Source: label names of NVIDIA's GPU feature discovery.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dra.inventory.model import Gpu, Inventory

_MIB = 1 << 20
# A label's value. Source: Kubernetes' label syntax.
_NOT_VALUE = re.compile(r"[^A-Za-z0-9._-]+")

# label -> (attribute or capacity of a device, how to write it in a selector). An empty attribute: there is none.
ATTRIBUTE_OF: Mapping[str, tuple[str, str]] = {
    "nvidia.com/gpu.present": ("", "any request for class gpu.nvidia.com"),
    "nvidia.com/gpu.count": ("", "count in the request, or allocationMode: All"),
    "nvidia.com/gpu.product": (
        "productName",
        'device.attributes["gpu.nvidia.com"].productName == "NVIDIA L40S"',
    ),
    "nvidia.com/gpu.memory": (
        "memory",
        'device.capacity["gpu.nvidia.com"].memory.isGreaterThan(quantity("40Gi"))',
    ),
    "nvidia.com/gpu.family": ("architecture", 'device.attributes["gpu.nvidia.com"].architecture == "Hopper"'),
    "nvidia.com/gpu.compute.major": (
        "cudaComputeCapability",
        'device.attributes["gpu.nvidia.com"].cudaComputeCapability.major() >= 9',
    ),
    "nvidia.com/gpu.compute.minor": (
        "cudaComputeCapability",
        'device.attributes["gpu.nvidia.com"].cudaComputeCapability.minor() == 0',
    ),
    "nvidia.com/cuda.driver-version.full": (
        "driverVersion",
        'device.attributes["gpu.nvidia.com"].driverVersion.isGreaterThan(semver("570.0.0"))',
    ),
    "nvidia.com/cuda.driver-version.major": (
        "driverVersion",
        'device.attributes["gpu.nvidia.com"].driverVersion.major() >= 570',
    ),
    "nvidia.com/cuda.runtime-version.full": (
        "cudaDriverVersion",
        'device.attributes["gpu.nvidia.com"].cudaDriverVersion.isGreaterThan(semver("12.8.0"))',
    ),
    "nvidia.com/cuda.runtime-version.major": (
        "cudaDriverVersion",
        'device.attributes["gpu.nvidia.com"].cudaDriverVersion.major() >= 13',
    ),
    "nvidia.com/mig.capable": (
        "type",
        'device.attributes["gpu.nvidia.com"].type == "mig" (class mig.nvidia.com)',
    ),
    "nvidia.com/mig.strategy": ("profile", 'device.attributes["gpu.nvidia.com"].profile == "1g.10gb"'),
}


def labels_of(inventory: Inventory) -> dict[str, str]:
    """Give the labels of a node; where its GPUs differ, those of the kind that it has most of, as GFD does."""
    gpus = [gpu for gpu in inventory.gpus if not gpu.unusable]
    if not gpus:
        return {}
    first = _commonest(gpus)
    labels = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.count": str(len(gpus)),
        "nvidia.com/gpu.product": _value(first.product_name),
        "nvidia.com/gpu.family": _value(first.architecture.lower()),
        "nvidia.com/gpu.compute.major": str(first.compute_capability[0]),
        "nvidia.com/gpu.compute.minor": str(first.compute_capability[1]),
        "nvidia.com/mig.capable": str(any(gpu.mig_capable for gpu in gpus)).lower(),
    }
    if first.memory_bytes is not None:
        labels["nvidia.com/gpu.memory"] = str(first.memory_bytes // _MIB)
    if inventory.driver_version:
        labels["nvidia.com/cuda.driver-version.full"] = _value(inventory.driver_version)
        labels["nvidia.com/cuda.driver-version.major"] = inventory.driver_version.partition(".")[0]
    if inventory.cuda_version:
        labels["nvidia.com/cuda.runtime-version.full"] = "{}.{}".format(*inventory.cuda_version)
        labels["nvidia.com/cuda.runtime-version.major"] = str(inventory.cuda_version[0])
    return labels


def _commonest(gpus: list[Gpu]) -> Gpu:
    names = [gpu.product_name for gpu in gpus]
    return max(gpus, key=lambda gpu: (names.count(gpu.product_name), -gpu.minor))


def _value(text: str) -> str:
    """Give a text as a label may have it: 63 characters, letters or digits at both ends."""
    return _NOT_VALUE.sub("-", text)[:63].strip("-._")
