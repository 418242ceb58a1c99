"""MIG partitions of this machine, as the prepare room changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dra.inventory.model import Gpu, Inventory
from dra.nvml.mig_control import MigOfGpu
from dra.nvml.mig_gpu import MigInstance
from dra.nvml.session import NvmlSession
from dra.prepare.partitions import Look, Partition

# Creating takes about a second, destroying too; the kubelet gives up after 45 s.
CHANGE_SECONDS = 20.0


class MigPort:
    """Partitions through NVML. Thread-safe; changes of one GPU are made under its lock.

    Args:
        session: NVML.
        inventory: what the node has, for addresses: a GPU that is looked up by UUID may wake others.
    """

    def __init__(
        self,
        session: NvmlSession,
        inventory: Callable[[], Inventory],
        *,
        change_seconds: float = CHANGE_SECONDS,
    ) -> None:
        self._session = session
        self._inventory = inventory
        self._change_seconds = change_seconds

    def look(self, gpu_uuid: str, *, profile_id: int, start: int) -> Look:
        """Give what stands at a placement. Raises DraError."""
        found = self._of(gpu_uuid).look(profile_id=profile_id, start=start)
        if found.gi is None or found.ci is None or not found.uuid:
            return Look(found.mode_on)
        return Look(found.mode_on, Partition(found.gi, found.ci, found.uuid))

    def create(self, gpu_uuid: str, *, profile_id: int, start: int) -> Partition:
        """Make a partition. Raises DraError."""
        made = self._of(gpu_uuid).create(profile_id=profile_id, start=start)
        return Partition(made.gi, made.ci, made.uuid)

    def destroy(self, gpu_uuid: str, partition: Partition, *, profile_id: int, start: int) -> bool:
        """Destroy a partition; False if it is gone. Raises DraError."""
        return self._of(gpu_uuid).destroy(
            gi=partition.gpu_instance, ci=partition.compute_instance, uuid=partition.uuid,
            profile_id=profile_id, start=start,
        )  # fmt: skip

    def clear_half_made(self, gpu_uuid: str, *, profile_id: int, start: int) -> bool:
        """Destroy half of a partition; whether there was one. Raises DraError."""
        return self._of(gpu_uuid).clear_half_made(profile_id=profile_id, start=start)

    def leave_mode(self, gpu_uuid: str) -> None:
        """Switch the MIG mode off unless something is left on the GPU. Raises DraError."""
        self._of(gpu_uuid).mode_off_if_empty()

    def neighbours(self, gpu_uuid: str) -> Sequence[tuple[int, int, str]]:
        """Give the GPU instances as (start, size, description). Raises DraError."""
        gpu = self._gpu(gpu_uuid)
        names = {} if gpu is None else {each.profile_id: each.name for each in gpu.mig_profiles}
        return [
            (each.start, each.size, _describe(each, names.get(each.profile_id, f"profile {each.profile_id}")))
            for each in self._of(gpu_uuid).instances()
        ]

    def _of(self, gpu_uuid: str) -> MigOfGpu:
        gpu = self._gpu(gpu_uuid)
        return MigOfGpu(
            self._session, gpu_uuid,
            address=None if gpu is None else gpu.pci_address, deadline_seconds=self._change_seconds,
        )  # fmt: skip

    def _gpu(self, gpu_uuid: str) -> Gpu | None:
        return next((gpu for gpu in self._inventory().gpus if gpu.uuid == gpu_uuid), None)


def _describe(instance: MigInstance, profile: str) -> str:
    end = instance.start + instance.size - 1
    return f"GPU instance {instance.gi} ({profile} in memory slices {instance.start} to {end})"
