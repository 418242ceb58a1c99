"""MIG, changing: the mode, GPU instances, compute instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.functions.mig import compute_profile, free_part_starts, free_starts, gpu_profile
from dra.sim.nvml.memory import Status, number, put, put_handle, target
from dra.sim.nvml.mig_tables import MigTable
from dra.sim.nvml.models import HOPPER
from dra.sim.nvml.registry import Subject, nvml
from dra.sim.nvml.state import ComputeInstance, GpuInstance, GpuState, NodeState

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

    GpuInstanceRef = tuple[Device, GpuInstance]
    ComputeInstanceRef = tuple[Device, GpuInstance, ComputeInstance]


@nvml()
def nvmlDeviceSetMigMode(lib: SimulatedNvml, device: Device, mode: Any, activation: Any) -> int | None:
    """Switch the MIG mode. The mode waits for a reset where the GPU is in use.

    Before Hopper switching resets the GPU, which needs it to be idle; from Hopper on no reset is needed, but no
    process may use it either. Instances must be gone first.
    """
    lib.table(device)
    wanted = number(mode)
    if wanted not in (0, 1):
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    put(activation, pynvml.NVML_SUCCESS)

    def switch(gpu: GpuState) -> int:
        if gpu.mig_current == wanted:
            gpu.mig_pending = wanted
            return int(pynvml.NVML_SUCCESS)
        if gpu.instances or (gpu.processes and device.model.architecture >= HOPPER):
            return int(pynvml.NVML_ERROR_IN_USE)
        gpu.mig_pending = wanted
        if gpu.processes:
            put(activation, pynvml.NVML_ERROR_IN_USE)
            return int(pynvml.NVML_SUCCESS)
        gpu.mig_current = wanted
        return int(pynvml.NVML_SUCCESS)

    status: int = lib.change(device, switch)
    lib.on_change()
    return status


@nvml()
def nvmlDeviceCreateGpuInstance(lib: SimulatedNvml, device: Device, profile_id: Any, handle: Any) -> None:
    """Make a GPU instance wherever it fits."""
    instance = create_gpu_instance(lib, device, number(profile_id), None)
    put_handle(handle, lib.handle("gi", device.gpu.uuid, instance.serial))


@nvml()
def nvmlDeviceCreateGpuInstanceWithPlacement(
    lib: SimulatedNvml, device: Device, profile_id: Any, placement: Any, handle: Any
) -> None:
    """Make a GPU instance at a placement, or not at all."""
    place = target(placement)
    instance = create_gpu_instance(lib, device, number(profile_id), (place.start, place.size))
    put_handle(handle, lib.handle("gi", device.gpu.uuid, instance.serial))


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceDestroy(lib: SimulatedNvml, subject: GpuInstanceRef) -> None:
    """Take a GPU instance away; its compute instances must be gone."""
    device, instance = subject

    def destroy(gpu: GpuState) -> None:
        found = next((other for other in gpu.instances if other.serial == instance.serial), None)
        if found is None:
            raise Status(pynvml.NVML_ERROR_NOT_FOUND)
        if found.computes:
            raise Status(pynvml.NVML_ERROR_IN_USE)
        gpu.instances.remove(found)

    lib.change(device, destroy)
    lib.on_change()


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceCreateComputeInstance(
    lib: SimulatedNvml, subject: GpuInstanceRef, profile_id: Any, handle: Any
) -> None:
    """Make a compute instance wherever it fits."""
    compute = create_compute_instance(lib, subject, number(profile_id), None)
    put_handle(handle, lib.handle("ci", subject[0].gpu.uuid, compute.serial))


@nvml(Subject.GPU_INSTANCE)
def nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    lib: SimulatedNvml, subject: GpuInstanceRef, profile_id: Any, placement: Any, handle: Any
) -> None:
    """Make a compute instance at a placement, or not at all."""
    start = target(placement).start
    compute = create_compute_instance(lib, subject, number(profile_id), start)
    put_handle(handle, lib.handle("ci", subject[0].gpu.uuid, compute.serial))


@nvml(Subject.COMPUTE_INSTANCE)
def nvmlComputeInstanceDestroy(lib: SimulatedNvml, subject: ComputeInstanceRef) -> None:
    """Take a compute instance away; no process may use it."""
    device, instance, compute = subject

    def destroy(gpu: GpuState) -> None:
        if any((process.gi, process.ci) == (instance.gi, compute.ci) for process in gpu.processes):
            raise Status(pynvml.NVML_ERROR_IN_USE)
        for other in gpu.instances:
            if other.serial == instance.serial:
                kept = [part for part in other.computes if part.serial != compute.serial]
                if len(kept) == len(other.computes):
                    break
                other.computes = kept
                return
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)

    lib.change(device, destroy)
    lib.on_change()


def create_gpu_instance(
    lib: SimulatedNvml, device: Device, profile_id: int, place: tuple[int, int] | None
) -> GpuInstance:
    """Make a GPU instance; `place` is (start, size), None for anywhere."""
    table = lib.table(device)
    gpu_profile(table, profile_id)

    def create(state: NodeState) -> GpuInstance:
        return add_gpu_instance(state, table, device.gpu.uuid, profile_id=profile_id, place=place)

    instance = lib.store.update(create)
    lib.on_change()
    return instance


def create_compute_instance(
    lib: SimulatedNvml, subject: GpuInstanceRef, profile_id: int, start: int | None
) -> ComputeInstance:
    """Make a compute instance; `start` in compute slices, None for anywhere."""
    device, instance = subject
    table = lib.table(device)

    def create(state: NodeState) -> ComputeInstance:
        return add_compute_instance(
            state, table, device.gpu.uuid, serial=instance.serial, profile_id=profile_id, start=start
        )

    compute = lib.store.update(create)
    lib.on_change()
    return compute


def add_gpu_instance(
    state: NodeState, table: MigTable, gpu_uuid: str, *, profile_id: int, place: tuple[int, int] | None
) -> GpuInstance:
    """Add a GPU instance to a state.

    Raises:
        Status: NOT_SUPPORTED for a profile the GPU does not have or without MIG mode, INVALID_ARGUMENT for a
            placement the profile does not have, INSUFFICIENT_RESOURCES for one that is taken.
    """
    gpu = state.gpu(gpu_uuid)
    if gpu is None or not gpu.mig_current:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    profile = gpu_profile(table, profile_id)
    if place is not None and (place[0] not in profile.starts or place[1] != profile.size):
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    free = free_starts(table, gpu, profile)
    if place is not None:
        free = [start for start in free if start == place[0]]
    taken = {instance.gi for instance in gpu.instances}
    ids = [number for number in table.instance_ids(profile) if number not in taken]
    if not free or not ids:
        raise Status(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    # The driver begins with the upper half for halves, as `nvidia-smi mig -cgi 9,9` shows.
    start = free[-1] if profile.slices == 3 else free[0]
    instance = GpuInstance(ids[0], profile_id, start, profile.size, state.next_serial())
    gpu.instances.append(instance)
    return instance


def add_compute_instance(
    state: NodeState,
    table: MigTable,
    gpu_uuid: str,
    *,
    serial: int,
    profile_id: int,
    start: int | None,
) -> ComputeInstance:
    """Add a compute instance to a GPU instance of a state.

    Raises:
        Status: NOT_FOUND, NOT_SUPPORTED, INVALID_ARGUMENT, INSUFFICIENT_RESOURCES.
    """
    gpu = state.gpu(gpu_uuid)
    instance = next((other for other in gpu.instances if other.serial == serial), None) if gpu else None
    if gpu is None or instance is None:
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)
    part = compute_profile(table, gpu_profile(table, instance.profile_id), profile_id)
    if not part.creatable:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if start is not None and start not in part.starts:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    free = [place for place in free_part_starts(instance, part) if start in (None, place)]
    if not free:
        raise Status(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    indexes = {compute.index for other in gpu.instances for compute in other.computes}
    compute = ComputeInstance(
        ci=_lowest_free({compute.ci for compute in instance.computes}),
        profile_id=profile_id,
        start=free[0],
        size=part.slices,
        index=_lowest_free(indexes),
        serial=state.next_serial(),
    )
    instance.computes.append(compute)
    return compute


def _lowest_free(taken: set[int]) -> int:
    return next(number for number in range(len(taken) + 1) if number not in taken)
