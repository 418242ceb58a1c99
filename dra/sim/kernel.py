"""The kernel of a simulated node, as far as the driver asks it to change something: PCI drivers and modules.

Stands where `dra.host.kernel.RealKernel` does. A GPU's binding is part of the node's state, from which the files follow
and by which the simulated NVML sees the GPU or does not; other functions (the sound device of a card) are files alone.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import time
from collections.abc import Callable
from pathlib import Path

from dra.host.open_files import holders_of
from dra.sim.nvml.calls import attached_slot, read_counts
from dra.sim.nvml.files import SIM_FOLDER, machine_of, sync_files, tree_of
from dra.sim.nvml.state import NVIDIA_DRIVER, Fault, GpuState, NodeState, StateStore, reset
from dra.sim.tree.nodes import make_link, write_text
from dra.values import PciAddress

# Modules that the kernel has, and the drivers that they bring.
_MODULES = {"vfio_pci": "vfio-pci", "nvgrace_gpu_vfio_pci": "nvgrace_gpu_vfio_pci"}
_NONE = "(null)"
# Names in faults: `kernel unbind`, `kernel drivers_probe`, `kernel load_module` ...
FAULT_PREFIX = "kernel "
_POLL_SECONDS = 0.02


class SimulatedKernel:
    """See `dra.host.kernel.HostKernel`. Unbinding a GPU that somebody has open takes for ever, as on a real node.

    Args:
        root: the node's `/`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store = StateStore(root / SIM_FOLDER)

    def load_module(self, name: str) -> str:
        """See `HostKernel`."""
        why = self._suffer("load_module", None)
        if why:
            return why
        driver = _MODULES.get(name.replace("-", "_"))
        if driver is None:
            return f"modprobe: FATAL: Module {name} not found in directory /lib/modules"

        def load(state: NodeState) -> None:
            if driver not in state.vfio_drivers:
                state.vfio_drivers.append(driver)

        self._store.update(load)
        sync_files(self._root)
        return ""

    def write(self, path: Path, text: str) -> str:
        """See `HostKernel`."""
        text = text.strip()
        if path.name == "driver_override":
            address = path.parent.name
        elif path.name in ("unbind", "bind", "drivers_probe"):
            address = text
        else:
            return os.strerror(errno.EACCES)
        gpu = self._gpu(address)
        why = self._suffer(path.name, gpu)
        if why:
            return why
        match path.name:
            case "driver_override":
                return self._override(address, gpu, "" if text == _NONE else text)
            case "unbind":
                return self._unbind(address, gpu, path.parent)
            case "bind":
                return self._bind(address, gpu, path.parent.name)
            case _:
                return self._probe(address, gpu)

    # -- the four attributes

    def _override(self, address: str, gpu: GpuState | None, driver: str) -> str:
        if gpu is None:
            write_text(self._device(address) / "driver_override", (driver or _NONE) + "\n")
        else:
            self._change(gpu, lambda found: setattr(found, "driver_override", driver))
        return ""

    def _unbind(self, address: str, gpu: GpuState | None, asked: Path) -> str:
        bound = self._driver(address)
        wanted = asked.resolve().name if asked.name == "driver" else asked.name
        if not bound or wanted != bound:
            return os.strerror(errno.ENODEV)
        if gpu is None:
            lose_driver(self._root, address)
            return ""
        if bound == NVIDIA_DRIVER and not self._wait_until(lambda: not self._in_use(gpu)):
            return self._no_answer()

        def leave(found: GpuState) -> None:
            found.pci_driver = ""
            reset(found)

        lose_driver(self._root, address)
        self._change(gpu, leave)
        return ""

    def _probe(self, address: str, gpu: GpuState | None) -> str:
        if self._driver(address):
            return ""
        override = (self._device(address) / "driver_override").read_text(encoding="ascii").strip()
        if override != _NONE:
            return self._take(address, gpu, override)
        return self._take(address, gpu, NVIDIA_DRIVER) if gpu is not None else ""

    def _bind(self, address: str, gpu: GpuState | None, driver: str) -> str:
        return os.strerror(errno.EBUSY) if self._driver(address) else self._take(address, gpu, driver)

    def _take(self, address: str, gpu: GpuState | None, driver: str) -> str:
        """Have a driver take a function; one that is not there takes none, which is no error."""
        state = self._store.read()
        loaded = [*state.vfio_drivers, *([NVIDIA_DRIVER] if state.module_version else [])]
        if gpu is not None:
            if driver in loaded:
                self._change(gpu, lambda found: setattr(found, "pci_driver", driver))
        elif (drivers := self._root / "sys/bus/pci/drivers" / driver).is_dir():
            device = self._device(address).resolve()
            make_link(device / "driver", os.path.relpath(drivers, device))
        return ""

    # -- parts

    def _device(self, address: str) -> Path:
        return self._root / "sys/bus/pci/devices" / address

    def _driver(self, address: str) -> str:
        try:
            return (self._device(address) / "driver").readlink().name
        except OSError:
            return ""

    def _gpu(self, address: str) -> GpuState | None:
        state = self._store.read()
        slot = next((slot for slot in machine_of(state).gpus if str(slot.pci_address) == address), None)
        return state.gpu(slot.uuid) if slot is not None else None

    def _change(self, gpu: GpuState, change: Callable[[GpuState], None]) -> None:
        def apply(state: NodeState) -> None:
            found = state.gpu(gpu.uuid)
            if found is not None:
                change(found)

        self._store.update(apply)
        sync_files(self._root)

    def _in_use(self, gpu: GpuState) -> bool:
        """Whether somebody has the GPU open: an NVML session, or a process that has its device node."""
        if read_counts(self._store.folder, alive_only=True)[attached_slot(gpu.uuid)]:
            return True
        state = self._store.read()
        slot = next(slot for slot in machine_of(state).gpus if slot.uuid == gpu.uuid)
        node = tree_of(self._root, state).dev_dir / f"nvidia{slot.minor}"
        return bool(holders_of(self._root / "proc", [node]))

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + self._patience()
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _patience(self) -> float:
        return self._store.read().kernel_patience_seconds

    def _no_answer(self) -> str:
        return f"the kernel did not answer within {self._patience():g} s"

    def _suffer(self, what: str, gpu: GpuState | None) -> str:
        """Let a fault act, one that was set for the kernel by name; gives the error's text, empty for none."""
        fault = next((each for each in self._store.read().faults if _hits(each, what, gpu)), None)
        if fault is None:
            return ""
        if fault.times > 0:
            self._store.update(lambda state: _use_up(state, fault.number))
        if fault.hang:
            self._wait_until(lambda: all(other.number != fault.number for other in self._store.read().faults))
            return self._no_answer()
        return os.strerror(fault.error) if fault.error else ""


def lose_driver(root: Path, address: PciAddress | str) -> None:
    """Take a function's link to its driver away: the kernel does that before the driver lets go of the function.

    Who finds a GPU gone from NVML or /proc then sees why. Source: __device_release_driver of Linux.

    Args:
        root: the node's `/`.
        address: the function's.
    """
    (root / "sys/bus/pci/devices" / str(address) / "driver").unlink(missing_ok=True)


def _hits(fault: Fault, what: str, gpu: GpuState | None) -> bool:
    return (
        fault.times != 0
        and fault.function.startswith(FAULT_PREFIX)
        and fnmatch.fnmatchcase(FAULT_PREFIX + what, fault.function)
        and (not fault.gpu or (gpu is not None and fault.gpu == gpu.uuid))
    )


def _use_up(state: NodeState, number: int) -> None:
    for fault in state.faults:
        if fault.number == number and fault.times > 0:
            fault.times -= 1
    state.faults = [fault for fault in state.faults if fault.number != number or fault.times != 0]
