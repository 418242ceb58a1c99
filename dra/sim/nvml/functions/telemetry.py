"""What a GPU does: load, clocks, power, temperatures, memory errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.memory import Status, check_version, fill, number, put, put_array, target
from dra.sim.nvml.registry import also_as, nvml

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

# Thresholds by NVML_TEMPERATURE_THRESHOLD_*: shutdown, slowdown, memory, GPU.
_THRESHOLDS = {0: 92, 1: 89, 2: 95, 3: 87}
# Boards with a narrower memory have no ECC.
ECC_BUS_WIDTH = 256
_MEMORY_CLOCK, _VIDEO_CLOCK = pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_VIDEO


@nvml()
def nvmlDeviceGetUtilizationRates(lib: SimulatedNvml, device: Device, rates: Any) -> None:
    """Give the load in percent; a GPU in MIG mode does not say."""
    if device.gpu.mig_current:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    fill(target(rates), gpu=device.gpu.utilization_gpu, memory=device.gpu.utilization_memory)


@nvml()
def nvmlDeviceGetEncoderUtilization(lib: SimulatedNvml, device: Device, load: Any, period: Any) -> None:
    """Give the load of the video encoders and the sampling period in microseconds."""
    _media(device, load, period, device.gpu.utilization_encoder)


@nvml()
def nvmlDeviceGetDecoderUtilization(lib: SimulatedNvml, device: Device, load: Any, period: Any) -> None:
    """Give the load of the video decoders and the sampling period in microseconds."""
    _media(device, load, period, device.gpu.utilization_decoder)


@also_as("nvmlDeviceGetOfaUtilization")
@nvml()
def nvmlDeviceGetJpgUtilization(lib: SimulatedNvml, device: Device, load: Any, period: Any) -> None:
    """Give the load of an engine that nothing simulated uses, and the sampling period in microseconds."""
    _media(device, load, period, 0)


def _media(device: Device, load: Any, period: Any, percent: int) -> None:
    if device.gpu.mig_current:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    put(load, percent)
    put(period, 167_000)


@nvml()
def nvmlDeviceGetTemperature(lib: SimulatedNvml, device: Device, sensor: Any, temperature: Any) -> None:
    """Give the temperature of the die."""
    if number(sensor) != 0:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    put(temperature, device.gpu.temperature)


@nvml(since=570)
def nvmlDeviceGetTemperatureV(lib: SimulatedNvml, device: Device, temperature: Any) -> None:
    """Give the temperature of the die, versioned."""
    structure = target(temperature)
    check_version(structure, pynvml.nvmlTemperature_v1)
    structure.temperature = device.gpu.temperature


@nvml()
def nvmlDeviceGetTemperatureThreshold(
    lib: SimulatedNvml, device: Device, which: Any, temperature: Any
) -> None:
    """Give where the driver slows the GPU down or shuts it off."""
    if number(which) not in _THRESHOLDS:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    put(temperature, _THRESHOLDS[number(which)])


@nvml()
def nvmlDeviceGetPowerUsage(lib: SimulatedNvml, device: Device, power: Any) -> None:
    """Give the power draw in milliwatts."""
    put(power, device.gpu.power_mw)


@nvml()
def nvmlDeviceGetTotalEnergyConsumption(lib: SimulatedNvml, device: Device, energy: Any) -> None:
    """Give the energy since the driver was loaded in millijoules."""
    put(energy, device.gpu.energy_mj)


@also_as("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit")
@nvml()
def nvmlDeviceGetPowerManagementLimit(lib: SimulatedNvml, device: Device, limit: Any) -> None:
    """Give the power limit in milliwatts."""
    put(limit, device.model.power_limit_mw)


@nvml()
def nvmlDeviceGetPowerManagementLimitConstraints(
    lib: SimulatedNvml, device: Device, low: Any, high: Any
) -> None:
    """Give the range of the power limit."""
    put(low, device.model.power_limit_mw // 4)
    put(high, device.model.power_limit_mw)


@also_as("nvmlDeviceGetPowerState")
@nvml()
def nvmlDeviceGetPerformanceState(lib: SimulatedNvml, device: Device, state: Any) -> None:
    """Give the performance state, 0 for the highest."""
    put(state, 0)


@nvml()
def nvmlDeviceGetClockInfo(lib: SimulatedNvml, device: Device, kind: Any, clock: Any) -> None:
    """Give a clock in MHz."""
    put(clock, _clock(number(kind), device.gpu.graphics_mhz, device.gpu.memory_mhz))


@nvml()
def nvmlDeviceGetMaxClockInfo(lib: SimulatedNvml, device: Device, kind: Any, clock: Any) -> None:
    """Give the highest value of a clock in MHz."""
    put(clock, _clock(number(kind), device.model.max_graphics_mhz, device.model.max_memory_mhz))


@nvml()
def nvmlDeviceGetClock(lib: SimulatedNvml, device: Device, kind: Any, which: Any, clock: Any) -> None:
    """Give a clock: as it is, or at most."""
    if number(which) == pynvml.NVML_CLOCK_ID_CURRENT:
        nvmlDeviceGetClockInfo(lib, device, kind, clock)
    else:
        nvmlDeviceGetMaxClockInfo(lib, device, kind, clock)


def _clock(kind: int, graphics: int, memory: int) -> int:
    if kind == _MEMORY_CLOCK:
        return memory
    if kind == _VIDEO_CLOCK:
        return graphics * 7 // 8
    if kind in (pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_SM):
        return graphics
    raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)


@also_as("nvmlDeviceGetCurrentClocksThrottleReasons")
@nvml()
def nvmlDeviceGetCurrentClocksEventReasons(lib: SimulatedNvml, device: Device, reasons: Any) -> None:
    """Give why the clocks are not at their highest, as a bit set."""
    put(reasons, device.gpu.clock_reasons)


@also_as("nvmlDeviceGetSupportedClocksThrottleReasons")
@nvml()
def nvmlDeviceGetSupportedClocksEventReasons(lib: SimulatedNvml, device: Device, reasons: Any) -> None:
    """Give which reasons this GPU can report."""
    put(reasons, 0x1FF)


# Memory errors


def _has_ecc(device: Device) -> None:
    if device.model.bus_width < ECC_BUS_WIDTH:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)


@nvml()
def nvmlDeviceGetEccMode(lib: SimulatedNvml, device: Device, current: Any, pending: Any) -> None:
    """Give the ECC mode now and after a reboot."""
    _has_ecc(device)
    put(current, device.gpu.ecc_current)
    put(pending, device.gpu.ecc_pending)


@nvml()
def nvmlDeviceGetTotalEccErrors(
    lib: SimulatedNvml, device: Device, kind: Any, counter: Any, count: Any
) -> None:
    """Give corrected (0) or uncorrected (1) errors since the reboot (0) or ever (1)."""
    _has_ecc(device)
    put(count, ecc_errors(device, number(kind), number(counter)))


@nvml()
def nvmlDeviceGetMemoryErrorCounter(
    lib: SimulatedNvml, device: Device, kind: Any, counter: Any, location: Any, count: Any
) -> None:
    """Give errors of one place; all simulated errors are in DRAM."""
    _has_ecc(device)
    errors = ecc_errors(device, number(kind), number(counter))
    put(count, errors if number(location) == pynvml.NVML_MEMORY_LOCATION_DRAM else 0)


def ecc_errors(device: Device, kind: int, counter: int) -> int:
    """Give an error count by NVML_MEMORY_ERROR_TYPE_* and NVML_*_ECC counter type."""
    gpu = device.gpu
    counts = {
        (0, 0): gpu.ecc_corrected,
        (0, 1): gpu.ecc_corrected_total + gpu.ecc_corrected,
        (1, 0): gpu.ecc_uncorrected,
        (1, 1): gpu.ecc_uncorrected_total + gpu.ecc_uncorrected,
    }
    try:
        return counts[kind, counter]
    except KeyError:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT) from None


@nvml()
def nvmlDeviceGetRemappedRows(
    lib: SimulatedNvml, device: Device, corrected: Any, uncorrected: Any, pending: Any, failed: Any
) -> None:
    """Give the state of the row remapper (Ampere and later)."""
    if not device.model.row_remapping:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    put(corrected, device.gpu.remapped_corrected)
    put(uncorrected, device.gpu.remapped_uncorrected)
    put(pending, device.gpu.remap_pending)
    put(failed, device.gpu.remap_failed)


def _retired(device: Device, cause: Any) -> list[int]:
    if device.model.row_remapping:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    single = number(cause) == pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
    return device.gpu.retired_single if single else device.gpu.retired_double


@nvml()
def nvmlDeviceGetRetiredPages(lib: SimulatedNvml, device: Device, cause: Any, count: Any, pages: Any) -> None:
    """Give the addresses of retired pages (before Ampere)."""
    put_array(pages, count, _retired(device, cause))


@nvml()
def nvmlDeviceGetRetiredPages_v2(
    lib: SimulatedNvml, device: Device, cause: Any, count: Any, pages: Any, times: Any = None
) -> None:
    """Give addresses and times of retired pages."""
    found = _retired(device, cause)
    put_array(pages, count, found)
    if times is not None:
        for position in range(len(found)):
            target(times)[position] = 0


@nvml()
def nvmlDeviceGetRetiredPagesPendingStatus(lib: SimulatedNvml, device: Device, pending: Any) -> None:
    """Say whether a page waits for a reboot to be retired."""
    if device.model.row_remapping:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    put(pending, device.gpu.retired_pending)


# PCIe


@nvml()
def nvmlDeviceGetPcieReplayCounter(lib: SimulatedNvml, device: Device, count: Any) -> None:
    """Give the number of PCIe replays."""
    put(count, device.gpu.pcie_replays)


@nvml()
def nvmlDeviceGetCurrPcieLinkGeneration(lib: SimulatedNvml, device: Device, generation: Any) -> None:
    """Give the generation the link runs at."""
    put(generation, device.gpu.pcie_generation or device.model.pcie_generation)


@also_as("nvmlDeviceGetGpuMaxPcieLinkGeneration")
@nvml()
def nvmlDeviceGetMaxPcieLinkGeneration(lib: SimulatedNvml, device: Device, generation: Any) -> None:
    """Give the generation the link could run at."""
    put(generation, device.model.pcie_generation)


@nvml()
def nvmlDeviceGetCurrPcieLinkWidth(lib: SimulatedNvml, device: Device, width: Any) -> None:
    """Give the lanes in use."""
    put(width, device.gpu.pcie_width)


@nvml()
def nvmlDeviceGetMaxPcieLinkWidth(lib: SimulatedNvml, device: Device, width: Any) -> None:
    """Give the lanes there are."""
    put(width, 16)


@nvml()
def nvmlDeviceGetPcieSpeed(lib: SimulatedNvml, device: Device, speed: Any) -> None:
    """Give the link speed in MB/s for each lane."""
    generation = device.gpu.pcie_generation or device.model.pcie_generation
    put(speed, {3: 8000, 4: 16000, 5: 32000, 6: 64000}[generation])


@nvml()
def nvmlDeviceGetPcieThroughput(lib: SimulatedNvml, device: Device, counter: Any, throughput: Any) -> None:
    """Give the PCIe traffic in KB/s over the last 20 ms."""
    put(throughput, 500 * device.gpu.utilization_gpu)
