"""What one scan reads, as frozen values: NVML's answers with their numbers turned into words, nothing added."""

from __future__ import annotations

from dataclasses import dataclass

from dra.errors import DraError
from dra.values import PciAddress

UNKNOWN = "Unknown"

# The words NVIDIA's own driver publishes. Source: nvmlBrandType_t.
BRANDS = {
    0: UNKNOWN, 1: "Quadro", 2: "Tesla", 3: "NVS", 4: "Grid", 5: "GeForce", 6: "Titan", 7: "NvidiaVApps",
    8: "NvidiaVPC", 9: "NvidiaVCS", 10: "NvidiaVWS", 11: "NvidiaCloudGaming", 12: "QuadroRTX", 13: "NvidiaRTX",
    14: "Nvidia", 15: "GeForceRTX", 16: "TitanRTX",
}  # fmt: skip
# Source: NVML_DEVICE_ARCH_*.
ARCHITECTURES = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper",
    10: "Blackwell", 13: "Rubin",
}  # fmt: skip
# Source: nvmlDeviceAddressingModeType_t. None: the platform could, but does not.
ADDRESSING_MODES = {0: "None", 1: "HMM", 2: "ATS"}


@dataclass(frozen=True, slots=True)
class Issue:
    """Something that could not be read: about which GPU (PCI address or `index 3`), and the error's texts."""

    subject: str
    code: str
    message: str
    remedy: str = ""

    @classmethod
    def of(cls, error: DraError, *, subject: str) -> Issue:
        """Keep an error's texts."""
        return cls(subject, error.code, error.message, error.remedy)


@dataclass(frozen=True, slots=True)
class MigProfileFacts:
    """A GPU instance profile of one GPU. `placements` are (start, size) in memory slices."""

    name: str
    profile_id: int
    slices: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg_engines: int
    ofa_engines: int
    placements: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MigDeviceFacts:
    """A MIG device that exists."""

    uuid: str
    profile: MigProfileFacts
    gpu_instance_id: int
    compute_instance_id: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as NVML and the kernel describe it.

    `asleep`: it was not asked this time, because asking would wake it; the values are of the last time. `issue`:
    why it must not be handed out.
    """

    address: PciAddress
    uuid: str
    minor: int
    name: str = ""
    brand: str = UNKNOWN
    architecture: str = UNKNOWN
    compute_capability: tuple[int, int] = (0, 0)
    memory_bytes: int | None = None
    addressing_mode: str | None = None
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_devices: tuple[MigDeviceFacts, ...] = ()
    mig_profiles: tuple[MigProfileFacts, ...] = ()
    persistence: bool = True
    asleep: bool = False
    issue: Issue | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One scan. `gpus` are ordered by PCI address."""

    driver_version: str
    cuda_version: tuple[int, int] | None
    gpus: tuple[GpuFacts, ...]
    issues: tuple[Issue, ...] = ()
