"""What a GPU and its MIG devices do at this moment: loads, memory, power, temperatures, counters, processes.

A value that NVML does not give is None, never 0. Loads are ratios from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

from dra.errors import DraError
from dra.nvml.api import NvmlApi
from dra.nvml.errors import GPU_LOST, HUNG, SESSION_ENDED
from dra.nvml.gpm import GpmReader
from dra.values import PciAddress

# Source: nvmlFieldValue_t, scope of all links.
_ALL_LINKS = 0xFFFFFFFF
# Where the driver does not know a process' memory. Source: NVML_VALUE_NOT_AVAILABLE.
_NOT_AVAILABLE = (1 << 64) - 1
_NOT_MIG = 0xFFFFFFFF

# Our name of a counter -> the field that holds it.
_COUNTERS: dict[str, int | tuple[int, int]] = {
    "ecc_corrected_volatile": pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
    "ecc_uncorrected_volatile": pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
    "ecc_corrected_aggregate": pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL,
    "ecc_uncorrected_aggregate": pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL,
    "remapped_corrected": pynvml.NVML_FI_DEV_REMAPPED_COR,
    "remapped_uncorrected": pynvml.NVML_FI_DEV_REMAPPED_UNC,
    "remap_pending": pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    "remap_failed": pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    "retired_single": pynvml.NVML_FI_DEV_RETIRED_SBE,
    "retired_double": pynvml.NVML_FI_DEV_RETIRED_DBE,
    "retired_pending": pynvml.NVML_FI_DEV_RETIRED_PENDING,
    "memory_temperature": pynvml.NVML_FI_DEV_MEMORY_TEMP,
    "energy_millijoules": pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    "pcie_replays": pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
    "nvlink_crc_flit": pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    "nvlink_crc_data": pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    "nvlink_replays": pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    "nvlink_recoveries": pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    "nvlink_sent_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
    "nvlink_received_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
}
# Source: nvmlValueType_t.
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}
# Why clocks are low. Source: nvmlClocksEventReason*.
CLOCK_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes. `used` is what processes have; `reserved` is the driver's own, None where it is not told apart."""

    total: int
    used: int
    free: int
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """A process on a GPU, by its pid as the host counts.

    `mps`: a client of an MPS server. `instances` are the GPU and the compute instance, None for a whole GPU.
    `load` is its part of the GPU's, None where the driver does not say.
    """

    pid: int
    kind: str
    memory_bytes: int | None
    instances: tuple[int, int] | None = None
    load: float | None = None
    mps: bool = False


@dataclass(frozen=True, slots=True)
class MigReading:
    """A MIG device. `activity` is empty on GPUs without GPM (before Hopper)."""

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    memory: MemoryReading | None = None
    activity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. Degrees Celsius, watts, joules, hertz, bytes.

    `counters` have the names of `_COUNTERS`; those that the board does not have are not there. `activity` is what
    engines did since the last reading (`graphics`, `sm`, `tensor`, `dram`), empty before Hopper.
    """

    load: float | None = None
    memory_load: float | None = None
    encoder_load: float | None = None
    decoder_load: float | None = None
    memory: MemoryReading | None = None
    temperature: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clocks_hertz: Mapping[str, float] = field(default_factory=dict)
    clock_reasons: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    activity: Mapping[str, float] = field(default_factory=dict)
    links_up: int | None = None
    links_down: int | None = None
    processes: tuple[ProcessReading, ...] = ()
    mig: tuple[MigReading, ...] = ()

    @property
    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded."""
        value = self.counters.get("energy_millijoules")
        return None if value is None else value / 1000


class TelemetryReader:
    """Reads GPUs. Keeps the last performance samples, which the next reading is compared with."""

    def __init__(self, *, gpm: GpmReader | None = None) -> None:
        self._gpm = gpm or GpmReader()

    def read(self, api: NvmlApi, address: PciAddress, *, mig_enabled: bool) -> GpuReading:
        """Read a GPU; to be run by `NvmlSession.run` or `run_each`. It wakes a GPU that sleeps.

        Raises:
            DraError: the GPU does not answer at all.
        """
        ask = _Asker(api, api.handle(address), str(address))
        # One that must answer, so that a GPU that is lost is an error and not a row of gaps.
        temperature = ask.call("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        counters = ask.counters()
        rates = None if mig_enabled else ask("nvmlDeviceGetUtilizationRates")
        links = ask.links()
        return GpuReading(
            load=_percent(rates, "gpu"),
            memory_load=_percent(rates, "memory"),
            encoder_load=None if mig_enabled else ask.first_percent("nvmlDeviceGetEncoderUtilization"),
            decoder_load=None if mig_enabled else ask.first_percent("nvmlDeviceGetDecoderUtilization"),
            memory=ask.memory(),
            temperature=temperature,
            power_watts=_thousandth(ask("nvmlDeviceGetPowerUsage")),
            power_limit_watts=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
            clocks_hertz=ask.clocks(),
            clock_reasons=ask("nvmlDeviceGetCurrentClocksEventReasons"),
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            counters=counters,
            activity={} if mig_enabled else self._gpm.read(api, ask.handle, ask.subject),
            links_up=None if links is None else links[0],
            links_down=None if links is None else links[1],
            processes=ask.processes(mig_enabled=mig_enabled),
            mig=self._mig(api, ask) if mig_enabled else (),
        )

    def keep_only(self, addresses: frozenset[str]) -> None:
        """Forget the samples of GPUs that are gone."""
        self._gpm.keep_only(addresses)

    def _mig(self, api: NvmlApi, ask: _Asker) -> tuple[MigReading, ...]:
        found = []
        for index in range(ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            try:
                mig = ask.call("nvmlDeviceGetMigDeviceHandleByIndex", index)
                device = _Asker(api, mig, ask.subject)
                instance = int(device.call("nvmlDeviceGetGpuInstanceId"))
                found.append(
                    MigReading(
                        uuid=str(device.call("nvmlDeviceGetUUID")),
                        gpu_instance_id=instance,
                        compute_instance_id=int(device.call("nvmlDeviceGetComputeInstanceId")),
                        memory=device.memory(),
                    )
                )
            except DraError as error:
                if _ends_reading(error):
                    raise
                # An empty place, or one that was emptied just now.
        instances = [each.gpu_instance_id for each in found]
        # Two compute instances share what their GPU instance does; it is none's alone.
        alone = [instance for instance in instances if instances.count(instance) == 1]
        activity = self._gpm.read_instances(api, ask.handle, ask.subject, alone)
        return tuple(replace(each, activity=activity.get(each.gpu_instance_id, {})) for each in found)


class _Asker:
    """Asks one device; what it does not have is None."""

    def __init__(self, api: NvmlApi, handle: Any, subject: str) -> None:
        self._api, self.handle, self.subject = api, handle, subject

    def __call__(self, name: str, *args: object) -> Any:
        """Ask for something that may not be there."""
        try:
            return self._api.optional(name, self.handle, *args, subject=self.subject)
        except DraError as error:
            if _ends_reading(error):
                raise
            return None

    def call(self, name: str, *args: object) -> Any:
        """Ask for something that must be there. Raises DraError."""
        return self._api.call(name, self.handle, *args, subject=self.subject)

    def first_percent(self, name: str) -> float | None:
        answer = self(name)
        return None if answer is None else _ratio(answer[0])

    def memory(self) -> MemoryReading | None:
        info = self("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        if info is not None:
            return MemoryReading(int(info.total), int(info.used), int(info.free), int(info.reserved))
        info = self("nvmlDeviceGetMemoryInfo")  # drivers before 510
        return None if info is None else MemoryReading(int(info.total), int(info.used), int(info.free))

    def clocks(self) -> dict[str, float]:
        found = {name: self("nvmlDeviceGetClockInfo", kind) for name, kind in _CLOCKS.items()}
        return {name: megahertz * 1e6 for name, megahertz in found.items() if megahertz is not None}

    def counters(self) -> dict[str, int]:
        """Read the counters with one call."""
        values = self("nvmlDeviceGetFieldValues", list(_COUNTERS.values()))
        found = {}
        for name, value in zip(_COUNTERS, values or (), strict=False):
            member = _MEMBERS.get(value.valueType)
            if value.nvmlReturn == pynvml.NVML_SUCCESS and member is not None:
                found[name] = int(getattr(value.value, member))
        return found

    def links(self) -> tuple[int, int] | None:
        """Give how many NVLinks are up and down; None without NVLink."""
        states: list[int] = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = self("nvmlDeviceGetNvLinkState", link)
            if state is None:
                break
            states.append(int(state))
        return (sum(states), len(states) - sum(states)) if states else None

    def processes(self, *, mig_enabled: bool) -> tuple[ProcessReading, ...]:
        listed = [
            (kind, process)
            for kind, name in (
                ("compute", "nvmlDeviceGetComputeRunningProcesses"),
                ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
            )
            for process in self(name) or ()
        ]
        if not listed:
            return ()
        clients = {process.pid for process in self("nvmlDeviceGetMPSComputeRunningProcesses") or ()}
        loads = {} if mig_enabled else self._loads()
        return tuple(
            ProcessReading(
                pid=int(process.pid),
                kind=kind,
                memory_bytes=_known(process.usedGpuMemory),
                instances=_instances(process),
                load=loads.get(int(process.pid)),
                mps=kind == "compute" and process.pid in clients,
            )
            for kind, process in listed
        )

    def _loads(self) -> dict[int, float]:
        """Give the latest load of each process that had one. Source: nvmlDeviceGetProcessUtilization."""
        latest: dict[int, Any] = {}
        for sample in self("nvmlDeviceGetProcessUtilization", 0) or ():
            if sample.pid not in latest or sample.timeStamp >= latest[sample.pid].timeStamp:
                latest[sample.pid] = sample
        return {
            int(pid): load for pid, sample in latest.items() if (load := _ratio(sample.smUtil)) is not None
        }


def _ends_reading(error: DraError) -> bool:
    return error.code in SESSION_ENDED or error.code in (HUNG, GPU_LOST)


def _known(amount: int | None) -> int | None:
    return None if amount is None or amount == _NOT_AVAILABLE else int(amount)


def _instances(process: Any) -> tuple[int, int] | None:
    gpu, compute = getattr(process, "gpuInstanceId", None), getattr(process, "computeInstanceId", None)
    if gpu in (None, _NOT_MIG) or compute in (None, _NOT_MIG):
        return None
    return int(gpu), int(compute)


def _percent(structure: Any, name: str) -> float | None:
    return None if structure is None else _ratio(getattr(structure, name))


def _ratio(percent: float) -> float | None:
    return percent / 100 if 0 <= percent <= 100 else None


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
