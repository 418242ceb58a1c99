"""NVLink, fabric and topology."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.functions.device import pci_values
from dra.sim.nvml.memory import Status, check_version, fill, number, put, target
from dra.sim.nvml.models import HOPPER
from dra.sim.nvml.registry import nvml
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

# As many links make a GPU part of a switched fabric.
_FABRIC_LINKS = 18
_SWITCH = PciAddress(0, 0x05, 0, 0)
_P2P_OK, _P2P_NOT_SUPPORTED = 0, 5


def _check_link(device: Device, link: Any) -> int:
    if not device.model.nvlinks:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if not 0 <= number(link) < device.model.nvlinks:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return number(link)


def _connected(lib: SimulatedNvml, device: Device) -> bool:
    """Say whether anything is at the other end: a switch, or another GPU with links."""
    others = [slot for slot in lib.machine.gpus if slot.model.nvlinks and slot.uuid != device.slot.uuid]
    return bool(lib.machine.nvswitches or lib.machine.fabric_cluster or others)


@nvml()
def nvmlDeviceGetNvLinkState(lib: SimulatedNvml, device: Device, link: Any, active: Any) -> None:
    """Say whether a link is up."""
    position = _check_link(device, link)
    put(active, int(_connected(lib, device) and position not in device.gpu.nvlinks_down))


@nvml()
def nvmlDeviceGetNvLinkVersion(lib: SimulatedNvml, device: Device, link: Any, version: Any) -> None:
    """Give the NVLink version (NVML_NVLINK_VERSION_*)."""
    _check_link(device, link)
    put(version, {3: 5, 4: 6, 5: 7}[device.model.nvlink_version])


@nvml()
def nvmlDeviceGetNvLinkCapability(
    lib: SimulatedNvml, device: Device, link: Any, capability: Any, result: Any
) -> None:
    """Say whether a link can do something; all can."""
    _check_link(device, link)
    put(result, 1)


@nvml()
def nvmlDeviceGetNvLinkErrorCounter(
    lib: SimulatedNvml, device: Device, link: Any, counter: Any, count: Any
) -> None:
    """Give an error counter of a link."""
    _check_link(device, link)
    put(count, 0)


@nvml()
def nvmlDeviceGetNvLinkRemoteDeviceType(lib: SimulatedNvml, device: Device, link: Any, kind: Any) -> None:
    """Say what is at the other end."""
    _check_link(device, link)
    switched = lib.machine.nvswitches or lib.machine.fabric_cluster
    put(kind, pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switched else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)


@nvml()
def nvmlDeviceGetNvLinkRemotePciInfo_v2(lib: SimulatedNvml, device: Device, link: Any, info: Any) -> None:
    """Give the address of the other end: a switch's, or that of the next GPU with links."""
    position = _check_link(device, link)
    if lib.machine.nvswitches:
        address = PciAddress(0, _SWITCH.bus + position % lib.machine.nvswitches, 0, 0)
        fill(target(info), pciDeviceId=0x22A310DE, pciSubSystemId=0, **pci_values(address))
        return
    others = [slot for slot in lib.machine.gpus if slot.model.nvlinks and slot.uuid != device.slot.uuid]
    if not others:
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)
    other = others[position % len(others)]
    fill(
        target(info), pciDeviceId=other.model.pci_device, pciSubSystemId=other.model.pci_subsystem,
        **pci_values(other.pci_address),
    )  # fmt: skip


def _fabric_values(lib: SimulatedNvml, device: Device) -> dict[str, Any]:
    if device.model.architecture < HOPPER or device.model.nvlinks < _FABRIC_LINKS:
        return {"clusterUuid": bytes(16), "status": 0, "cliqueId": 0,
                "state": pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED}  # fmt: skip
    cluster = uuid.UUID(lib.machine.fabric_cluster).bytes if lib.machine.fabric_cluster else bytes(16)
    return {
        "clusterUuid": cluster,
        "status": device.gpu.fabric_status,
        "cliqueId": lib.machine.fabric_clique,
        "state": device.gpu.fabric_state,
    }


def _store_fabric(structure: Any, values: dict[str, Any]) -> None:
    for position, byte in enumerate(values.pop("clusterUuid")):
        structure.clusterUuid[position] = byte
    fill(structure, **values)


@nvml()
def nvmlDeviceGetGpuFabricInfo(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give the state of the GPU in its NVLink domain."""
    _store_fabric(target(info), _fabric_values(lib, device))


@nvml(since=535)
def nvmlDeviceGetGpuFabricInfoV(lib: SimulatedNvml, device: Device, info: Any) -> None:
    """Give the state of the GPU in its NVLink domain, and its health."""
    structure = target(info)
    version = check_version(structure, pynvml.nvmlGpuFabricInfo_v2, pynvml.nvmlGpuFabricInfo_v3)
    values = _fabric_values(lib, device)
    supported = values["state"] != pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    # Degraded bandwidth and the rest of the mask: 2 says no, 1 says yes, 0 not supported.
    mask = 0
    if supported:
        mask = (1 if device.gpu.fabric_unhealthy else 2) | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8
    values["healthMask"] = mask
    if version == pynvml.nvmlGpuFabricInfo_v3:
        unhealthy = pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
        healthy = pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY
        values["healthSummary"] = (unhealthy if device.gpu.fabric_unhealthy else healthy) if supported else 0
    _store_fabric(structure, values)


@nvml()
def nvmlDeviceGetTopologyCommonAncestor(lib: SimulatedNvml, device: Device, other: Any, level: Any) -> None:
    """Say how far two GPUs are from each other on PCIe."""
    first, second = device.slot, lib.device(other).slot
    if first.uuid == second.uuid:
        put(level, pynvml.NVML_TOPOLOGY_INTERNAL)
    elif first.root == second.root and first.bridge and first.bridge == second.bridge:
        put(level, pynvml.NVML_TOPOLOGY_SINGLE)
    elif first.root == second.root:
        put(level, pynvml.NVML_TOPOLOGY_HOSTBRIDGE)
    elif first.numa_node == second.numa_node:
        put(level, pynvml.NVML_TOPOLOGY_NODE)
    else:
        put(level, pynvml.NVML_TOPOLOGY_SYSTEM)


@nvml()
def nvmlDeviceGetP2PStatus(lib: SimulatedNvml, device: Device, other: Any, index: Any, status: Any) -> None:
    """Say whether two GPUs may read each other's memory; not in MIG mode."""
    peer = lib.device(other)
    linked = (
        device.model.nvlinks and peer.model.nvlinks and not (device.gpu.mig_current or peer.gpu.mig_current)
    )
    put(status, _P2P_OK if linked else _P2P_NOT_SUPPORTED)
