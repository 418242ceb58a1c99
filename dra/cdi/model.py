"""What a CDI spec is made of, as values: nodes, mounts, devices wanted, what the node has, and the options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from dra.host.driver_files import DriverFiles
from dra.host.driver_lists import DEFAULT_CAPABILITIES
from dra.values import PciAddress

SpecDict: TypeAlias = dict[str, Any]
Exposure = Literal["auto", "hooks", "soname", "ld-library-path"]
EXPOSURES: tuple[Exposure, ...] = ("auto", "hooks", "soname", "ld-library-path")


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device for a container.

    `path` is the container's, `host_path` the host's spelling, empty where it is the same. `mode` are the
    permission bits, `gid` the owning group (0 leaves it to the engine).
    """

    path: str
    major: int
    minor: int
    mode: int = 0o666
    gid: int = 0
    host_path: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount: `host_path` in the host's spelling, options in the order they are written."""

    host_path: str
    container_path: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VfioAccess:
    """How a function that is passed through is reached.

    `group` is the number of its IOMMU group; None for access for monitoring, which opens nothing: a function has one
    user. `iommufd`: by a node of its own, where the kernel has one for each function of the claim. `api_device`: the
    container gets the node of the interface too.
    """

    group: int | None
    iommufd: bool = False
    api_device: bool = False


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """A device that a claim was given.

    `name` is its name in the pool (`gpu-0`). The extras are what other configuration adds: capability nodes of a MIG
    device, the pipe directory of MPS. `admin` changes nothing here: access for monitoring gets the same nodes.
    `mig_instances` are the ids of GPU instance and compute instance of a MIG device: the renderer makes its capability
    nodes of them. `gpu_minor` is None for a function that is passed through, which has `vfio` instead.
    """

    name: str
    gpu_minor: int | None
    pci_address: PciAddress
    share_id: str | None = None
    admin: bool = False
    extra_nodes: tuple[DeviceNode, ...] = ()
    extra_env: tuple[str, ...] = ()
    extra_mounts: tuple[Mount, ...] = ()
    mig_instances: tuple[int, int] | None = None
    vfio: VfioAccess | None = None


class WantedDevice(Protocol):
    """What a caller must be able to say of a device; `CdiDevice` does, with extras."""

    @property
    def name(self) -> str: ...

    @property
    def gpu_minor(self) -> int | None: ...

    @property
    def pci_address(self) -> PciAddress: ...

    @property
    def share_id(self) -> str | None: ...

    @property
    def admin(self) -> bool: ...

    @property
    def mig_instances(self) -> tuple[int, int] | None: ...

    @property
    def extra_env(self) -> tuple[str, ...]: ...

    @property
    def extra_mounts(self) -> tuple[Mount, ...]: ...

    @property
    def vfio(self) -> VfioAccess | None: ...


@dataclass(frozen=True, slots=True)
class GpuNodes:
    """The nodes of one GPU: its own, and those of nvidia-drm with the links that name them by PCI path."""

    node: DeviceNode
    drm: tuple[DeviceNode, ...] = ()
    # (target, link), as the container sees them.
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What the node has at this moment, as far as a spec names it.

    `control_nodes` are /dev/nvidiactl and the like, `gpus` by minor number; `hook_path` is the host's path of the
    hook program, empty where there is none.
    """

    driver: DriverFiles
    driver_root_host: str
    control_nodes: tuple[DeviceNode, ...]
    gpus: dict[int, GpuNodes]
    hook_path: str = ""


@dataclass(frozen=True, slots=True)
class CdiOptions:
    """What an administrator may choose.

    Args:
        driver: name of the DRA driver; the kind is `k8s.<driver>/claim`.
        exposure: how libraries reach the loader. `auto`: by hooks where the hook program is there, else by mounts
            under every name (`soname`).
        capabilities: which of the driver's files a container gets; `display` adds X11 files and the chmod and
            application-profile hooks.
        sockets: whether nvidia-persistenced's and the fabric manager's sockets are mounted (gVisor cannot).
        hook_path: host path of nvidia-cdi-hook (or nvidia-ctk); empty: the usual places.
        library_dirs: directories of the container for `soname`; empty: those of Debian and of Red Hat, since the
            image is not known.
    """

    driver: str = "gpu.nvidia.com"
    exposure: Exposure = "auto"
    capabilities: frozenset[str] = field(default=DEFAULT_CAPABILITIES)
    sockets: bool = True
    hook_path: str = ""
    library_dirs: tuple[str, ...] = ()
