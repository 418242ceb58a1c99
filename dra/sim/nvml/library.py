"""The library object: what `pynvml.nvmlLib` holds when a node is simulated.

Its attributes are the C functions by name. One object stands for one loaded `libnvidia-ml.so.1`: its version is
fixed when it is made, so after a driver upgrade it answers as a stale library does. Devices are enumerated when
NVML is initialised; a GPU that appears later is seen after the next initialisation.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from dra.errors import ValueFormatError
from dra.sim.nvml.calls import SESSIONS, WAKE_UPS, CallCounts, attached_slot
from dra.sim.nvml.events import EventSet
from dra.sim.nvml.memory import Status, address_of, number, text
from dra.sim.nvml.mig_tables import MigTable, mig_table
from dra.sim.nvml.models import GpuModel
from dra.sim.nvml.registry import Function, Subject
from dra.sim.nvml.state import ComputeInstance, Fault, GpuInstance, GpuState, NodeState, StateStore
from dra.sim.nvml.watch import FolderWatch
from dra.sim.profiles import GpuSlot, MachineProfile
from dra.values import PciAddress

# Handles are numbers that look like addresses; nothing is ever read there.
_FIRST_HANDLE, _HANDLE_STEP = 0x51D0_0000_1000, 0x40


@dataclass(slots=True)
class GpmSample:
    """What a buffer for performance samples holds: of which GPU and GPU instance, when, and loads in percent."""

    source: tuple[Any, ...] = ()
    taken_ns: int = 0
    loads: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a MIG device on it, as one call sees it."""

    slot: GpuSlot
    gpu: GpuState
    instance: GpuInstance | None = None
    compute: ComputeInstance | None = None

    @property
    def model(self) -> GpuModel:
        """Give the board."""
        return self.slot.model


class CFunction:
    """A function of the library, with the attributes ctypes gives to one."""

    def __init__(self, library: SimulatedNvml, function: Function) -> None:
        self.restype: object = None
        self.argtypes: object = None
        self.__name__ = function.name
        self._library = library
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call it as C would: a status comes back, never an exception.

        Raises:
            TypeError: a structure itself in place of its address, which a compiled library would take for one and crash.
        """
        for argument in arguments:
            if isinstance(argument, (ctypes.Structure, ctypes.Union)):
                raise TypeError(f"{self.__name__}: {type(argument).__name__} is passed by value; use byref()")
        return self._library.invoke(self._function, arguments)


class SimulatedNvml:
    """A loaded NVML library of one node. Thread-safe, as NVML is.

    Args:
        store: the node's state.
        machine: its hardware.
        functions: what it exports, by name.
        on_change: called after a call that changed what `/proc` and `/dev` show.
    """

    def __init__(
        self,
        store: StateStore,
        machine: MachineProfile,
        functions: Mapping[str, Function],
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.functions = functions
        self.store = store
        self.machine = machine
        self.on_change = on_change
        self.version = store.read().library_version
        self.event_sets: dict[int, EventSet] = {}
        self.gpm_samples: dict[int, GpmSample] = {}
        self._slots = {slot.uuid: slot for slot in machine.gpus}
        attached = [attached_slot(slot.uuid) for slot in machine.gpus]
        self._counts = CallCounts(store.folder, [*sorted(functions), *attached])
        self._lock = threading.RLock()
        self._inits = 0
        self._enumerated: tuple[str, ...] = ()
        self._attached: set[str] = set()
        self._handles: dict[tuple[Any, ...], int] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> CFunction:
        """Give a function, as `CDLL` does.

        Raises:
            AttributeError: this version of the library does not export it.
        """
        function = self.functions.get(name)
        if function is None or int(self.version.split(".", 1)[0]) < function.since:
            raise AttributeError(
                f"libnvidia-ml.so.{self.__dict__.get('version', '')}: undefined symbol: {name}"
            )
        found = CFunction(self, function)
        self.__dict__[name] = found
        return found

    # One call

    def invoke(self, function: Function, arguments: tuple[Any, ...]) -> Any:
        """Run one call: count it, let faults act, check the state of library, driver and GPU, run the body."""
        self._counts.add(function.name)
        if function.name == "nvmlErrorString":
            return function.body(self, None, *arguments)
        try:
            fault = self._matching_fault(function, arguments)
            if fault is not None:
                self._suffer(fault)
            if function.initialised and self._inits == 0:
                return pynvml.NVML_ERROR_UNINITIALIZED
            if function.driver:
                self._check_driver(self.store.read())
            subject = self._subject(function, arguments)
            rest = arguments[1:] if function.subject is not Subject.NONE else arguments
            return function.body(self, subject, *rest) or pynvml.NVML_SUCCESS
        except Status as status:
            return status.code

    def _check_driver(self, state: NodeState) -> None:
        if not state.module_version:
            raise Status(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if state.module_version != self.version:
            raise Status(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def _matching_fault(self, function: Function, arguments: tuple[Any, ...]) -> Fault | None:
        faults = self.store.read().faults
        if not faults:
            return None
        about = self._gpu_of(function, arguments)
        for fault in faults:
            if fault.times == 0 or (fault.gpu and fault.gpu != about):
                continue
            if not fnmatch.fnmatchcase(function.name, fault.function):
                continue
            if fault.times < 0 or self.store.update(functools.partial(_use_up, fault_number=fault.number)):
                return fault
        return None

    def _suffer(self, fault: Fault) -> None:
        """Wait as the fault says, until its time is over or it is cleared, then fail if it says so."""
        if fault.hang or fault.delay_seconds > 0:
            watch = FolderWatch(self.store.folder)
            try:
                watch.wait(
                    lambda: all(other.number != fault.number for other in self.store.read().faults),
                    timeout_seconds=None if fault.hang else fault.delay_seconds,
                )
            finally:
                watch.close()
        if fault.error:
            raise Status(fault.error)

    # What a call is about

    def _gpu_of(self, function: Function, arguments: tuple[Any, ...]) -> str:
        """Give the UUID of the GPU a call concerns, empty if it concerns none."""
        try:
            match function.subject:
                case Subject.NONE:
                    return ""
                case Subject.INDEX:
                    return self._enumerated[number(arguments[0])]
                case Subject.UUID | Subject.PCI | Subject.SERIAL:
                    slot = self._find_slot(function.subject, text(arguments[0]))
                    return slot.uuid if slot else ""
                case _:
                    return str(self._keys[address_of(arguments[0])][1])
        except (IndexError, KeyError, Status):
            return ""

    def _subject(self, function: Function, arguments: tuple[Any, ...]) -> Any:
        match function.subject:
            case Subject.NONE | Subject.INDEX | Subject.UUID | Subject.PCI | Subject.SERIAL:
                return number_or_text(function, arguments)
            case Subject.GPU:
                device = self.device(arguments[0])
                if device.instance is not None and not function.mig:
                    raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
                return device
            case Subject.GPU_INSTANCE:
                return self.gpu_instance(arguments[0])
            case Subject.COMPUTE_INSTANCE:
                return self.compute_instance(arguments[0])

    def _find_slot(self, subject: Subject, wanted: str) -> GpuSlot | None:
        slots = [self._slots[uuid_text] for uuid_text in self._enumerated]
        match subject:
            case Subject.UUID:
                return next((slot for slot in slots if slot.uuid == wanted), None)
            case Subject.SERIAL:
                return next((slot for slot in slots if slot.serial == wanted), None)
            case _:
                try:
                    address = PciAddress.parse(wanted)
                except ValueFormatError:
                    raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT) from None
                return next((slot for slot in slots if slot.pci_address == address), None)

    def device(self, handle: Any) -> Device:
        """Give what a device handle stands for now.

        Raises:
            Status: INVALID_ARGUMENT, GPU_IS_LOST, NOT_FOUND for a MIG device that is gone.
        """
        key = self._keys.get(address_of(handle))
        if key is None or key[0] not in ("gpu", "mig"):
            raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self._healthy(key[1])
        slot = self._slots[key[1]]
        if key[0] == "gpu":
            return Device(slot, gpu)
        for instance in gpu.instances:
            for compute in instance.computes:
                if (instance.serial, compute.serial) == key[2:]:
                    return Device(slot, gpu, instance, compute)
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)

    def gpu_instance(self, handle: Any) -> tuple[Device, GpuInstance]:
        """Give the GPU instance behind a handle, with its GPU."""
        key = self._keys.get(address_of(handle))
        if key is None or key[0] != "gi":
            raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self._healthy(key[1])
        for instance in gpu.instances:
            if instance.serial == key[2]:
                return Device(self._slots[key[1]], gpu), instance
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)

    def compute_instance(self, handle: Any) -> tuple[Device, GpuInstance, ComputeInstance]:
        """Give the compute instance behind a handle, with its GPU instance and GPU."""
        key = self._keys.get(address_of(handle))
        if key is None or key[0] != "ci":
            raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self._healthy(key[1])
        for instance in gpu.instances:
            for compute in instance.computes:
                if compute.serial == key[2]:
                    return Device(self._slots[key[1]], gpu), instance, compute
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)

    def _healthy(self, uuid_text: str) -> GpuState:
        gpu = self.store.read().gpu(uuid_text)
        if gpu is None or not gpu.seen or gpu.lost:
            raise Status(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    # For the bodies

    def handle(self, *key: Any) -> int:
        """Give the address that stands for a thing; the same thing always has the same."""
        with self._lock:
            address = self._handles.get(key)
            if address is None:
                address = _FIRST_HANDLE + _HANDLE_STEP * len(self._handles)
                self._handles[key] = address
                self._keys[address] = key
            return address

    def initialise(self) -> None:
        """Count a session; the first one enumerates the GPUs on the bus, by PCI address."""
        with self._lock:
            if self._inits == 0:
                present = {gpu.uuid for gpu in self.store.read().gpus if gpu.seen}
                slots = sorted(self.machine.gpus, key=lambda slot: slot.pci_address)
                self._enumerated = tuple(slot.uuid for slot in slots if slot.uuid in present)
            self._inits += 1
            self._counts.add(SESSIONS)

    def finish(self) -> None:
        """Take a session back; the last one ends all event waits."""
        with self._lock:
            self._inits -= 1
            self._counts.add(SESSIONS, -1)
            sets = list(self.event_sets.values()) if self._inits == 0 else []
            if self._inits == 0:
                self.event_sets.clear()
                for uuid_text in self._attached:
                    self._counts.add(attached_slot(uuid_text), -1)
                self._attached.clear()
        for events in sets:
            events.close()

    @property
    def is_initialised(self) -> bool:
        """Say whether somebody has a session open."""
        return self._inits > 0

    @property
    def enumerated(self) -> tuple[str, ...]:
        """Give the UUIDs of the GPUs in NVML's order."""
        return self._enumerated

    def slot(self, uuid_text: str) -> GpuSlot:
        """Give the place of a GPU in the machine."""
        return self._slots[uuid_text]

    def attach(self, uuid_text: str) -> int:
        """Give the handle of an enumerated GPU. The first time wakes it, unless persistence keeps it awake.

        Raises:
            Status: GPU_IS_LOST.
        """
        gpu = self._healthy(uuid_text)
        with self._lock:
            if uuid_text not in self._attached:
                self._attached.add(uuid_text)
                self._counts.add(attached_slot(uuid_text))
                if not gpu.persistence and not gpu.processes:
                    self._counts.add(WAKE_UPS)
        return self.handle("gpu", uuid_text)

    def table(self, device: Device) -> MigTable:
        """Give the placement table of a GPU.

        Raises:
            Status: NOT_SUPPORTED for a GPU without MIG.
        """
        table = mig_table(device.model.mig_table, self.version)
        if table is None:
            raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return table

    def change(self, device: Device, change: Callable[[GpuState], Any]) -> Any:
        """Change the state of one GPU."""

        def apply(state: NodeState) -> Any:
            gpu = state.gpu(device.gpu.uuid)
            if gpu is None:
                raise Status(pynvml.NVML_ERROR_GPU_IS_LOST)
            return change(gpu)

        return self.store.update(apply)


def number_or_text(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Give the first argument of a look-up as Python has it; None for calls about no GPU."""
    match function.subject:
        case Subject.INDEX:
            return number(arguments[0])
        case Subject.UUID | Subject.PCI | Subject.SERIAL:
            return text(arguments[0])
        case _:
            return None


def mig_uuid(gpu_uuid: str, gi: int, ci: int) -> str:
    """Give a MIG device's UUID: the same for the same ids on the same GPU, as since driver 470."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'{gpu_uuid}/{gi}/{ci}')}"


def _use_up(state: NodeState, *, fault_number: int) -> bool:
    """Take one of the calls a fault is good for; False if another call was quicker.

    A fault that holds calls up stays in the list, spent, so that clearing it ends them.
    """
    for fault in state.faults:
        if fault.number == fault_number and fault.times > 0:
            fault.times -= 1
            if fault.times == 0 and not fault.hang and not fault.delay_seconds:
                state.faults = [other for other in state.faults if other.number != fault_number]
            return True
    return False
