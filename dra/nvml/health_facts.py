"""What a check of one GPU's health reads, and what an event set tells, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthReading:
    """One check. None: the GPU or its driver does not have it.

    Counts are since the driver was loaded; temperatures in degrees Celsius. `error` is the code with which the GPU
    refused to answer, empty if it did answer. `fabric_state`, `fabric_status` and `fabric_health` are NVML's numbers.
    """

    error: str = ""
    message: str = ""
    recovery_action: int | None = None
    energy_mj: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retire_pending: bool | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    hardware_slowdown: bool | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    fabric_state: int | None = None
    fabric_status: int | None = None
    fabric_health: int | None = None


@dataclass(frozen=True, slots=True)
class NvmlEvent:
    """Something that an event set told. `xid` is None for other kinds. Instances are None for the whole GPU."""

    gpu_uuid: str
    kind: int
    xid: int | None
    gi: int | None = None
    ci: int | None = None
