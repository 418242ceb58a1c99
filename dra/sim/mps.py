"""The MPS keeper of a simulated node, as a process of its own, and the daemons that it keeps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dra.errors import DraError
from dra.host.processes import Running, start_ticks
from dra.mps.table import Row, read_rows
from dra.prepare.sharing.keeper_client import KeeperClient
from dra.prepare.sharing.mps_model import TABLE_NAME, mps_folder
from dra.sim.leash import Leash

_DRIVER = "gpu.nvidia.com"
_STOP_SECONDS = 10.0


@dataclass(slots=True)
class NodeKeeper:
    """The keeper of one node. Its daemons end with this process, however that ends."""

    profile: str
    root: Path
    leash: Leash
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The keeper's log."""
        return self.root / "keeper.log"

    @property
    def folder(self) -> Path:
        """Where its socket, its table and the folders of its daemons are."""
        return mps_folder(self.root / f"var/lib/kubelet/plugins/{_DRIVER}")

    @property
    def runs(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    @property
    def listens(self) -> bool:
        """Whether it answers."""
        if not self.runs:
            return False
        try:
            KeeperClient(self.folder.parent).hello()
        except DraError:
            return False
        return True

    def start(self) -> None:
        """Start it, in a session of its own, if it does not run."""
        if self.runs:
            return
        command = [
            sys.executable, "-m", "dra.cli.mps_keeper", "--simulate", self.profile, "--host-root", str(self.root),
        ]  # fmt: skip
        env = {**os.environ, "DRA_SIM_LIFE": f"{os.getpid()} {start_ticks(os.getpid())}"}
        self.process = self.leash.start(command, log=self.log, env=env, session=True)

    def stop(self, *, kill: bool = False) -> None:
        """End its process. The daemons run on."""
        if self.process is None:
            return
        self.process.kill() if kill else self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def daemons(self) -> tuple[Row, ...]:
        """Give what its table says."""
        return read_rows(self.folder / TABLE_NAME)

    def kill_daemons(self) -> int:
        """Kill all its daemons; how many."""
        return sum(_kill(row) for row in self.daemons())

    def close(self) -> None:
        """End keeper and daemons. The files stay."""
        self.stop()
        self.kill_daemons()


def _kill(row: Row) -> bool:
    running = Running.find(row.pid, row.started)
    if running is None:
        return False
    with contextlib.closing(running):
        running.signal_all(signal.SIGKILL)
    return True
