"""Machine profiles: nodes as one can buy or rent them.

A profile is a constant. UUIDs and serials are computed from its name, so two nodes of one profile that must
differ pass a `salt` (a node name). Addresses and NUMA nodes are those of real machines where known; the root
complexes of the HGX machines are plausible, not confirmed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from dra.sim.nvml import models
from dra.sim.nvml.models import GpuModel
from dra.values import PciAddress

_NAMESPACE = uuid.UUID("6f1d3a52-6a0b-5a0f-9a0e-51b0c1d4e5f6")


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """One GPU in one machine.

    `minor` names `/dev/nvidia<minor>`; the NVML index is the position by PCI address. `root` is the PCI root
    complex (`pci0000:14`), `bridge` the bridge between the two, empty when the GPU hangs on the root itself.
    `numa_node` is -1 where the kernel says so. `drm` gives the card and render numbers, None when headless.
    """

    model: GpuModel
    minor: int
    pci_address: PciAddress
    root: str
    numa_node: int
    uuid: str
    serial: str
    module_id: int
    bridge: str = ""
    drm: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """A whole machine.

    `cuda_version` is as NVML gives it (13000 is 13.0). `fabric_cluster` is the NVLink domain's UUID, empty
    without a fabric; `fabric_clique` its clique. `graphics` says that the driver was installed with its
    graphics parts.
    """

    name: str
    description: str
    gpus: tuple[GpuSlot, ...]
    driver_version: str
    cuda_version: int
    architecture: str = "x86_64"
    memory_gib: int = 2048
    numa_nodes: int = 2
    nvswitches: int = 0
    fabric_cluster: str = ""
    fabric_clique: int = 0
    graphics: bool = False

    @property
    def nvml_version(self) -> str:
        """Give what nvmlSystemGetNVMLVersion says: the CUDA major, then the driver version."""
        return f"{self.cuda_version // 1000}.{self.driver_version}"

    @property
    def library_dir(self) -> str:
        """Give the multiarch library directory of this architecture."""
        return f"/usr/lib/{self.architecture}-linux-gnu"


def cuda_version_of(driver_version: str) -> int:
    """Give the CUDA version a driver branch supports, as NVML writes it. Source: CUDA release notes, table 3."""
    branch = int(driver_version.split(".", 1)[0])
    known = ((590, 13010), (580, 13000), (575, 12090), (570, 12080), (565, 12070), (560, 12060), (555, 12050),
             (550, 12040), (545, 12030), (535, 12020), (525, 12000))  # fmt: skip
    return next((cuda for first, cuda in known if branch >= first), 11000)


def _uuid(text: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, text))


def _slots(
    machine: str,
    model: GpuModel | tuple[GpuModel, ...],
    places: tuple[tuple[str, str, int], ...],
    *,
    minors: tuple[int, ...] = (),
    drm: bool = False,
) -> tuple[GpuSlot, ...]:
    """Lay GPUs on (address, root[>bridge], NUMA node) places; minors default to the position."""
    slots: list[GpuSlot] = []
    for index, (address, where, numa) in enumerate(places):
        root, _, bridge = where.partition(">")
        seed = f"{machine}/{index}"
        slots.append(
            GpuSlot(
                model=model[index] if isinstance(model, tuple) else model,
                minor=minors[index] if minors else index,
                pci_address=PciAddress.parse(address),
                root=root,
                numa_node=numa,
                uuid=f"GPU-{_uuid(seed)}",
                serial=f"{16500 + index}{uuid.uuid5(_NAMESPACE, seed).int % 10**8:08d}",
                module_id=index + 1,
                bridge=bridge,
                # card0 is the board management controller's
                drm=(index + 1, 128 + index) if drm else None,
            )
        )
    return tuple(slots)


# Two A100 share a PCIe switch, as on the real DGX A100 (NUMA 3,3,1,1,7,7,5,5).
_DGX_A100_PLACES = (
    ("0000:07:00.0", "pci0000:00>0000:00:01.1", 3), ("0000:0f:00.0", "pci0000:00>0000:00:01.1", 3),
    ("0000:47:00.0", "pci0000:40>0000:40:01.1", 1), ("0000:4e:00.0", "pci0000:40>0000:40:01.1", 1),
    ("0000:87:00.0", "pci0000:80>0000:80:01.1", 7), ("0000:90:00.0", "pci0000:80>0000:80:01.1", 7),
    ("0000:b7:00.0", "pci0000:a0>0000:a0:03.1", 5), ("0000:bd:00.0", "pci0000:a0>0000:a0:03.1", 5),
)  # fmt: skip
_DGX_H100_PLACES = (
    ("0000:1b:00.0", "pci0000:15>0000:15:01.0", 0), ("0000:43:00.0", "pci0000:3d>0000:3d:01.0", 0),
    ("0000:52:00.0", "pci0000:4c>0000:4c:01.0", 0), ("0000:61:00.0", "pci0000:5b>0000:5b:01.0", 0),
    ("0000:9d:00.0", "pci0000:97>0000:97:01.0", 1), ("0000:c3:00.0", "pci0000:bd>0000:bd:01.0", 1),
    ("0000:d1:00.0", "pci0000:cb>0000:cb:01.0", 1), ("0000:df:00.0", "pci0000:d9>0000:d9:01.0", 1),
)  # fmt: skip
_HGX_H200_PLACES = (
    ("0000:19:00.0", "pci0000:15>0000:15:01.0", 0), ("0000:3b:00.0", "pci0000:37>0000:37:01.0", 0),
    ("0000:4c:00.0", "pci0000:48>0000:48:01.0", 0), ("0000:5d:00.0", "pci0000:59>0000:59:01.0", 0),
    ("0000:9b:00.0", "pci0000:97>0000:97:01.0", 1), ("0000:bb:00.0", "pci0000:b7>0000:b7:01.0", 1),
    ("0000:cb:00.0", "pci0000:c7>0000:c7:01.0", 1), ("0000:db:00.0", "pci0000:d7>0000:d7:01.0", 1),
)  # fmt: skip
_A2_MEGAGPU_PLACES = tuple(
    (f"0000:{0x10 + 2 * i:02x}:00.0", f"pci0000:{0x10 + 8 * (i // 4):02x}", i // 8) for i in range(16)
)

_PROFILES = (
    MachineProfile(
        "dgx-a100", "DGX A100, 8 x A100-SXM4-40GB", _slots("dgx-a100", models.A100_SXM4_40GB, _DGX_A100_PLACES),
        "580.95.05", 13000, memory_gib=1007, numa_nodes=8, nvswitches=6,
    ),
    MachineProfile(
        "dgx-h100", "DGX H100, 8 x H100 80GB HBM3",
        _slots("dgx-h100", models.H100_SXM5_80GB, _DGX_H100_PLACES, drm=True),
        "580.126.20", 13000, nvswitches=4, graphics=True,
    ),
    MachineProfile(
        "hgx-h200", "HGX H200 in an 8-way server", _slots("hgx-h200", models.H200_SXM_141GB, _HGX_H200_PLACES),
        "570.158.01", 12080, nvswitches=4,
    ),
    MachineProfile(
        # Minors follow the order in which the driver probed the boards, not the bus.
        "hgx-b200", "HGX B200 in an 8-way server",
        _slots("hgx-b200", models.B200_SXM_180GB, _HGX_H200_PLACES, minors=(4, 5, 6, 7, 0, 1, 2, 3)),
        "580.105.08", 13000, memory_gib=2064,
    ),
    MachineProfile(
        "gb200", "GB200 NVL72 compute tray, 4 x GB200",
        _slots("gb200", models.GB200_186GB, (
            ("0008:01:00.0", "pci0008:00>0008:00:00.0", 0), ("0009:01:00.0", "pci0009:00>0009:00:00.0", 0),
            ("0018:01:00.0", "pci0018:00>0018:00:00.0", 1), ("0019:01:00.0", "pci0019:00>0019:00:00.0", 1),
        )),
        "580.126.20", 13000, "aarch64", 960, fabric_cluster=_uuid("nvl72/rack-1"), fabric_clique=32766,
    ),
    MachineProfile(
        "l40s-x4", "server with 4 x L40S and display nodes",
        _slots("l40s-x4", models.L40S, (
            ("0000:4a:00.0", "pci0000:48>0000:48:01.0", 0), ("0000:61:00.0", "pci0000:5f>0000:5f:01.0", 0),
            ("0000:ca:00.0", "pci0000:c8>0000:c8:01.0", 1), ("0000:e1:00.0", "pci0000:df>0000:df:01.0", 1),
        ), drm=True),
        "550.163.01", 12040, memory_gib=1024, graphics=True,
    ),
    MachineProfile(
        "t4-x1", "cloud instance with one T4", _slots("t4-x1", models.T4, (("0000:00:1e.0", "pci0000:00", -1),)),
        "535.104.05", 12020, memory_gib=16, numa_nodes=1,
    ),
    MachineProfile(
        "a100-l4", "2 x A100-PCIE-40GB and 2 x L4, minors out of order",
        _slots("a100-l4", (models.A100_PCIE_40GB, models.L4, models.A100_PCIE_40GB, models.L4), (
            ("0000:17:00.0", "pci0000:16>0000:16:02.0", 0), ("0000:31:00.0", "pci0000:30>0000:30:02.0", 0),
            ("0000:b1:00.0", "pci0000:b0>0000:b0:02.0", 1), ("0000:ca:00.0", "pci0000:c9>0000:c9:02.0", 1),
        ), minors=(2, 0, 3, 1)),
        "575.57.08", 12090, memory_gib=512,
    ),
    MachineProfile(
        "a2-megagpu-16g", "cloud instance with 16 x A100-SXM4-40GB",
        _slots("a2-megagpu-16g", models.A100_SXM4_40GB, _A2_MEGAGPU_PLACES),
        "565.57.01", 12070, memory_gib=1360,
    ),
    MachineProfile(
        "a100-80gb-x2", "2 x A100-SXM4-80GB",
        _slots("a100-80gb-x2", models.A100_SXM4_80GB, _DGX_A100_PLACES[:2]), "580.95.05", 13000, memory_gib=256, numa_nodes=8,
    ),
    MachineProfile(
        "a30-x2", "2 x A30",
        _slots("a30-x2", models.A30, (
            ("0000:65:00.0", "pci0000:64>0000:64:00.0", 0), ("0000:e3:00.0", "pci0000:e2>0000:e2:00.0", 1),
        )),
        "570.158.01", 12080, memory_gib=256,
    ),
    MachineProfile(
        "h100-nvl-x2", "2 x H100 NVL",
        _slots("h100-nvl-x2", models.H100_NVL_94GB, _DGX_H100_PLACES[:2]), "580.126.20", 13000, memory_gib=512,
    ),
    MachineProfile(
        "rtx-pro-6000-x2", "2 x RTX PRO 6000 Blackwell Server Edition",
        _slots("rtx-pro-6000-x2", models.RTX_PRO_6000_96GB, _DGX_H100_PLACES[:2], drm=True), "580.105.08", 13000,
        memory_gib=512, graphics=True,
    ),
    MachineProfile(
        "gh200", "Grace Hopper with 96 GB HBM3",
        _slots("gh200", models.GH200_96GB, (("0009:01:00.0", "pci0009:00>0009:00:00.0", 0),)),
        "570.158.01", 12080, "aarch64", 480, 1,
    ),
    MachineProfile(
        "dgx-spark", "GB10 desktop with unified memory",
        _slots("dgx-spark", models.GB10, (("000f:01:00.0", "pci000f:00>000f:00:00.0", 0),), drm=True),
        "580.95.05", 13000, "aarch64", 119, 1, graphics=True,
    ),
)  # fmt: skip

PROFILES: dict[str, MachineProfile] = {profile.name: profile for profile in _PROFILES}


def machine_profile(name: str, *, salt: str = "") -> MachineProfile:
    """Give a profile by name; with a salt, its GPUs have UUIDs and serials of their own.

    Raises:
        KeyError: with the names that exist.
    """
    try:
        profile = PROFILES[name]
    except KeyError:
        raise KeyError(f"no machine profile {name!r}; there are {', '.join(PROFILES)}") from None
    return salted(profile, salt)


def salted(profile: MachineProfile, salt: str) -> MachineProfile:
    """Give the same machine with other boards in it."""
    if not salt:
        return profile
    return replace(
        profile,
        gpus=tuple(
            replace(slot, uuid=f"GPU-{_uuid(salt + slot.uuid)}", serial=f"{int(slot.serial) + len(salt)}")
            for slot in profile.gpus
        ),
    )
