"""What a node has, as frozen values.

An `Inventory` is one look at the hardware: it says what NVML and sysfs said, nothing about claims, taints or
how it is published. Two inventories that compare equal publish the same pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dra.values import PciAddress

# The subject of problems that are about the node, not about one GPU.
NODE = "node"


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A GPU instance profile with its placements on one GPU model.

    `name` is NVML's (`1g.5gb`, `1g.5gb+me`). `memory_mib` is what NVML reports. `placements` are (start, size)
    in memory slices. Engine counts are per instance.
    Source: nvmlDeviceGetGpuInstanceProfileInfoV, nvmlDeviceGetGpuInstancePossiblePlacements_v2.
    """

    name: str
    profile_id: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg_engines: int
    ofa_engines: int
    placements: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A MIG device that exists: one GPU instance with one compute instance over all of it.

    `ours`: this driver made it for a claim, as `dra.inventory.ownership` found in the records; else somebody's hand.
    """

    uuid: str
    profile: MigProfile
    gpu_instance_id: int
    compute_instance_id: int
    start: int
    size: int
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU.

    `minor` names the device node (`/dev/nvidia<minor>`) and the device (`gpu-<minor>`); NVML's index moves
    when GPUs come and go and is not kept. `memory_bytes` is None where NVML reports none (integrated memory).
    `numa_node` is None where the kernel says -1. `unusable` is a reason for which the device must not be
    handed out although it is listed (NVML answered only partly), empty when fine. `mig_mode_ours`: this driver
    switched MIG mode on. `persistence`: it stays awake when nobody uses it.
    """

    minor: int
    uuid: str
    pci_address: PciAddress
    product_name: str
    brand: str
    architecture: str
    compute_capability: tuple[int, int]
    memory_bytes: int | None
    addressing_mode: str | None = None
    numa_node: int | None = None
    pcie_root: str | None = None
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_profiles: tuple[MigProfile, ...] = ()
    mig_devices: tuple[MigDevice, ...] = ()
    unusable: str = ""
    mig_mode_ours: bool = False
    persistence: bool = True


@dataclass(frozen=True, slots=True)
class VfioFunction:
    """A GPU as a virtual machine may get it: the PCI function itself, without NVIDIA's driver.

    `index` names the device (`gpu-vfio-<index>`): the position among the GPUs on the bus, whatever drivers they have.
    `driver` is the kernel's: `nvidia`, or one of the vfio family where `on_vfio` says so. `iommu_group` also names `/dev/vfio/<group>`;
    `vfio_device` (`vfio3` below `/dev/vfio/devices`) is empty unless it is bound to a vfio driver and the kernel has
    IOMMUFD, whose `/dev/iommu` is there where `iommufd` says so. `addressable_bytes` is the size of its memory BARs.
    `gpu_minor` is the `Gpu` that it is while NVIDIA's driver has it, None otherwise: its number is then not known.

    Source: sysfs (`dra.host.pci_binding`).
    """

    index: int
    pci_address: PciAddress
    driver: str
    iommu_group: int
    vendor_id: int
    device_id: int
    product_name: str
    addressable_bytes: int
    on_vfio: bool = False
    vfio_device: str = ""
    iommufd: bool = False
    gpu_minor: int | None = None
    numa_node: int | None = None
    pcie_root: str | None = None


@dataclass(frozen=True, slots=True)
class ScanProblem:
    """Something a scan could not read: which GPU (a PCI address, a UUID or `index 3`), the error's code and text."""

    subject: str
    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """One look at a node. `gpus` are ordered by PCI address.

    `driver_version` is NVML's text (`580.95.05`), empty when no driver answered; `cuda_version` is
    (major, minor) of the driver, None when unknown. `vfio` are the GPUs that may be passed through, by PCI address:
    none unless the feature gate PassthroughSupport is on.
    """

    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    problems: tuple[ScanProblem, ...] = field(default=())
    vfio: tuple[VfioFunction, ...] = ()
