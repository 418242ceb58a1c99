"""Who a device is: names, numbers, places, modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.memory import Status, check_version, fill, number, put, put_text, target
from dra.sim.nvml.models import ADDRESSING_ATS, AMPERE
from dra.sim.nvml.registry import nvml
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

MIB = 1 << 20
_BUS_PCIE = 2


@nvml(mig=True)
def nvmlDeviceGetName(lib: SimulatedNvml, device: Device, buffer: Any, length: Any) -> None:
    """Give the product name, with the profile for a MIG device."""
    name = device.model.name
    if device.instance is not None:
        profile = lib.table(device).by_id(device.instance.profile_id)
        name += f" MIG {profile.name}" if profile else ""
    put_text(buffer, length, name)


@nvml(mig=True)
def nvmlDeviceGetUUID(lib: SimulatedNvml, device: Device, buffer: Any, length: Any) -> None:
    """Give `GPU-…` or `MIG-…`."""
    from dra.sim.nvml.library import mig_uuid

    text = device.gpu.uuid
    if device.instance is not None and device.compute is not None:
        text = mig_uuid(text, device.instance.gi, device.compute.ci)
    put_text(buffer, length, text)


@nvml()
def nvmlDeviceGetMinorNumber(lib: SimulatedNvml, device: Device, minor: Any) -> None:
    """Give the N of /dev/nvidiaN."""
    put(minor, device.slot.minor)


@nvml(mig=True)
def nvmlDeviceGetIndex(lib: SimulatedNvml, device: Device, index: Any) -> None:
    """Give the position among the GPUs, or of a MIG device on its GPU."""
    put(index, device.compute.index if device.compute else lib.enumerated.index(device.gpu.uuid))


@nvml()
def nvmlDeviceGetSerial(lib: SimulatedNvml, device: Device, buffer: Any, length: Any) -> None:
    """Give the board's serial number."""
    put_text(buffer, length, device.slot.serial)


@nvml()
def nvmlDeviceGetModuleId(lib: SimulatedNvml, device: Device, module: Any) -> None:
    """Give the GPU's number on the baseboard."""
    if not device.model.nvlinks:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    put(module, device.slot.module_id)


@nvml()
def nvmlDeviceGetBoardId(lib: SimulatedNvml, device: Device, board: Any) -> None:
    """Give a number that differs from board to board."""
    put(board, device.slot.pci_address.bus << 8)


@nvml(mig=True)
def nvmlDeviceGetBrand(lib: SimulatedNvml, device: Device, brand: Any) -> None:
    """Give the brand."""
    put(brand, device.model.brand)


@nvml(mig=True)
def nvmlDeviceGetArchitecture(lib: SimulatedNvml, device: Device, architecture: Any) -> None:
    """Give the architecture."""
    put(architecture, device.model.architecture)


@nvml(mig=True)
def nvmlDeviceGetCudaComputeCapability(lib: SimulatedNvml, device: Device, major: Any, minor: Any) -> None:
    """Give the compute capability."""
    put(major, device.model.compute_capability[0])
    put(minor, device.model.compute_capability[1])


@nvml()
def nvmlDeviceGetVbiosVersion(lib: SimulatedNvml, device: Device, buffer: Any, length: Any) -> None:
    """Give the VBIOS version."""
    put_text(buffer, length, "96.00.9F.00.01")


@nvml()
def nvmlDeviceGetGspFirmwareVersion(lib: SimulatedNvml, device: Device, buffer: Any) -> None:
    """Give the version of the GSP firmware, which is the driver's."""
    target(buffer).value = lib.store.read().module_version.encode()


@nvml()
def nvmlDeviceGetNumGpuCores(lib: SimulatedNvml, device: Device, cores: Any) -> None:
    """Give the number of CUDA cores."""
    put(cores, device.model.multiprocessors * device.model.cores_per_multiprocessor)


@nvml()
def nvmlDeviceGetMemoryBusWidth(lib: SimulatedNvml, device: Device, width: Any) -> None:
    """Give the width of the memory bus in bits."""
    put(width, device.model.bus_width)


@nvml()
def nvmlDeviceGetBusType(lib: SimulatedNvml, device: Device, bus: Any) -> None:
    """Give the kind of bus."""
    put(bus, _BUS_PCIE)


@nvml()
def nvmlDeviceGetVirtualizationMode(lib: SimulatedNvml, device: Device, mode: Any) -> None:
    """Give the virtualisation mode: none."""
    put(mode, pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE)


def pci_values(address: PciAddress) -> dict[str, Any]:
    """Give the fields of nvmlPciInfo_t that follow from an address."""
    return {
        "busIdLegacy": f"{address.domain & 0xFFFF:04X}:{address.bus:02X}:{address.device:02X}.{address.function}",
        "busId": f"{address.domain:08X}:{address.bus:02X}:{address.device:02X}.{address.function}",
        "domain": address.domain,
        "bus": address.bus,
        "device": address.device,
    }


@nvml()
def nvmlDeviceGetPciInfo_v3(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give address and ids on the bus."""
    fill(
        target(info),
        pciDeviceId=device.model.pci_device,
        pciSubSystemId=device.model.pci_subsystem,
        **pci_values(device.slot.pci_address),
    )


@nvml(since=535)
def nvmlDeviceGetPciInfoExt(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give what nvmlDeviceGetPciInfo_v3 gives, and the class: a 3D controller."""
    structure = target(info)
    check_version(structure, pynvml.nvmlPciInfoExt_v1)
    values = pci_values(device.slot.pci_address)
    values.pop("busIdLegacy")
    fill(
        structure,
        pciDeviceId=device.model.pci_device,
        pciSubSystemId=device.model.pci_subsystem,
        baseClass=3,
        subClass=2,
        **values,
    )


@nvml(since=575)  # which release brought it is not confirmed
def nvmlDeviceGetAddressingMode(lib: SimulatedNvml, device: Device, mode: Any) -> None:
    """Give how the GPU reaches pageable memory: none, HMM or ATS."""
    structure = target(mode)
    check_version(structure, pynvml.nvmlDeviceAddressingMode_v1)
    if device.model.addressing_mode is None:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    structure.value = device.model.addressing_mode


@nvml()
def nvmlDeviceGetNumaNodeId(lib: SimulatedNvml, device: Device, node: Any) -> None:
    """Give the NUMA node that the GPU's own memory is, on coherent machines only."""
    if device.model.addressing_mode != ADDRESSING_ATS or device.model.memory_mib is None:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    put(node, lib.machine.numa_nodes + 8 * device.slot.minor)


@nvml()
def nvmlDeviceGetMemoryAffinity(
    lib: SimulatedNvml, device: Device, size: Any, nodes: Any, scope: Any
) -> None:
    """Give the NUMA nodes near the GPU as a bit set."""
    near = device.slot.numa_node
    array = target(nodes)
    for word in range(number(size)):
        array[word] = (1 << near % 64) if near >= 0 and near // 64 == word else 0
    if near < 0:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)


@nvml()
def nvmlDeviceGetPersistenceMode(lib: SimulatedNvml, device: Device, mode: Any) -> None:
    """Give the persistence mode."""
    put(mode, int(device.gpu.persistence))


@nvml()
def nvmlDeviceSetPersistenceMode(lib: SimulatedNvml, device: Device, mode: Any) -> None:
    """Set the persistence mode."""
    wanted = bool(number(mode))
    lib.change(device, lambda gpu: setattr(gpu, "persistence", wanted))


@nvml()
def nvmlDeviceGetComputeMode(lib: SimulatedNvml, device: Device, mode: Any) -> None:
    """Give the compute mode."""
    put(mode, device.gpu.compute_mode)


@nvml()
def nvmlDeviceSetComputeMode(lib: SimulatedNvml, device: Device, mode: Any) -> None:
    """Set the compute mode. Exclusive thread no longer exists; with MIG only the default is possible."""
    wanted = number(mode)
    if wanted == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if wanted not in range(pynvml.NVML_COMPUTEMODE_COUNT):
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if device.gpu.mig_current and wanted != pynvml.NVML_COMPUTEMODE_DEFAULT:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    lib.change(device, lambda gpu: setattr(gpu, "compute_mode", wanted))


@nvml(mig=True)
def nvmlDeviceGetMemoryInfo(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give total, free and used; the reserved part counts as used."""
    total, reserved, used = memory_of(lib, device)
    fill(target(info), total=total, free=total - reserved - used, used=reserved + used)


@nvml(mig=True)
def nvmlDeviceGetMemoryInfo_v2(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give total, reserved, free and used apart."""
    structure = target(info)
    check_version(structure, pynvml.nvmlMemory_v2)
    total, reserved, used = memory_of(lib, device)
    fill(structure, total=total, reserved=reserved, free=total - reserved - used, used=used)


@nvml(mig=True)
def nvmlDeviceGetBAR1MemoryInfo(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give the BAR1 aperture."""
    total = 64 * 1024 * MIB if device.model.architecture >= AMPERE else 256 * MIB
    used = 16 * MIB
    fill(target(info), bar1Total=total, bar1Used=used, bar1Free=total - used)


def memory_of(lib: SimulatedNvml, device: Device) -> tuple[int, int, int]:
    """Give total, reserved and used bytes of a GPU or a MIG device.

    Raises:
        Status: NOT_SUPPORTED where the memory is the system's.
    """
    processes = device.gpu.processes
    if device.instance is not None:
        profile = lib.table(device).by_id(device.instance.profile_id)
        total = (profile.memory_mib if profile else 0) * MIB
        used = sum(process.memory_bytes for process in processes if process.gi == device.instance.gi)
        return total, 0, min(used + 12 * MIB, total)
    if device.model.memory_mib is None:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    total, reserved = device.model.memory_mib * MIB, device.model.reserved_mib * MIB
    used = sum(process.memory_bytes for process in processes)
    return total, reserved, min(used, total - reserved)
