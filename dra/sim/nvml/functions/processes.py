"""Who uses a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.memory import fill, put_array
from dra.sim.nvml.registry import also_as, nvml
from dra.sim.nvml.state import Process

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml


@also_as("nvmlDeviceGetComputeRunningProcesses_v2")
@nvml(mig=True)
def nvmlDeviceGetComputeRunningProcesses_v3(
    lib: SimulatedNvml, device: Device, count: Any, processes: Any
) -> None:
    """Give the processes with a compute context, MPS clients included."""
    put_array(processes, count, _listed(device, "compute", "mps"))


@also_as("nvmlDeviceGetGraphicsRunningProcesses_v2")
@nvml(mig=True)
def nvmlDeviceGetGraphicsRunningProcesses_v3(
    lib: SimulatedNvml, device: Device, count: Any, processes: Any
) -> None:
    """Give the processes with a graphics context."""
    put_array(processes, count, _listed(device, "graphics"))


@also_as("nvmlDeviceGetMPSComputeRunningProcesses_v2")
@nvml(mig=True)
def nvmlDeviceGetMPSComputeRunningProcesses_v3(
    lib: SimulatedNvml, device: Device, count: Any, processes: Any
) -> None:
    """Give the MPS clients."""
    put_array(processes, count, _listed(device, "mps"))


@nvml()
def nvmlDeviceGetProcessUtilization(
    lib: SimulatedNvml, device: Device, samples: Any, count: Any, since: Any
) -> int | None:
    """Give the load of each process; a GPU in MIG mode does not say."""
    if device.gpu.mig_current:
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    found = [process for process in device.gpu.processes if process.kind != "graphics"]
    if not found:
        return int(pynvml.NVML_ERROR_NOT_FOUND)
    even = device.gpu.utilization_gpu // len(found)
    shares = [even if process.utilization < 0 else process.utilization for process in found]
    stores = [partial(_store_sample, process, share) for process, share in zip(found, shares, strict=True)]
    put_array(samples, count, stores)
    return None


def _listed(device: Device, *kinds: str) -> list[Callable[[Any], None]]:
    processes = [process for process in device.gpu.processes if process.kind in kinds]
    if device.instance is not None and device.compute is not None:
        place = (device.instance.gi, device.compute.ci)
        processes = [process for process in processes if (process.gi, process.ci) == place]
    return [partial(_store, process) for process in processes]


def _store(process: Process, element: Any) -> None:
    fill(
        element,
        pid=process.pid,
        usedGpuMemory=process.memory_bytes,
        gpuInstanceId=process.gi,
        computeInstanceId=process.ci,
    )


def _store_sample(process: Process, share: int, element: Any) -> None:
    fill(element, pid=process.pid, timeStamp=0, smUtil=share, memUtil=share, encUtil=0, decUtil=0)
