"""GPUs and MIG devices as the API's devices: the names, types and values of NVIDIA's driver. Pure.

Nothing is added to NVIDIA's domain. Where a broken GPU leaves a value unknown, zero or the empty string stands
for it: an attribute that is missing on one device makes a user's CEL expression fail for the whole node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile
from dra.inventory.names import GpuName, MigName, profile_slug
from dra.values import Quantity, Semver, normalise_version

# Bytes of a string or version attribute. Source: resource.k8s.io/v1 DeviceAttributeMaxValueLength.
MAX_STRING_BYTES = 64
STANDARD = "resource.kubernetes.io"
_MIB = 1 << 20

Attributes = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SliceProblem:
    """Something of a device that could not be published as it is, and what was done about it."""

    device: str
    field: str
    code: str
    message: str
    remedy: str = ""


def cut(text: str, *, limit: int = MAX_STRING_BYTES) -> str:
    """Cut a text to `limit` bytes of UTF-8 at the border of a character."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    return data[:limit].decode("utf-8", "ignore")


def gpu_device(gpu: Gpu, inventory: Inventory, problems: list[SliceProblem]) -> dict[str, Any]:
    """Give a whole GPU. Source: reference driver, attributes and capacities of type `gpu`."""
    name = str(GpuName(gpu.minor))
    writer = _Writer(name, problems)
    writer.text("type", "gpu")
    writer.text("uuid", gpu.uuid)
    _common(writer, gpu, inventory)
    memory = gpu.memory_bytes
    if memory is None and gpu.unusable:
        memory = 0
    # Integrated memory has no size of its own: then there is no capacity.
    capacity = {} if memory is None else {"memory": {"value": str(Quantity.of(memory, binary=True))}}
    return _device(name, writer.attributes, capacity)


def mig_name(gpu: Gpu, mig: MigDevice) -> str:
    """Give the device name of a MIG device that exists."""
    return str(MigName(gpu.minor, profile_slug(mig.profile.name), mig.profile.profile_id, mig.start))


def mig_device(
    gpu: Gpu, mig: MigDevice, inventory: Inventory, problems: list[SliceProblem]
) -> dict[str, Any]:
    """Give a MIG device that exists. Source: reference driver, static MIG."""
    name = mig_name(gpu, mig)
    writer = _Writer(name, problems)
    writer.text("type", "mig")
    writer.text("uuid", mig.uuid)
    _of_parent(writer, gpu, mig.profile, inventory)
    capacity = profile_capacity(mig.profile)
    for memory_slice in range(mig.start, mig.start + mig.size):
        capacity[f"memorySlice{memory_slice}"] = {"value": "1"}
    return _device(name, writer.attributes, capacity)


def partition_device(
    gpu: Gpu, profile: MigProfile, start: int, *, inventory: Inventory, problems: list[SliceProblem]
) -> dict[str, Any]:
    """Give a MIG device that could be made at a place. Source: reference driver, dynamic MIG.

    It has no UUID, also while it exists: what is published does not change with it.
    """
    name = str(MigName(gpu.minor, profile_slug(profile.name), profile.profile_id, start))
    writer = _Writer(name, problems)
    writer.text("type", "mig")
    _of_parent(writer, gpu, profile, inventory)
    return _device(name, writer.attributes, profile_capacity(profile))


def profile_amounts(profile: MigProfile) -> dict[str, int]:
    """Give what an instance of a MIG profile takes, by the name of the capacity; memory in bytes."""
    return {
        "memory": profile.memory_mib * _MIB,
        "multiprocessors": profile.multiprocessors,
        "copyEngines": profile.copy_engines,
        "decoders": profile.decoders,
        "encoders": profile.encoders,
        "jpegEngines": profile.jpeg_engines,
        "ofaEngines": profile.ofa_engines,
    }


def profile_capacity(profile: MigProfile) -> dict[str, dict[str, Any]]:
    """Give the capacities that follow from a MIG profile."""
    return {
        name: {"value": str(Quantity.of(amount, binary=True))}
        for name, amount in profile_amounts(profile).items()
    }


def _of_parent(writer: _Writer, gpu: Gpu, profile: MigProfile, inventory: Inventory) -> None:
    writer.text("parentUUID", gpu.uuid)
    writer.text("profile", profile.name)
    _common(writer, gpu, inventory)


def _device(name: str, attributes: Attributes, capacity: dict[str, dict[str, Any]]) -> dict[str, Any]:
    device: dict[str, Any] = {"name": name, "attributes": attributes}
    if capacity:
        device["capacity"] = capacity
    return device


def _common(writer: _Writer, gpu: Gpu, inventory: Inventory) -> None:
    writer.text("productName", gpu.product_name)
    writer.text("brand", gpu.brand)
    writer.text("architecture", gpu.architecture)
    writer.version("cudaComputeCapability", Semver(*gpu.compute_capability, 0))
    writer.version("driverVersion", normalise_version(inventory.driver_version), inventory.driver_version)
    cuda = inventory.cuda_version
    writer.version("cudaDriverVersion", Semver(*cuda, 0) if cuda else None)
    if gpu.addressing_mode is not None:
        writer.text("addressingMode", gpu.addressing_mode)
    writer.text(f"{STANDARD}/pciBusID", str(gpu.pci_address))
    if gpu.pcie_root is not None:
        writer.text(f"{STANDARD}/pcieRoot", gpu.pcie_root)
    if gpu.numa_node is not None:
        writer.attributes[f"{STANDARD}/numaNode"] = {"int": gpu.numa_node}


class _Writer:
    """Collects the attributes of one device, makes them fit, and reports what it had to change."""

    def __init__(self, device: str, problems: list[SliceProblem]) -> None:
        self.device = device
        self.attributes: Attributes = {}
        self._problems = problems

    def text(self, name: str, value: str) -> None:
        short = cut(value)
        if short != value:
            self._report(
                name,
                "DRA-SLICE-CUT",
                f"{value!r} is longer than {MAX_STRING_BYTES} bytes; {short!r} is published",
            )
        self.attributes[name] = {"string": short}

    def version(self, name: str, version: Semver | None, raw: str = "") -> None:
        if version is None:
            self._report(name, "DRA-SLICE-VERSION", f"{raw!r} is no version; it is left out")
            return
        self.attributes[name] = {"version": str(version)}

    def _report(self, name: str, code: str, what: str) -> None:
        self._problems.append(
            SliceProblem(self.device, name, code, f"{self.device}: attribute {name}: {what}")
        )
