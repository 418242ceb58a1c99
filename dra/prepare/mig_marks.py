"""Marks of ownership: which partitions and MIG modes are ours, in files that outlive a lost claim record.

A claim's record says it first and in full. Were that record lost, the partition that was made for the claim would look
like one made by hand: its GPU would turn static, and nobody would ever destroy it. So each partition that was made has
a small file of its own, `mig/<device>.json`, and each GPU whose mode was switched on `mig/mode-<GPU UUID>.json`.

How such files are kept is in `dra.prepare.mark_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.inventory.ownership import Owned
from dra.prepare.mark_files import MarkFiles
from dra.prepare.partitions import Partition

FOLDER = "mig"
_MODE = "mode-"


@dataclass(frozen=True, slots=True)
class Mark:
    """A partition of this boot that this driver made."""

    device: str
    gpu_uuid: str
    partition: Partition


@dataclass(frozen=True, slots=True)
class Marks:
    """All marks of this boot: partitions by device name, and UUIDs of the GPUs whose MIG mode is ours."""

    partitions: Mapping[str, Mark]
    modes: frozenset[str]

    @property
    def owned(self) -> Owned:
        """The same for the inventory."""
        return Owned(frozenset(self.partitions), self.modes)


NO_MARKS = Marks({}, frozenset())


class MarkDirectory:
    """The marks of one node. Thread-safe; written under the lock of the GPU only. Never raises: the records tell too.

    Args:
        state_dir: the driver's directory.
        boot_id: of this boot; marks of others mean nothing.
    """

    def __init__(self, state_dir: Path, *, boot_id: str) -> None:
        self._files = MarkFiles(state_dir / FOLDER, boot_id=boot_id)

    def partition_made(self, device: str, gpu_uuid: str, partition: Partition) -> None:
        """Note a partition that was made."""
        instances = {"gi": partition.gpu_instance, "ci": partition.compute_instance}
        self._files.write(device, {"device": device, "gpu": gpu_uuid, "uuid": partition.uuid, **instances})

    def partition_gone(self, device: str) -> None:
        """Forget a partition that was destroyed, or is not ours any more."""
        self._files.remove(device)

    def mode_on(self, gpu_uuid: str) -> None:
        """Note that the MIG mode of a GPU is ours."""
        self._files.write(f"{_MODE}{gpu_uuid}", {"gpu": gpu_uuid})

    def mode_off(self, gpu_uuid: str) -> None:
        """Forget that."""
        self._files.remove(f"{_MODE}{gpu_uuid}")

    def read(self) -> Marks:
        """Give all marks of this boot; none where the directory cannot be read."""
        return _marks(self._files.read())

    def read_of(self, devices: Iterable[str], gpus: Iterable[str]) -> Marks:
        """Give the marks of these partitions, and of the modes of these GPUs (UUIDs)."""
        return _marks(self._files.read([*devices, *(f"{_MODE}{gpu_uuid}" for gpu_uuid in gpus)]))

    def clear_old(self) -> int:
        """Remove what another boot left; how many."""
        return self._files.clear_old()

    def leftovers(self) -> list[Path]:
        """Give the temporary files of writes that never ended, or have not yet."""
        return self._files.leftovers()


def _marks(files: Iterable[tuple[str, Mapping[str, Any]]]) -> Marks:
    partitions: dict[str, Mark] = {}
    modes: set[str] = set()
    for name, content in files:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if name.startswith(_MODE):
                modes.add(str(content["gpu"]))
            elif content["device"] == name:
                made = Partition(int(content["gi"]), int(content["ci"]), str(content["uuid"]))
                partitions[name] = Mark(name, str(content["gpu"]), made)
    return Marks(partitions, frozenset(modes))
