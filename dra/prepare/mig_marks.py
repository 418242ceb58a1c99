"""Marks of ownership: which partitions and MIG modes are ours, in files that outlive a lost claim record.

A claim's record says it first and in full. Were that record lost, the partition that was made for the claim would look
like one made by hand: its GPU would turn static, and nobody would ever destroy it. So each partition that was made has
a small file of its own, `mig/<device>.json`, and each GPU whose mode was switched on `mig/mode-<GPU UUID>.json`.

A reboot undoes what they tell of, so that nothing needs to survive a power failure and nothing is fsynced.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.errors import HostError
from dra.host.files import ensure_dir, is_leftover, read_bytes, remove_durable, write_durable
from dra.inventory.ownership import Owned
from dra.prepare.partitions import Partition
from dra.telemetry.log import error_fields, get_logger
from dra.values import is_dns_label

FOLDER = "mig"
_MODE = "mode-"

log = get_logger()


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
    """The marks of one node. Thread-safe; written under the lock of the GPU only.

    A mark that cannot be written or removed is a line in the log, never an error: the records still tell.

    Args:
        state_dir: the driver's directory.
        boot_id: of this boot; marks of others mean nothing.
    """

    def __init__(self, state_dir: Path, *, boot_id: str) -> None:
        self._directory = state_dir / FOLDER
        self._boot_id = boot_id

    def partition_made(self, device: str, gpu_uuid: str, partition: Partition) -> None:
        """Note a partition that was made."""
        instances = {"gi": partition.gpu_instance, "ci": partition.compute_instance}
        self._write(device, {"device": device, "gpu": gpu_uuid, "uuid": partition.uuid, **instances})

    def partition_gone(self, device: str) -> None:
        """Forget a partition that was destroyed, or is not ours any more."""
        self._remove(device)

    def mode_on(self, gpu_uuid: str) -> None:
        """Note that the MIG mode of a GPU is ours."""
        self._write(f"{_MODE}{gpu_uuid}", {"gpu": gpu_uuid})

    def mode_off(self, gpu_uuid: str) -> None:
        """Forget that."""
        self._remove(f"{_MODE}{gpu_uuid}")

    def read(self) -> Marks:
        """Give all marks of this boot; none where the directory cannot be read."""
        return self._read(self._names())

    def read_of(self, devices: Iterable[str], gpus: Iterable[str]) -> Marks:
        """Give the marks of these partitions, and of the modes of these GPUs (UUIDs)."""
        names = [*devices, *(f"{_MODE}{gpu_uuid}" for gpu_uuid in gpus)]
        return self._read(name for name in names if is_dns_label(name.lower()))

    def _read(self, names: Iterable[str]) -> Marks:
        partitions: dict[str, Mark] = {}
        modes: set[str] = set()
        for name in names:
            content = self._content(name)
            if content is None or content.get("boot_id") != self._boot_id:
                continue
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if name.startswith(_MODE):
                    modes.add(str(content["gpu"]))
                elif content["device"] == name:
                    made = Partition(int(content["gi"]), int(content["ci"]), str(content["uuid"]))
                    partitions[name] = Mark(name, str(content["gpu"]), made)
        return Marks(partitions, frozenset(modes))

    def clear_old(self) -> int:
        """Remove what another boot left; how many."""
        stale = [
            name
            for name in self._names()
            if (content := self._content(name)) is not None and content.get("boot_id") != self._boot_id
        ]
        for name in stale:
            self._remove(name)
        return len(stale)

    def leftovers(self) -> list[Path]:
        """Give the temporary files of writes that never ended, or have not yet."""
        return [self._directory / entry for entry in self._entries() if is_leftover(entry, prefix="")]

    def _names(self) -> Iterator[str]:
        yield from (entry.removesuffix(".json") for entry in self._entries() if entry.endswith(".json"))

    def _entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self._directory))  # noqa: PTH208 - names are all that is wanted
        except OSError:
            return []

    def _content(self, name: str) -> Mapping[str, Any] | None:
        """Give what a mark says, nothing if it is damaged; None if it is not there or cannot be read."""
        try:
            data = read_bytes(self._directory / f"{name}.json")
        except HostError:
            return None
        if data is None:
            return None
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        if not is_dns_label(name.lower()):
            return
        data = json.dumps({**content, "boot_id": self._boot_id}, separators=(",", ":")).encode()
        path = self._directory / f"{name}.json"
        try:
            ensure_dir(self._directory, mode=0o750)
            write_durable(path, data, mode=0o600, fsync=False)
        except HostError as error:
            log.warning("mig_mark_not_written", **error_fields(error))

    def _remove(self, name: str) -> None:
        path = self._directory / f"{name}.json"
        try:
            if os.path.lexists(path):
                remove_durable(path, fsync=False)
        except HostError as error:
            log.warning("mig_mark_not_removed", **error_fields(error))
