"""GPU performance monitoring: two samples, and what happened between them. Hopper and later."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.memory import Status, address_of, check_version, number, put_handle, target
from dra.sim.nvml.models import HOPPER
from dra.sim.nvml.registry import Subject, nvml

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, GpmSample, SimulatedNvml

_SINCE = 525


def _check_supported(device: Device) -> None:
    if device.model.architecture < HOPPER:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)


@nvml(since=_SINCE)
def nvmlGpmQueryDeviceSupport(lib: SimulatedNvml, device: Device, support: Any) -> None:
    """Say whether the GPU can be monitored."""
    structure = target(support)
    check_version(structure, pynvml.NVML_GPM_SUPPORT_VERSION)
    structure.isSupportedDevice = int(device.model.architecture >= HOPPER)


@nvml(Subject.NONE, since=_SINCE)
def nvmlGpmSampleAlloc(lib: SimulatedNvml, _subject: None, sample: Any) -> None:
    """Give an empty buffer."""
    from dra.sim.nvml.library import GpmSample

    address = next(
        free for number in itertools.count() if (free := lib.handle("gpm", number)) not in lib.gpm_samples
    )
    lib.gpm_samples[address] = GpmSample()
    put_handle(sample, address)


@nvml(Subject.NONE, since=_SINCE)
def nvmlGpmSampleFree(lib: SimulatedNvml, _subject: None, sample: Any) -> None:
    """Take a buffer back."""
    if lib.gpm_samples.pop(address_of(sample), None) is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)


@nvml(since=_SINCE)
def nvmlGpmSampleGet(lib: SimulatedNvml, device: Device, sample: Any) -> None:
    """Take a sample of a whole GPU; not in MIG mode."""
    _check_supported(device)
    if device.gpu.mig_current:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    _take(lib, sample, (device.gpu.uuid,), device.gpu.utilization_gpu, device.gpu.utilization_memory)


@nvml(since=_SINCE)
def nvmlGpmMigSampleGet(lib: SimulatedNvml, device: Device, gpu_instance: Any, sample: Any) -> None:
    """Take a sample of a GPU instance."""
    _check_supported(device)
    wanted = number(gpu_instance)
    for instance in device.gpu.instances:
        if instance.gi == wanted:
            source = (device.gpu.uuid, instance.serial)
            _take(lib, sample, source, instance.utilization, instance.utilization_memory)
            return
    raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _sample(lib: SimulatedNvml, sample: Any) -> GpmSample:
    found = lib.gpm_samples.get(address_of(sample))
    if found is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return found


def _take(lib: SimulatedNvml, sample: Any, source: tuple[Any, ...], load: float, memory: float) -> None:
    found = _sample(lib, sample)
    found.source, found.taken_ns = source, time.monotonic_ns()
    found.loads = {
        pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: load,
        pynvml.NVML_GPM_METRIC_SM_UTIL: load,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: load / 2,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: memory,
    }


@nvml(Subject.NONE, since=_SINCE)
def nvmlGpmMetricsGet(lib: SimulatedNvml, _subject: None, metrics: Any) -> None:
    """Give what happened between two samples of the same source; each metric has a status of its own."""
    structure = target(metrics)
    check_version(structure, pynvml.NVML_GPM_METRICS_GET_VERSION)
    first, second = _sample(lib, structure.sample1), _sample(lib, structure.sample2)
    if not first.source or first.source != second.source or first.taken_ns >= second.taken_ns:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for position in range(structure.numMetrics):
        metric = structure.metrics[position]
        load = second.loads.get(metric.metricId)
        metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if load is None else pynvml.NVML_SUCCESS
        metric.value = 0.0 if load is None else load
