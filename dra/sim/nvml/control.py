"""Change a simulated node from anywhere: another thread, another process, a test.

Everything goes through the node's state file, so it works on a running daemon, also while one of its NVML calls
hangs, and needs no connection to it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from dra.sim.nvml.calls import SESSIONS, WAKE_UPS, read_counts
from dra.sim.nvml.files import (
    SIM_FOLDER,
    clear_volatile,
    machine_of,
    replace_library,
    sync_files,
)
from dra.sim.nvml.functions.mig_changes import add_compute_instance, add_gpu_instance
from dra.sim.nvml.library import mig_uuid
from dra.sim.nvml.mig_tables import MigTable, mig_table
from dra.sim.nvml.state import (
    NOT_MIG,
    NVIDIA_DRIVER,
    ComputeInstance,
    Fault,
    GpuInstance,
    GpuState,
    NodeState,
    Process,
    StateStore,
    reboot,
    reset,
)
from dra.sim.profiles import GpuSlot
from dra.sim.tree import default_majors
from dra.sim.tree.dev import KERNEL_LOG

T = TypeVar("T")

# NVML_GPU_RECOVERY_ACTION_* after an XID, as NVIDIA's catalogue of XIDs has it; none after the others.
ACTIONS = {48: 1, 62: 1, 64: 1, 74: 1, 79: 2, 95: 1, 119: 1, 120: 1, 140: 1, 143: 1}


class DriverInUseError(RuntimeError):
    """The kernel module cannot be unloaded: a process has an NVML session open."""


class SimControl:
    """The switches of one simulated node.

    A GPU is named by its minor number (as in `gpu-3`) or by its UUID. Changes are seen by the next NVML call;
    waits for events wake up at once.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = StateStore(root / SIM_FOLDER)
        self._baseline: Counter[str] = Counter()

    @property
    def state(self) -> NodeState:
        """Give the state as it is now; do not change it."""
        return self._store.read()

    # Faults

    def set_fault(
        self,
        function: str = "*",
        *,
        gpu: int | str | None = None,
        error: str | int | None = None,
        delay_seconds: float = 0.0,
        hang: bool = False,
        times: int | None = None,
    ) -> int:
        """Make calls fail, be slow or hang; give a number with which `clear` takes the fault back.

        Args:
            function: its C name (`nvmlDeviceGetHandleByIndex_v2`) or a shell pattern.
            gpu: only calls about this GPU.
            error: an NVML status, `GPU_IS_LOST` for NVML_ERROR_GPU_IS_LOST; None: the call then goes on.
            delay_seconds: how long the call takes first.
            hang: the call does not come back until the fault is cleared.
            times: for so many calls, None for all.

        Raises:
            ValueError: no such error or GPU, or a fault that does nothing.
        """
        code = _error_code(error)
        if not (code or delay_seconds or hang):
            raise ValueError("a fault needs an error, a delay or a hang")

        def add(state: NodeState) -> int:
            state.fault_number += 1
            wanted = "" if gpu is None else self._gpu(state, gpu).uuid
            remaining = -1 if times is None else times
            state.faults.append(
                Fault(state.fault_number, function, wanted, code, delay_seconds, hang, remaining)
            )
            return state.fault_number

        return self._store.update(add)

    def clear(self, fault: int | None = None) -> None:
        """Take one fault back, or all of them; calls that hang because of it go on."""

        def remove(state: NodeState) -> None:
            state.faults = [] if fault is None else [other for other in state.faults if other.number != fault]

        self._store.update(remove)

    # GPUs

    def set_gpu(self, gpu: int | str, **values: Any) -> None:
        """Set what NVML reports about a GPU: `temperature=88`, `recovery_action=1`, `ecc_uncorrected=3` …

        Raises:
            ValueError: no such field.
        """
        unknown = [name for name in values if not hasattr(GpuState, name) or name in ("uuid", "instances")]
        if unknown:
            raise ValueError(f"a GPU has no {', '.join(unknown)}")

        def change(state: NodeState) -> None:
            found = self._gpu(state, gpu)
            for name, value in values.items():
                setattr(found, name, value)

        self._store.update(change)

    def lose_gpu(self, gpu: int | str, *, xid: int | None = 79) -> None:
        """Let a GPU fall off the bus: calls answer GPU_IS_LOST, its files stay; an XID tells why."""
        self.set_gpu(gpu, lost=True)
        if xid is not None:
            self.push_xid(gpu, xid)

    def recover_gpu(self, gpu: int | str) -> None:
        """Reset a GPU: a lost one is back, what waits for a reset is done; see `dra.sim.nvml.state.reset`."""
        self._change(lambda state: reset(self._gpu(state, gpu)))

    def remove_gpu(self, gpu: int | str) -> None:
        """Take a GPU out of the machine: its files go, NVML sees it gone at the next initialisation."""
        self._change(lambda state: setattr(self._gpu(state, gpu), "present", False))

    def add_gpu(self, gpu: int | str) -> None:
        """Put a GPU back in; NVML sees it at the next initialisation."""
        self._change(lambda state: setattr(self._gpu(state, gpu), "present", True))

    def push_xid(
        self,
        gpu: int | str,
        xid: int,
        *,
        gi: int = NOT_MIG,
        ci: int = NOT_MIG,
        action: int | None = None,
        times: int = 1,
        sources: Collection[str] = ("nvml", "kernel log"),
    ) -> None:
        """Let a GPU report an XID, for a MIG device with its ids.

        Args:
            gpu: which GPU.
            xid: the XID.
            gi: the MIG device's GPU instance.
            ci: its compute instance.
            action: the recovery action that NVML gives afterwards; None: the one that usually goes with this XID.
            times: so often at once.
            sources: who tells it: NVML's events, the kernel log.
        """
        wanted = ACTIONS.get(xid, 0) if action is None else action

        def change(state: NodeState) -> str:
            found = self._gpu(state, gpu)
            found.recovery_action = max(found.recovery_action, wanted) if action is None else wanted
            # Whatever failed had been running: a joule at least, which a reset sets back.
            found.energy_mj = max(found.energy_mj, 1000)
            for _ in range(times if "nvml" in sources else 0):
                state.push(found.uuid, pynvml.nvmlEventTypeXidCriticalError, xid, gi=gi, ci=ci)
            return found.uuid

        uuid_text = self._store.update(change)
        if "kernel log" in sources:
            self._print_xid(uuid_text, xid, gi, ci, times)

    def _print_xid(self, uuid_text: str, xid: int, gi: int, ci: int, times: int) -> None:
        """Write to the kernel log what the kernel module would. Source: NVRM's line for an XID."""
        address = next(slot.pci_address for slot in machine_of(self.state).gpus if slot.uuid == uuid_text)
        where = f"PCI:{str(address).rpartition('.')[0]}"
        where += "" if gi == NOT_MIG else f" GPU-I:{gi:02d}"
        where += "" if ci == NOT_MIG else f" GPU-CI:{ci:02d}"
        microseconds = time.monotonic_ns() // 1000
        line = f"4,{microseconds % 1_000_000},{microseconds},-;NVRM: Xid ({where}): {xid}, pid='<unknown>', simulated\n"
        with (self.root / KERNEL_LOG).open("a", encoding="ascii") as log:
            log.write(line * times)

    def add_ecc_errors(self, gpu: int | str, count: int = 1) -> None:
        """Let memory errors happen that cannot be corrected: counted, told, with a row to remap at the next reset."""

        def change(state: NodeState) -> None:
            found = self._gpu(state, gpu)
            found.ecc_uncorrected += count
            found.remap_pending = 1
            found.recovery_action = max(
                found.recovery_action, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
            )
            state.push(found.uuid, pynvml.nvmlEventTypeDoubleBitEccError, count)

        self._store.update(change)

    def push_event(
        self, gpu: int | str, kind: int, data: int, *, gi: int = NOT_MIG, ci: int = NOT_MIG
    ) -> None:
        """Let a GPU report any event."""
        self._store.update(lambda state: state.push(self._gpu(state, gpu).uuid, kind, data, gi=gi, ci=ci))

    def add_process(
        self,
        gpu: int | str,
        pid: int,
        *,
        memory_bytes: int = 512 << 20,
        kind: str = "compute",
        gi: int = NOT_MIG,
        ci: int = NOT_MIG,
        name: str = "python3",
        utilization: int = -1,
    ) -> None:
        """Let a process use a GPU, or a MIG device of it; `utilization` in percent, -1 for an even share."""
        process = Process(pid, memory_bytes, kind, gi, ci, name, utilization)
        self._store.update(lambda state: self._gpu(state, gpu).processes.append(process))

    def remove_process(self, pid: int) -> None:
        """Let a process end."""

        def change(state: NodeState) -> None:
            for found in state.gpus:
                found.processes = [process for process in found.processes if process.pid != pid]

        self._store.update(change)

    # MIG

    def set_mig_mode(self, gpu: int | str, *, enabled: bool) -> None:
        """Switch the MIG mode as an administrator did before boot; instances go with it."""

        def change(state: NodeState) -> None:
            found = self._gpu(state, gpu)
            self._table(state, found)
            found.mig_current = found.mig_pending = int(enabled)
            if not enabled:
                found.instances.clear()

        self._change(change)

    def set_mig_layout(self, gpu: int | str, layout: Iterable[tuple[str, int]]) -> list[str]:
        """Make exactly these MIG devices, (profile, first memory slice), as an administrator does by hand.

        Returns:
            Their UUIDs, in the order given.

        Raises:
            ValueError: the GPU has no such profile.
            Status: a placement is impossible; nothing is changed.
        """
        wanted = list(layout)

        def change(state: NodeState) -> list[str]:
            found = self._gpu(state, gpu)
            found.mig_current = found.mig_pending = 1
            found.instances.clear()
            return [self._add_mig(state, found, profile, start) for profile, start in wanted]

        return self._change(change)

    def create_mig(self, gpu: int | str, profile: str, start: int | None = None) -> str:
        """Make one MIG device by hand; give its UUID."""
        return self._change(lambda state: self._add_mig(state, self._gpu(state, gpu), profile, start))

    def set_mig(
        self, wanted: str, *, utilization: float | None = None, utilization_memory: float | None = None
    ) -> None:
        """Set the load of the MIG device with this UUID, in percent of what its GPU instance has.

        Raises:
            ValueError: there is none.
        """

        def change(state: NodeState) -> None:
            _, instance, _ = _mig_device(state.gpus, wanted)
            if utilization is not None:
                instance.utilization = utilization
            if utilization_memory is not None:
                instance.utilization_memory = utilization_memory

        self._store.update(change)

    def mig_instances(self, gpu: int | str, wanted: str) -> tuple[int, int]:
        """Give GPU instance and compute instance of the MIG device with this UUID.

        Raises:
            ValueError: there is none.
        """
        _, instance, part = _mig_device([self._gpu(self.state, gpu)], wanted)
        return instance.gi, part.ci

    def destroy_mig(self, wanted: str) -> None:
        """Take the MIG device with this UUID away by hand.

        Raises:
            ValueError: there is none.
        """

        def change(state: NodeState) -> None:
            found, instance, _ = _mig_device(state.gpus, wanted)
            found.instances.remove(instance)

        self._change(change)

    # Driver and node

    def unload_driver(self, *, force: bool = False) -> None:
        """Unload the kernel module.

        Raises:
            DriverInUseError: an NVML session is open, unless forced.
        """
        if not force and self.open_sessions():
            raise DriverInUseError(f"{self.open_sessions()} NVML session(s) are open")
        self._change(lambda state: setattr(state, "module_version", ""))

    def load_driver(self) -> None:
        """Load the kernel module that is installed: it takes the GPUs that have no driver. Dynamic majors may move."""

        def change(state: NodeState) -> None:
            if not state.module_version:
                state.module_version = state.library_version
                uvm = state.majors.get("nvidia-uvm", 510)
                state.majors = default_majors(state.module_version) | {
                    "nvidia-uvm": 510 if uvm != 510 else 508
                }
                for gpu in state.gpus:
                    if gpu.pci_driver == "" and gpu.driver_override in ("", NVIDIA_DRIVER):
                        gpu.pci_driver = NVIDIA_DRIVER

        self._change(change)

    def upgrade_driver(self, version: str, *, module: bool = True, force: bool = True) -> None:
        """Install another driver version.

        With `module=False` only the files change, as a package upgrade without a reboot does: libraries that are
        loaded go on, new ones meet a version mismatch.

        Raises:
            DriverInUseError: not forced, and an NVML session is open.
        """
        if module and not force and self.open_sessions():
            raise DriverInUseError(f"{self.open_sessions()} NVML session(s) are open")
        before = self.state.library_version

        def change(state: NodeState) -> None:
            state.library_version = version
            if module:
                state.module_version = version

        self._store.update(change)
        replace_library(self.root, self.state, before)
        sync_files(self.root)

    def remove_library(self) -> None:
        """Take the driver's user-space files away (a driver container that is not up yet)."""
        before = self.state.library_version
        self._store.update(lambda state: setattr(state, "library_version", ""))
        replace_library(self.root, self.state, before)

    def install_library(self, version: str | None = None) -> None:
        """Put the driver's user-space files there, by default those of the loaded module."""
        wanted = version or self.state.module_version or machine_of(self.state).driver_version
        before = self.state.library_version
        self._store.update(lambda state: setattr(state, "library_version", wanted))
        replace_library(self.root, self.state, before)

    def set_major(self, name: str, major: int) -> None:
        """Give a dynamic device major another value, as reloading its module does."""
        self._change(lambda state: state.majors.update({name: major}))

    def make_device_nodes(self) -> None:
        """Make the nodes of a fresh node appear, as the first use of the driver does."""
        self._change(lambda state: setattr(state, "fresh", False))

    def reboot(self, *, boot_id: str = "") -> None:
        """Restart the machine: see `dra.sim.nvml.state.reboot`; `/run` and the device nodes are made anew."""
        self._store.update(lambda state: reboot(state, machine_of(state), boot_id=boot_id))
        clear_volatile(self.root, self.state)
        sync_files(self.root)

    # What was called

    def count_calls(self) -> dict[str, int]:
        """Give the calls since `reset_calls` (or ever) by function, of all processes; only what was called."""
        counts = read_counts(self._store.folder)
        counts.subtract(self._baseline)
        return {name: count for name, count in counts.items() if count > 0 and name.startswith("nvml")}

    def reset_calls(self) -> None:
        """Count from here."""
        self._baseline = read_counts(self._store.folder)

    def count_wake_ups(self) -> int:
        """Give how often a sleeping GPU was woken since `reset_calls`."""
        return read_counts(self._store.folder)[WAKE_UPS] - self._baseline[WAKE_UPS]

    def open_sessions(self) -> int:
        """Give how many NVML sessions living processes hold open."""
        return read_counts(self._store.folder, alive_only=True)[SESSIONS]

    # Helpers

    def _change(self, change: Callable[[NodeState], T]) -> T:
        result = self._store.update(change)
        sync_files(self.root)
        return result

    def _gpu(self, state: NodeState, gpu: int | str) -> GpuState:
        for slot in machine_of(state).gpus:
            if gpu in (slot.minor, slot.uuid):
                found = state.gpu(slot.uuid)
                if found is not None:
                    return found
        raise ValueError(f"the node has no GPU {gpu}")

    def _slot(self, state: NodeState, gpu: GpuState) -> GpuSlot:
        return next(slot for slot in machine_of(state).gpus if slot.uuid == gpu.uuid)

    def _table(self, state: NodeState, gpu: GpuState) -> MigTable:
        table = mig_table(
            self._slot(state, gpu).model.mig_table, state.module_version or state.library_version
        )
        if table is None:
            raise ValueError(f"GPU {gpu.uuid} has no MIG")
        return table

    def _add_mig(self, state: NodeState, gpu: GpuState, profile_name: str, start: int | None) -> str:
        table = self._table(state, gpu)
        profile = table.by_name(profile_name)
        if profile is None:
            raise ValueError(
                f"no MIG profile {profile_name}; there are {', '.join(p.name for p in table.profiles)}"
            )
        place = None if start is None else (start, profile.size)
        instance = add_gpu_instance(state, table, gpu.uuid, profile_id=profile.profile_id, place=place)
        whole = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[profile.slices]
        compute = add_compute_instance(
            state, table, gpu.uuid, serial=instance.serial, profile_id=whole, start=0
        )
        return mig_uuid(gpu.uuid, instance.gi, compute.ci)


def _error_code(error: str | int | None) -> int:
    if error is None:
        return 0
    if isinstance(error, int):
        return error
    code = getattr(pynvml, f"NVML_ERROR_{error.removeprefix('NVML_ERROR_')}", None)
    if code is None:
        raise ValueError(f"no NVML error {error}")
    return int(code)


def _mig_device(gpus: Iterable[GpuState], wanted: str) -> tuple[GpuState, GpuInstance, ComputeInstance]:
    """Find the MIG device with a UUID.

    Raises:
        ValueError: there is none.
    """
    for found in gpus:
        for instance in found.instances:
            for part in instance.computes:
                if mig_uuid(found.uuid, instance.gi, part.ci) == wanted:
                    return found, instance, part
    raise ValueError(f"no MIG device {wanted}")
