"""Event sets."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.events import EventSet
from dra.sim.nvml.memory import Status, address_of, number, point, put, put_handle, target
from dra.sim.nvml.registry import Subject, also_as, nvml

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

# Single and double bit ECC, performance state, XID, clock: what data-centre boards report.
SUPPORTED = 0x1F

_serials = itertools.count()


@nvml(Subject.NONE)
def nvmlEventSetCreate(lib: SimulatedNvml, _: None, event_set: Any) -> None:
    """Make an empty event set."""
    events = EventSet(lib.store.folder)
    address = lib.handle("set", next(_serials))
    lib.event_sets[address] = events
    put_handle(event_set, address)


@nvml()
def nvmlDeviceGetSupportedEventTypes(lib: SimulatedNvml, device: Device, types: Any) -> None:
    """Give the event types a GPU can report."""
    put(types, SUPPORTED)


@nvml()
def nvmlDeviceRegisterEvents(lib: SimulatedNvml, device: Device, types: Any, event_set: Any) -> None:
    """Add a GPU's events to a set; types that the GPU does not have are refused."""
    mask = number(types)
    if mask & ~SUPPORTED:
        raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
    _set_of(lib, event_set).register(device.gpu.uuid, mask, seq=lib.store.read().event_seq)


@also_as("nvmlEventSetWait")
@nvml(Subject.NONE)
def nvmlEventSetWait_v2(
    lib: SimulatedNvml, _: None, event_set: Any, data: Any, timeout_ms: Any
) -> int | None:
    """Wait for an event."""
    events = _set_of(lib, event_set)
    if not events.wait(lib.store.read, timeout_seconds=number(timeout_ms) / 1000):
        return int(pynvml.NVML_ERROR_TIMEOUT)
    if events.closed:
        return int(pynvml.NVML_ERROR_UNINITIALIZED)
    state = lib.store.read()
    event = events.take(state)
    if event is None:
        lost = events.lost(state)
        return int(pynvml.NVML_ERROR_GPU_IS_LOST if lost else pynvml.NVML_ERROR_TIMEOUT)
    structure = target(data)
    point(structure_field(structure), lib.handle("gpu", event.uuid))
    structure.eventType = event.kind
    structure.eventData = event.data
    structure.gpuInstanceId = event.gi
    structure.computeInstanceId = event.ci
    return None


@nvml(Subject.NONE, driver=False)
def nvmlEventSetFree(lib: SimulatedNvml, _: None, event_set: Any) -> None:
    """Free a set."""
    events = lib.event_sets.pop(address_of(event_set), None)
    if events is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    events.close()


def structure_field(structure: Any) -> Any:
    """Give the memory of the `device` field: reading the attribute would give a copy."""
    field = type(structure).device
    return (ctypes.c_char * field.size).from_buffer(structure, field.offset)


def _set_of(lib: SimulatedNvml, event_set: Any) -> EventSet:
    events = lib.event_sets.get(address_of(event_set))
    if events is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return events
