"""What the generated files have to say: the state of a node as far as `/proc`, `/sys` and `/dev` show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dra.sim.profiles import GpuSlot, MachineProfile

LAYOUTS = ("host", "operator", "cos", "debian-current", "ldcache")

KERNEL_RELEASE = "6.8.0-1029-nvidia"
# As the kernel hands them out when the modules are loaded.
VFIO_MAJORS = {"vfio": 243, "vfio-dev": 242}
_DRIVER_ROOTS = {"operator": "/run/nvidia/driver", "cos": "/home/kubernetes/bin/nvidia"}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One moment of a node.

    `gpus` are those on the bus now; `driver_version` is that of the kernel module, empty when it is not
    loaded. `mig` lists (gpu minor, GPU instance id, compute instance ids) of what exists. `majors` are the
    dynamic device majors by name. `pci_drivers` says which driver has a GPU, by UUID, where it is not NVIDIA's (empty:
    none), `overrides` which one it was told to take, `vfs` how many virtual functions it has. `vfio_drivers` are loaded.
    """

    machine: MachineProfile
    gpus: tuple[GpuSlot, ...]
    driver_version: str
    boot_id: str
    mig: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    majors: dict[str, int] = field(default_factory=dict)
    pci_drivers: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    vfs: dict[str, int] = field(default_factory=dict)
    vfio_drivers: tuple[str, ...] = ()
    iommu: bool = True
    iommufd: bool = True

    @property
    def loaded(self) -> bool:
        """Say whether the kernel module is loaded."""
        return bool(self.driver_version)

    @property
    def driven(self) -> tuple[GpuSlot, ...]:
        """Give the GPUs that NVIDIA's driver has, or would have if it were loaded."""
        return tuple(slot for slot in self.gpus if slot.uuid not in self.pci_drivers)

    def pci_driver_of(self, slot: GpuSlot) -> str:
        """Give the driver that a GPU's PCI function is bound to; empty: none."""
        return self.pci_drivers.get(slot.uuid, "nvidia" if self.loaded else "")


def driver_root_of(layout: str) -> str:
    """Give the driver root of a layout, as the host sees it."""
    return _DRIVER_ROOTS.get(layout, "/")


def dev_root_of(layout: str) -> str:
    """Give the directory that holds `dev/`: the driver container has its own, everything else the host's."""
    return "/run/nvidia/driver" if layout == "operator" else "/"


def default_majors(driver_version: str) -> dict[str, int]:
    """Give device majors as a kernel would hand them out; the name of 195 changed in 550.40."""
    numbers = tuple(int(part) for part in driver_version.split(".") if part.isdigit())
    frontend = "nvidia" if numbers >= (550, 40) else "nvidia-frontend"
    return {
        frontend: 195,
        "nvidia-modeset": 195,
        "nvidiactl": 195,
        "nvidia-caps-imex-channels": 234,
        "nvidia-caps": 237,
        "nvidia-nvswitch": 505,
        "nvidia-uvm": 510,
    }
