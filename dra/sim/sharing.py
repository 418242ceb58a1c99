"""Sharing on nodes that have no processes: hardware and keeper are dictionaries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dra.host.paths import HostPaths
from dra.plugin.sharing import Sharing
from dra.prepare.sharing.compute_mode import ComputeModeName
from dra.prepare.sharing.mps import DaemonStatus
from dra.prepare.sharing.mps_folders import make_folders, remove_folders
from dra.prepare.sharing.mps_model import DaemonSpec, daemon_folders


class MemoryModes:
    """Compute modes that nobody else sees."""

    def __init__(self) -> None:
        self.modes: dict[str, ComputeModeName] = {}

    def get(self, gpu_uuid: str) -> ComputeModeName:
        """Give the mode of a GPU."""
        return self.modes.get(gpu_uuid, "DEFAULT")

    def set(self, gpu_uuid: str, mode: ComputeModeName) -> None:
        """Set it."""
        self.modes[gpu_uuid] = mode


class MemorySlices:
    """Time-slices that nobody else sees."""

    def __init__(self) -> None:
        self.slices: dict[str, int] = {}

    def set(self, gpu_uuid: str, interval: int) -> None:
        """Set the time-slice."""
        self.slices[gpu_uuid] = interval


class MemoryKeeper:
    """A keeper without daemons: it remembers what they should be. Their folders are there, since containers mount them."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._lock = threading.Lock()
        self.daemons: dict[str, DaemonSpec] = {}

    def ensure(self, spec: DaemonSpec) -> None:
        """Remember a daemon."""
        make_folders(daemon_folders(self._state_dir, spec.id), memory=False)
        with self._lock:
            self.daemons[spec.id] = spec

    def status(self, daemon_id: str) -> DaemonStatus | None:
        """Give what is known of it."""
        spec = self.daemons.get(daemon_id)
        return None if spec is None else DaemonStatus(spec, ready=True)

    def stop(self, daemon_id: str) -> None:
        """Forget it."""
        with self._lock:
            self.daemons.pop(daemon_id, None)
        remove_folders(daemon_folders(self._state_dir, daemon_id))


def memory_sharing(
    paths: HostPaths, *, driver: str, state_dir: Path, host_path: Callable[[Path], str] | None = None
) -> Sharing[MemoryKeeper]:
    """Give the ways of sharing of a node without processes."""
    return Sharing(
        paths,
        driver=driver,
        modes=MemoryModes(),
        slices=MemorySlices(),
        keeper=MemoryKeeper(state_dir),
        notify=lambda _notice: None,
        state_dir=state_dir,
        host_path=host_path,
    )
