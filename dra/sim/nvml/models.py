"""GPU models as NVML reports them: the numbers a machine profile is made of.

Totals, names and device ids are what `nvidia-smi -q` shows on the real boards. Engine clocks, power limits and
core counts come from the public data sheets; nothing in the driver decides by them.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

# nvmlDeviceArchitecture_t
TURING, AMPERE, ADA, HOPPER, BLACKWELL = 6, 7, 8, 9, 10
# nvmlBrandType_t
BRAND_TESLA, BRAND_NVIDIA = 2, 14
# nvmlDeviceAddressingModeType_t
ADDRESSING_NONE, ADDRESSING_HMM, ADDRESSING_ATS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One board.

    `memory_mib` is NVML's total; None where NVML answers NOT_SUPPORTED (integrated memory). `reserved_mib` is
    what version 2 of the memory call shows apart. `pci_device` is device id << 16 | vendor id. `mig_table`
    names the placement table, None for a GPU without MIG. `addressing_mode` is None where the call is not
    supported by the board. `row_remapping` is false where the board retires pages instead.
    """

    name: str
    pci_device: int
    pci_subsystem: int
    brand: int
    architecture: int
    compute_capability: tuple[int, int]
    memory_mib: int | None
    reserved_mib: int
    multiprocessors: int
    cores_per_multiprocessor: int
    power_limit_mw: int
    bus_width: int
    pcie_generation: int
    nvlinks: int = 0
    nvlink_version: int = 0
    mig_table: str | None = None
    addressing_mode: int | None = ADDRESSING_HMM
    row_remapping: bool = True
    max_graphics_mhz: int = 1980
    max_memory_mhz: int = 2619


A100_SXM4_40GB = GpuModel(
    "NVIDIA A100-SXM4-40GB", 0x20B010DE, 0x134F10DE, BRAND_NVIDIA, AMPERE, (8, 0), 40960, 571, 108, 64,
    400_000, 5120, 4, 12, 3, "a100-40gb", max_graphics_mhz=1410, max_memory_mhz=1215,
)  # fmt: skip
A100_PCIE_40GB = GpuModel(
    "NVIDIA A100-PCIE-40GB", 0x20F110DE, 0x145F10DE, BRAND_NVIDIA, AMPERE, (8, 0), 40960, 571, 108, 64,
    250_000, 5120, 4, 12, 3, "a100-40gb", max_graphics_mhz=1410, max_memory_mhz=1215,
)  # fmt: skip
A100_SXM4_80GB = GpuModel(
    "NVIDIA A100-SXM4-80GB", 0x20B210DE, 0x146310DE, BRAND_NVIDIA, AMPERE, (8, 0), 81920, 666, 108, 64,
    400_000, 5120, 4, 12, 3, "a100-80gb", max_graphics_mhz=1410, max_memory_mhz=1593,
)  # fmt: skip
A30 = GpuModel(
    "NVIDIA A30", 0x20B710DE, 0x153210DE, BRAND_NVIDIA, AMPERE, (8, 0), 24576, 352, 56, 64,
    165_000, 3072, 4, 4, 3, "a30-24gb", max_graphics_mhz=1440, max_memory_mhz=1215,
)  # fmt: skip
H100_SXM5_80GB = GpuModel(
    "NVIDIA H100 80GB HBM3", 0x233010DE, 0x16C110DE, BRAND_NVIDIA, HOPPER, (9, 0), 81559, 638, 132, 128,
    700_000, 5120, 5, 18, 4, "h100-80gb",
)  # fmt: skip
H100_NVL_94GB = GpuModel(
    "NVIDIA H100 NVL", 0x232110DE, 0x183910DE, BRAND_NVIDIA, HOPPER, (9, 0), 95830, 638, 132, 128,
    400_000, 6016, 5, 12, 4, "h100-94gb",
)  # fmt: skip
GH200_96GB = GpuModel(
    "NVIDIA GH200 480GB", 0x234210DE, 0x16EB10DE, BRAND_NVIDIA, HOPPER, (9, 0), 97871, 639, 132, 128,
    900_000, 6144, 5, 18, 4, "h100-96gb", ADDRESSING_ATS,
)  # fmt: skip
H200_SXM_141GB = GpuModel(
    "NVIDIA H200", 0x233510DE, 0x18BE10DE, BRAND_NVIDIA, HOPPER, (9, 0), 143771, 623, 132, 128,
    700_000, 6144, 5, 18, 4, "h200-141gb", max_memory_mhz=3201,
)  # fmt: skip
B200_SXM_180GB = GpuModel(
    "NVIDIA B200", 0x290110DE, 0x199910DE, BRAND_NVIDIA, BLACKWELL, (10, 0), 183359, 724, 148, 128,
    1_000_000, 8192, 6, 18, 5, "b200-180gb", max_graphics_mhz=1965, max_memory_mhz=3996,
)  # fmt: skip
GB200_186GB = GpuModel(
    "NVIDIA GB200", 0x294110DE, 0x204610DE, BRAND_NVIDIA, BLACKWELL, (10, 0), 189471, 740, 152, 128,
    1_200_000, 8192, 6, 18, 5, "gb200-186gb", ADDRESSING_ATS, max_graphics_mhz=2062, max_memory_mhz=3996,
)  # fmt: skip
RTX_PRO_6000_96GB = GpuModel(
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", 0x2BB510DE, 0x204E10DE, BRAND_NVIDIA, BLACKWELL, (12, 0), 97887,
    636, 188, 128, 600_000, 512, 5, mig_table="rtx-pro-6000-96gb", max_graphics_mhz=2430, max_memory_mhz=12481,
)  # fmt: skip
L40S = GpuModel(
    "NVIDIA L40S", 0x26B910DE, 0x185110DE, BRAND_NVIDIA, ADA, (8, 9), 46068, 497, 142, 128,
    350_000, 384, 4, max_graphics_mhz=2520, max_memory_mhz=9001,
)  # fmt: skip
L4 = GpuModel(
    "NVIDIA L4", 0x27B810DE, 0x16CA10DE, BRAND_NVIDIA, ADA, (8, 9), 23034, 529, 58, 128,
    72_000, 192, 4, max_graphics_mhz=2040, max_memory_mhz=6251,
)  # fmt: skip
T4 = GpuModel(
    "Tesla T4", 0x1EB810DE, 0x12A210DE, BRAND_TESLA, TURING, (7, 5), 15360, 440, 40, 64,
    70_000, 256, 3, addressing_mode=ADDRESSING_NONE, row_remapping=False, max_graphics_mhz=1590,
    max_memory_mhz=5001,
)  # fmt: skip
GB10 = GpuModel(
    # Memory is the system's: NVML answers NOT_SUPPORTED to the memory calls.
    "NVIDIA GB10", 0x2E1210DE, 0x000010DE, BRAND_NVIDIA, BLACKWELL, (12, 1), None, 0, 48, 128,
    140_000, 256, 5, addressing_mode=ADDRESSING_ATS, row_remapping=False, max_graphics_mhz=3003,
    max_memory_mhz=8533,
)  # fmt: skip
