"""MPS control daemons as prepare and the keeper see them: what one is started with, where its files are, the protocol.

The keeper (`dra.mps`) is a process apart: it owns the daemons, since one that dies takes its clients with it. The plugin
tells it what it wants over a unix socket: one JSON object a line, one answer a line.

    {"v": 1, "op": "ensure", "daemon": {...}, "wait_seconds": 15}      ->  {"v": 1, "ok": true, "pid": 4711, "started": true}
    {"v": 1, "op": "status", "id": "..."}                              ->  {"v": 1, "ok": true, "known": true, "ready": true, ...}
    {"v": 1, "op": "stop", "id": "..."}                                ->  {"v": 1, "ok": true, "stopped": true}
    {"v": 1, "op": "list"}                                             ->  {"v": 1, "ok": true, "daemons": [...]}
    {"v": 1, "op": "events", "after": 3, "wait_seconds": 30}           ->  {"v": 1, "ok": true, "events": [...], "last": 5}
    anything that fails                                                ->  {"v": 1, "ok": false, "error": {"code": ..., ...}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROTOCOL = 1
FOLDER = "mps"
SOCKET_NAME = "keeper.sock"
TABLE_NAME = "keeper.json"
# What a request or an answer may be at most.
LINE_BYTES = 1 << 20

# Where a container finds them; NVIDIA's driver and its device plugin use the same. The log is the daemon's alone.
CONTAINER_PIPE = "/tmp/nvidia-mps"  # noqa: S108 - MPS's own default
CONTAINER_LOG = "/tmp/nvidia-mps-log"  # noqa: S108
CONTAINER_SHM = "/dev/shm"  # noqa: S108
MOUNT_OPTIONS = ("rw", "nosuid", "nodev", "bind")

_VOLTA = (7, 0)

# Part of a path; also what keeps it from leaving the folder.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,180}", re.ASCII)
_UUID = re.compile(r"(?:GPU|MIG)-[A-Za-z0-9-/]{1,120}", re.ASCII)


def serves_several_users(compute_capability: tuple[int, int] | None) -> bool:
    """Whether MPS on a GPU can serve clients of several users at once. Source: `-M`, from Volta on."""
    return compute_capability is not None and compute_capability >= _VOLTA


@dataclass(frozen=True, slots=True)
class DaemonSpec:
    """What a control daemon is to be.

    Args:
        id: names it, and its folder.
        devices: UUIDs of GPUs or MIG devices that it serves.
        active_thread_percentage: a client's share of the multiprocessors unless it asks for less; None: all.
        pinned_memory_mib: how much memory of a device each process of a client may take, by UUID.
        multi_user: whether clients of several users may connect at once.
        claim: for people: whose it is.
    """

    id: str
    devices: tuple[str, ...]
    active_thread_percentage: int | None = None
    pinned_memory_mib: Mapping[str, int] = field(default_factory=dict)
    multi_user: bool = False
    claim: str = ""

    def as_json(self) -> dict[str, Any]:
        """Give it for the protocol and the table."""
        return {
            "id": self.id,
            "devices": list(self.devices),
            "active_thread_percentage": self.active_thread_percentage,
            "pinned_memory_mib": dict(self.pinned_memory_mib),
            "multi_user": self.multi_user,
            "claim": self.claim,
        }

    @classmethod
    def from_json(cls, data: Any) -> DaemonSpec:
        """Read it; unknown fields are left out. Raises ValueError."""
        if not isinstance(data, Mapping):
            raise ValueError("a daemon is an object")  # noqa: TRY004 - one kind of error for what is no daemon
        devices, limits = data.get("devices"), data.get("pinned_memory_mib") or {}
        percentage, claim = data.get("active_thread_percentage"), data.get("claim", "")
        if not isinstance(devices, list) or not devices or not all(_is_uuid(each) for each in devices):
            raise ValueError("devices must be UUIDs of GPUs or MIG devices")
        if percentage is not None and (type(percentage) is not int or not 1 <= percentage <= 100):
            raise ValueError("active_thread_percentage must be 1 to 100")
        if not isinstance(limits, Mapping) or not all(
            _is_uuid(key) and type(size) is int and size > 0 for key, size in limits.items()
        ):
            raise ValueError("pinned_memory_mib must be positive numbers by UUID")
        if not isinstance(claim, str):
            raise ValueError("claim must be a text")  # noqa: TRY004
        return cls(
            check_id(data.get("id")),
            tuple(devices),
            percentage,
            dict(limits),
            bool(data.get("multi_user")),
            claim,
        )

    def commands(self) -> tuple[str, ...]:
        """Give the commands that set its limits.

        Source: nvidia-cuda-mps-control(1).
        """
        found = []
        if self.active_thread_percentage is not None:
            found.append(f"set_default_active_thread_percentage {self.active_thread_percentage}")
        found += [
            f"set_default_device_pinned_mem_limit {uuid} {size}M"
            for uuid, size in sorted(self.pinned_memory_mib.items())
        ]
        return tuple(found)

    def needs_restart(self, other: DaemonSpec) -> bool:
        """Whether a daemon that runs as `other` cannot become this one while it runs."""
        return set(self.devices) != set(other.devices) or self.multi_user != other.multi_user


@dataclass(frozen=True, slots=True)
class DaemonFolders:
    """Where the files of a daemon are: below the driver's state directory, which is the host's path too."""

    root: Path

    @property
    def pipe(self) -> Path:
        """What its clients talk to it through."""
        return self.root / "pipe"

    @property
    def shm(self) -> Path:
        """What stands for `/dev/shm` of the daemon and of its clients, and of nobody else."""
        return self.root / "shm"

    @property
    def log(self) -> Path:
        """Its logs."""
        return self.root / "log"


def mps_folder(state_dir: Path) -> Path:
    """Give the folder of all daemons, and of the keeper's socket and table."""
    return state_dir / FOLDER


def daemon_folders(state_dir: Path, daemon_id: str) -> DaemonFolders:
    """Give the folders of one daemon. Raises ValueError for an id that is none."""
    return DaemonFolders(mps_folder(state_dir) / check_id(daemon_id))


def check_id(daemon_id: object) -> str:
    """Refuse an id that could not be part of a path. Raises ValueError."""
    if not isinstance(daemon_id, str) or _ID.fullmatch(daemon_id) is None:
        raise ValueError(f"{str(daemon_id)[:60]!r} is no name of a daemon")
    return daemon_id


def _is_uuid(text: object) -> bool:
    return isinstance(text, str) and _UUID.fullmatch(text) is not None
