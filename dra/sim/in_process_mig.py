"""MIG of in-process nodes: the placement rules of the simulated NVML over a state in memory.

No files, no sessions and no threads, so that hundreds of nodes can have partitions. What a real node's files say of
partitions (`/proc/driver/nvidia/capabilities`) is there for all that could exist, since the nodes share them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pynvml

from dra.errors import DeviceError
from dra.inventory.model import Gpu, Inventory, MigDevice
from dra.prepare.partitions import Look, Partition
from dra.sim.node import SimulatedNode
from dra.sim.nvml.files import facts_of
from dra.sim.nvml.functions.mig_changes import add_compute_instance, add_gpu_instance
from dra.sim.nvml.library import mig_uuid
from dra.sim.nvml.memory import Status
from dra.sim.nvml.mig_tables import COMPUTE_KINDS, MigTable, mig_table
from dra.sim.nvml.models import HOPPER
from dra.sim.nvml.state import GpuInstance, GpuState, first_state
from dra.sim.profiles import MachineProfile, machine_profile
from dra.sim.tree import sync_tree

# GPU instance ids go up to this. Source: `MigTable.instance_ids` of a GPU with eight memory slices.
_MOST_INSTANCES = 15


def offer_all_capabilities(node: SimulatedNode) -> None:
    """Write the capability files of every GPU instance that could be made, each with one compute instance."""
    facts = facts_of(node.control.state, node.profile)
    every = tuple(
        (slot.minor, instance, (0,))
        for slot in facts.gpus
        if slot.model.mig_table is not None
        for instance in range(_MOST_INSTANCES)
    )
    sync_tree(node.tree, replace(facts, mig=every))


class MigInMemory:
    """The partitions of one node; a `MigControl` of `dra.prepare`. Thread-safe."""

    def __init__(self, profile: str, *, salt: str) -> None:
        machine: MachineProfile = machine_profile(profile, salt=salt)
        self._models = {slot.uuid: slot.model for slot in machine.gpus}
        self._driver_version = machine.driver_version
        self._state = first_state(machine, salt=salt, layout="host", boot_id="memory")
        self._lock = threading.Lock()

    def on(self, inventory: Inventory) -> Inventory:
        """Give the inventory with the partitions that exist now."""
        with self._lock:
            if not any(gpu.mig_current for gpu in self._state.gpus):
                return inventory
            return replace(inventory, gpus=tuple(self._on_gpu(gpu) for gpu in inventory.gpus))

    def look(self, gpu_uuid: str, *, profile_id: int, start: int) -> Look:
        """Give what stands at a placement."""
        with self._lock:
            gpu = self._gpu(gpu_uuid)
            found = self._at(gpu, profile_id, start)
            return Look(bool(gpu.mig_current), None if found is None else _partition(gpu, found))

    def create(self, gpu_uuid: str, *, profile_id: int, start: int) -> Partition:
        """Make a partition. Raises DeviceError: DRA-MIG-OCCUPIED, DRA-MIG-PLACEMENT, DRA-MIG-MODE-NEEDS-RESET."""
        with self._lock:
            gpu, table = self._gpu(gpu_uuid), self._table(gpu_uuid)
            profile = table.by_id(profile_id)
            if profile is None:
                raise DeviceError("DRA-MIG-PLACEMENT", f"GPU {gpu_uuid} has no MIG profile {profile_id}")
            if not gpu.mig_current:
                if self._models[gpu_uuid].architecture < HOPPER:
                    raise DeviceError("DRA-MIG-MODE-NEEDS-RESET", f"GPU {gpu_uuid}: MIG mode is off")
                gpu.mig_current = gpu.mig_pending = 1
            try:
                made = add_gpu_instance(
                    self._state, table, gpu_uuid, profile_id=profile_id, place=(start, profile.size)
                )
            except Status as status:
                raise _refused(status, gpu_uuid, profile_id, start) from status
            add_compute_instance(
                self._state,
                table,
                gpu_uuid,
                serial=made.serial,
                profile_id=COMPUTE_KINDS[profile.slices],
                start=None,
            )
            return _partition(gpu, made)

    def destroy(self, gpu_uuid: str, partition: Partition, *, profile_id: int, start: int) -> bool:
        """Destroy a partition; False if it is gone."""
        with self._lock:
            gpu = self._gpu(gpu_uuid)
            found = self._at(gpu, profile_id, start)
            if found is None or _partition(gpu, found) != partition:
                return False
            gpu.instances.remove(found)
            return True

    def clear_half_made(self, gpu_uuid: str, *, profile_id: int, start: int) -> bool:
        """Say no: nothing is half made here."""
        return False

    def leave_mode(self, gpu_uuid: str) -> None:
        """Switch the MIG mode off unless something is left on the GPU."""
        with self._lock:
            gpu = self._gpu(gpu_uuid)
            if not gpu.instances and self._models[gpu_uuid].architecture >= HOPPER:
                gpu.mig_current = gpu.mig_pending = 0

    def neighbours(self, gpu_uuid: str) -> Sequence[tuple[int, int, str]]:
        """Give the GPU instances as (start, size, description)."""
        with self._lock:
            return [
                (each.start, each.size, f"GPU instance {each.gi}") for each in self._gpu(gpu_uuid).instances
            ]

    def _gpu(self, gpu_uuid: str) -> GpuState:
        found = self._state.gpu(gpu_uuid)
        if found is None:
            raise DeviceError("DRA-NVML-GPU-NOT-FOUND", f"there is no GPU {gpu_uuid}")
        return found

    def _table(self, gpu_uuid: str) -> MigTable:
        found = mig_table(self._models[gpu_uuid].mig_table, self._driver_version)
        if found is None:
            raise DeviceError("DRA-MIG-PLACEMENT", f"GPU {gpu_uuid} has no MIG")
        return found

    @staticmethod
    def _at(gpu: GpuState, profile_id: int, start: int) -> GpuInstance | None:
        return next((i for i in gpu.instances if (i.profile_id, i.start) == (profile_id, start)), None)

    def _on_gpu(self, gpu: Gpu) -> Gpu:
        state = self._gpu(gpu.uuid)
        profiles = {profile.profile_id: profile for profile in gpu.mig_profiles}
        devices = [
            MigDevice(
                mig_uuid(gpu.uuid, each.gi, each.computes[0].ci), profiles[each.profile_id],
                each.gi, each.computes[0].ci, each.start, each.size, ours=True,
            )
            for each in sorted(state.instances, key=lambda each: (each.start, each.size))
        ]  # fmt: skip
        on = bool(state.mig_current)
        return replace(gpu, mig_enabled=on, mig_mode_ours=on, mig_devices=tuple(devices))


def _partition(gpu: GpuState, instance: GpuInstance) -> Partition:
    compute = instance.computes[0].ci
    return Partition(instance.gi, compute, mig_uuid(gpu.uuid, instance.gi, compute))


def _refused(status: Status, gpu_uuid: str, profile_id: int, start: int) -> DeviceError:
    place = f"GPU {gpu_uuid}: MIG profile {profile_id} at memory slice {start}"
    if status.code == pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES:
        return DeviceError("DRA-MIG-OCCUPIED", f"{place}: no room", retryable=True)
    return DeviceError("DRA-MIG-PLACEMENT", f"{place}: there is no such place")
