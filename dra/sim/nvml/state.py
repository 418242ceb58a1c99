"""The state of a simulated node: what a reboot keeps, what it clears, and how processes share it.

The state is one JSON file in the node's `sim` folder, replaced as a whole under a file lock. Every NVML call
looks at its stat and reads it again only when it was replaced; a change from outside is seen by the next call,
also while another call hangs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dra.sim.nvml.models import HOPPER
from dra.sim.profiles import MachineProfile
from dra.sim.tree import default_majors

T = TypeVar("T")

_EVENTS_KEPT = 256
NOT_MIG = 0xFFFFFFFF
NVIDIA_DRIVER = "nvidia"


@dataclass(slots=True)
class ComputeInstance:
    """Part of a GPU instance. `index` is the MIG device's index on its GPU."""

    ci: int
    profile_id: int
    start: int
    size: int
    index: int
    serial: int


@dataclass(slots=True)
class GpuInstance:
    """A piece of a GPU: profile by its id, placement in memory slices. `serial` tells reincarnations apart.

    Loads are percent of what the instance has.
    """

    gi: int
    profile_id: int
    start: int
    size: int
    serial: int
    computes: list[ComputeInstance] = field(default_factory=list)
    utilization: float = 0.0
    utilization_memory: float = 0.0


@dataclass(slots=True)
class Process:
    """A process on a GPU; `kind` is compute, graphics or mps. `utilization` in percent; -1: an even share of the GPU's."""

    pid: int
    memory_bytes: int
    kind: str = "compute"
    gi: int = NOT_MIG
    ci: int = NOT_MIG
    name: str = "python3"
    utilization: int = -1


@dataclass(slots=True)
class GpuState:
    """What changes about one GPU. Units are NVML's: degrees Celsius, milliwatts, millijoules, percent, MHz.

    `pci_driver` is the kernel driver that its PCI function is bound to, empty for none; `driver_override` the one that
    it was told to take; `vfs` how many virtual functions are cut from it.
    """

    uuid: str
    present: bool = True
    pci_driver: str = NVIDIA_DRIVER
    driver_override: str = ""
    vfs: int = 0
    lost: bool = False
    persistence: bool = True
    compute_mode: int = 0
    timeslice: int = 0
    mig_current: int = 0
    mig_pending: int = 0
    instances: list[GpuInstance] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    temperature: int = 34
    memory_temperature: int = 40
    power_mw: int = 68_000
    energy_mj: int = 0
    utilization_gpu: int = 0
    utilization_memory: int = 0
    utilization_encoder: int = 0
    utilization_decoder: int = 0
    graphics_mhz: int = 345
    memory_mhz: int = 1593
    clock_reasons: int = 1
    ecc_current: int = 1
    ecc_pending: int = 1
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    ecc_corrected_total: int = 0
    ecc_uncorrected_total: int = 0
    remapped_corrected: int = 0
    remapped_uncorrected: int = 0
    remap_pending: int = 0
    remap_failed: int = 0
    retired_single: list[int] = field(default_factory=list)
    retired_double: list[int] = field(default_factory=list)
    retired_pending: int = 0
    pcie_replays: int = 0
    pcie_width: int = 16
    pcie_generation: int = 0  # 0: the board's highest
    nvlinks_down: list[int] = field(default_factory=list)
    nvlink_crc_flit: int = 0
    nvlink_crc_data: int = 0
    nvlink_replays: int = 0
    nvlink_recoveries: int = 0
    nvlink_tx_kib: int = 0
    nvlink_rx_kib: int = 0
    recovery_action: int = 0
    fabric_state: int = 3
    fabric_status: int = 0
    fabric_unhealthy: bool = False

    @property
    def seen(self) -> bool:
        """Whether NVIDIA's driver has it."""
        return self.present and self.pci_driver == NVIDIA_DRIVER


@dataclass(slots=True)
class Event:
    """Something an event set may be waiting for."""

    seq: int
    uuid: str
    kind: int
    data: int
    gi: int = NOT_MIG
    ci: int = NOT_MIG


@dataclass(slots=True)
class Fault:
    """Something that goes wrong when a function is called.

    `function` is a name or a shell pattern. `gpu` is a UUID, empty for every GPU and for calls about none.
    `error` is an NVML status, 0 for none. `times` counts down, -1 for always.
    """

    number: int
    function: str
    gpu: str = ""
    error: int = 0
    delay_seconds: float = 0.0
    hang: bool = False
    times: int = -1


@dataclass(slots=True)
class NodeState:
    """Everything about the node that changes.

    `iommu` and `iommufd` say what the kernel has, `vfio_drivers` which of the vfio family are loaded; a write to the
    kernel that it does not answer is given up after `kernel_patience_seconds`. `fresh`: nobody has made the device nodes since boot. `module_version` is the loaded kernel module's, empty when it is not loaded; `library_version` that of the
    user-space files, empty when they are not installed.
    """

    profile: str
    salt: str
    layout: str
    boot_id: str
    module_version: str
    library_version: str
    majors: dict[str, int]
    gpus: list[GpuState]
    real_nodes: bool = True
    fresh: bool = False
    iommu: bool = True
    iommufd: bool = True
    vfio_drivers: list[str] = field(default_factory=list)
    kernel_patience_seconds: float = 10.0
    boots: int = 1
    serial: int = 0
    event_seq: int = 0
    events: list[Event] = field(default_factory=list)
    fault_number: int = 0
    faults: list[Fault] = field(default_factory=list)

    def gpu(self, uuid_text: str) -> GpuState | None:
        """Give the state of a GPU."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid_text), None)

    def next_serial(self) -> int:
        """Give a number that no instance has had."""
        self.serial += 1
        return self.serial

    def push(self, uuid_text: str, kind: int, data: int, *, gi: int = NOT_MIG, ci: int = NOT_MIG) -> None:
        """Add an event; old ones are forgotten."""
        self.event_seq += 1
        self.events = [*self.events, Event(self.event_seq, uuid_text, kind, data, gi, ci)][-_EVENTS_KEPT:]


def first_state(
    profile: MachineProfile,
    *,
    salt: str,
    layout: str,
    boot_id: str = "",
    real_nodes: bool = True,
    fresh: bool = False,
) -> NodeState:
    """Give the state of a node that has just been switched on."""
    return NodeState(
        profile=profile.name,
        salt=salt,
        layout=layout,
        boot_id=boot_id or str(uuid.uuid4()),
        module_version=profile.driver_version,
        library_version=profile.driver_version,
        majors=default_majors(profile.driver_version),
        gpus=[
            GpuState(
                slot.uuid,
                ecc_current=int(slot.model.bus_width > 256),
                ecc_pending=int(slot.model.bus_width > 256),
            )
            for slot in profile.gpus
        ],
        real_nodes=real_nodes,
        fresh=fresh,
    )


def reset(gpu: GpuState) -> None:
    """Clear what a reset of one GPU clears. Its MIG devices go, its MIG mode stays."""
    gpu.lost = False
    gpu.instances.clear()
    gpu.processes.clear()
    _clear_errors(gpu)


def _clear_errors(gpu: GpuState) -> None:
    gpu.ecc_corrected_total += gpu.ecc_corrected
    gpu.ecc_uncorrected_total += gpu.ecc_uncorrected
    gpu.ecc_corrected = gpu.ecc_uncorrected = 0
    gpu.remapped_uncorrected += gpu.remap_pending
    gpu.remap_pending = gpu.retired_pending = 0
    gpu.recovery_action = gpu.pcie_replays = gpu.energy_mj = 0
    gpu.nvlinks_down.clear()


def reboot(state: NodeState, profile: MachineProfile, *, boot_id: str = "") -> None:
    """Clear what a reboot clears.

    MIG devices go everywhere; the MIG mode survives on Ampere (it is in the InfoROM) and not from Hopper on.
    Modes, processes, events and volatile counters go; a lost GPU is back; what a person took out stays out.
    Dynamic majors move. Faults stay: they belong to the test.
    """
    models = {slot.uuid: slot.model for slot in profile.gpus}
    state.boot_id = boot_id or str(uuid.uuid4())
    state.boots += 1
    state.module_version = state.library_version
    uvm = state.majors.get("nvidia-uvm", 510)
    state.majors["nvidia-uvm"] = 510 if uvm != 510 else 508
    state.events.clear()
    state.vfio_drivers.clear()
    for gpu in state.gpus:
        gpu.pci_driver, gpu.driver_override, gpu.vfs = NVIDIA_DRIVER, "", 0
        gpu.lost = False
        gpu.instances.clear()
        gpu.processes.clear()
        gpu.mig_current = 0 if models[gpu.uuid].architecture >= HOPPER else gpu.mig_pending
        gpu.mig_pending = gpu.mig_current
        gpu.persistence = True
        gpu.compute_mode = gpu.timeslice = 0
        gpu.ecc_current = gpu.ecc_pending
        _clear_errors(gpu)


class StateStore:
    """The state file of one node, shared by threads and processes.

    `read` gives an object that nobody may change; `update` changes a copy under the file lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "state.json"
        self._lock_path = folder / "state.lock"
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._state: NodeState | None = None

    def exists(self) -> bool:
        """Say whether the node has been made."""
        return self._path.exists()

    def create(self, state: NodeState) -> None:
        """Write the first state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self._write(state)

    def read(self) -> NodeState:
        """Give the state as it is now; one stat when nothing has changed."""
        status = self._path.stat()
        seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        with self._lock:
            if self._state is None or self._seen != seen:
                self._state = state_from_json(json.loads(self._path.read_bytes()))
                self._seen = seen
            return self._state

    def update(self, change: Callable[[NodeState], T]) -> T:
        """Change the state; if `change` raises, nothing is changed."""
        with self.locked():
            state = state_from_json(json.loads(self._path.read_bytes()))
            result = change(state)
            self._write(state)
            return result

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes and threads from changing the state."""
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, state: NodeState) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(state), separators=(",", ":")))
        temporary.replace(self._path)


def state_from_json(data: dict[str, Any]) -> NodeState:
    """Give the state for its JSON form; fields that are missing get their defaults, strangers are ignored."""
    known = _known(NodeState, data)
    known["gpus"] = [_gpu_from_json(gpu) for gpu in data["gpus"]]
    known["events"] = [Event(**_known(Event, event)) for event in data.get("events", [])]
    known["faults"] = [Fault(**_known(Fault, fault)) for fault in data.get("faults", [])]
    return NodeState(**known)


def _gpu_from_json(data: dict[str, Any]) -> GpuState:
    known = _known(GpuState, data)
    known["processes"] = [Process(**_known(Process, process)) for process in data.get("processes", [])]
    known["instances"] = [
        GpuInstance(
            **{
                **_known(GpuInstance, instance),
                "computes": [
                    ComputeInstance(**_known(ComputeInstance, part)) for part in instance.get("computes", [])
                ],
            }
        )
        for instance in data.get("instances", [])
    ]
    return GpuState(**known)


_FIELDS: dict[type, frozenset[str]] = {}


def _known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = frozenset(entry.name for entry in fields(kind))
    return {name: value for name, value in data.items() if name in names}
