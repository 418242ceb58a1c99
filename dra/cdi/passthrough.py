"""A claim's CDI spec for functions that are passed through: the nodes of VFIO, and nothing of NVIDIA's driver.

Two interfaces lead to a function: the node of its IOMMU group (`/dev/vfio/<group>`), used with `/dev/vfio/vfio`; and, in
newer kernels, a node of its own (`/dev/vfio/devices/vfioN`), used with `/dev/iommu`. A process cannot mix them, so that
a claim has one of them for all of its functions.

Source: kernel documentation, driver-api/vfio (VFIO usage example, IOMMUFD and vfio_iommu_type1).
"""

from __future__ import annotations

from collections.abc import Sequence

from dra.cdi.checked import CheckedSpec, as_checked
from dra.cdi.edits import bare_edits, device_nodes
from dra.cdi.model import DeviceNode, SpecDict, VfioAccess, WantedDevice
from dra.cdi.nodes import read_node
from dra.cdi.spec import device_name, kind_of, version_for
from dra.errors import BugError, StackError
from dra.host.paths import HostPaths
from dra.host.pci_binding import PciBus

_CONTAINER, _IOMMU = "/dev/vfio/vfio", "/dev/iommu"


def passthrough_spec(
    paths: HostPaths, claim_uid: str, devices: Sequence[WantedDevice], *, driver: str
) -> CheckedSpec:
    """Give the spec of a claim whose devices are all passed through.

    Raises:
        StackError: DRA-VFIO-NODE-MISSING: retryable, a node is not there.
        BugError: DRA-CDI-DEVICES: two different devices under one name; DRA-CDI-INVALID.
    """
    used = [(each, each.vfio) for each in devices if each.vfio is not None and each.vfio.group is not None]
    accesses = [access for _, access in used]
    iommufd = bool(accesses) and all(access.iommufd for access in accesses) and _has_iommufd(paths, used)
    made: dict[str, SpecDict] = {}
    for device in devices:
        name = device_name(claim_uid, device.name, device.share_id)
        entry = {"name": name, "containerEdits": bare_edits() | device_nodes(_nodes(paths, device, iommufd))}
        if made.setdefault(name, entry) != entry:
            raise BugError("DRA-CDI-DEVICES", f"two different devices would be named {name}")
    api = any(access.api_device for access in accesses)
    spec: SpecDict = {
        "cdiVersion": "",
        "kind": kind_of(driver),
        "devices": [made[name] for name in sorted(made)],
        "containerEdits": bare_edits() | device_nodes([_api_node(paths, iommufd)] if api else []),
    }
    spec["cdiVersion"] = version_for(spec)
    return as_checked(spec)


def _has_iommufd(paths: HostPaths, used: Sequence[tuple[WantedDevice, VfioAccess]]) -> bool:
    bus = PciBus(paths)
    return _find(paths, _IOMMU) is not None and all(
        bus.function(device.pci_address).vfio_device for device, _ in used
    )


def _nodes(paths: HostPaths, device: WantedDevice, iommufd: bool) -> list[DeviceNode]:
    if device.vfio is None or device.vfio.group is None:
        return []
    name = str(device.vfio.group)
    if iommufd:
        name = f"devices/{PciBus(paths).function(device.pci_address).vfio_device}"
    return [_need(paths, f"/dev/vfio/{name}", device.name)]


def _api_node(paths: HostPaths, iommufd: bool) -> DeviceNode:
    return _need(paths, _IOMMU if iommufd else _CONTAINER)


def _need(paths: HostPaths, path: str, device: str = "") -> DeviceNode:
    found = _find(paths, path)
    if found is None:
        raise StackError(
            "DRA-VFIO-NODE-MISSING",
            f"the device node {path} is missing" + (f", which leads to device {device}" if device else ""),
            remedy="Look whether the vfio modules are loaded (modprobe vfio-pci) and what dmesg says of vfio; the call is "
            "retried.",
            node=path,
        )
    return found


def _find(paths: HostPaths, path: str) -> DeviceNode | None:
    """Give a node of the host's /dev: there also where the NVIDIA driver has a root with a /dev of its own."""
    return read_node(paths.dev.parent, path, stand_ins=paths.stand_in_nodes)
