"""Keepers on one simulated node, in this process: each a new instance on the same state directory."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from dra.host.paths import HostPaths
from dra.host.processes import start_ticks
from dra.mps.control import Timings
from dra.mps.service import KeeperService, KeeperSettings
from dra.prepare.sharing.keeper_client import KeeperClient
from dra.prepare.sharing.mps_model import DaemonSpec, daemon_folders, mps_folder
from dra.sim.node import SimulatedNode

DRIVER = "gpu.nvidia.com"
GPU = "GPU-00000000-0000-0000-0000-00000000000a"


class KeeperRig:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.machine = SimulatedNode("t4-x1", root)
        self.paths = HostPaths(**self.machine.paths_kwargs())
        self.state_dir = self.paths.state_dir(DRIVER)
        self.services: list[KeeperService] = []
        self.client = KeeperClient(self.state_dir)

    def keeper(self, *, isolate: bool = False, **timings) -> KeeperService:
        """Start a keeper; the one before is stopped."""
        for service in self.services:
            service.stop()
        settings = KeeperSettings(
            DRIVER,
            self.paths,
            isolate=isolate,
            timings=Timings(**{"ready": 60.0, "command": 60.0, **timings}),
        )
        service = KeeperService(settings)
        service.start()
        self.services.append(service)
        return service

    def close(self) -> None:
        for service in self.services:
            service.stop()
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    # -- looking

    @property
    def table(self) -> Path:
        return mps_folder(self.state_dir) / "keeper.json"

    def rows(self) -> dict[str, dict]:
        if not self.table.exists():
            return {}
        return {row["spec"]["id"]: row for row in json.loads(self.table.read_text())["daemons"]}

    def pids(self) -> list[int]:
        """The processes that daemons of this node have ever been, and that still live."""
        seen = {entry["pid"] for entry in self.log() if entry["what"] == "start"}
        return [pid for pid in seen if start_ticks(pid) is not None]

    def log(self) -> list[dict]:
        """What the stand-ins wrote down."""
        file = self.root / "sim/mps.log"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def commands(self) -> list[str]:
        return [entry["command"] for entry in self.log() if entry["what"] == "command"]

    def ask(self, daemon_id: str, *commands: str) -> list[str]:
        """Talk to a daemon as an administrator would."""
        launcher = self.services[-1].keeper._control.launcher
        return launcher.ask(daemon_folders(self.state_dir, daemon_id), commands, seconds=60).output.split()

    def folders(self) -> list[str]:
        """Folders of daemons."""
        folder = mps_folder(self.state_dir)
        return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []

    def fail(self, **faults) -> None:
        """Make the stand-in fail from now on."""
        (self.root / "sim/mps-faults.json").write_text(json.dumps(faults))


def spec(daemon_id: str = "claim-1", **more) -> DaemonSpec:
    return DaemonSpec(daemon_id, **{"devices": (GPU,), **more})


def until(condition, what: str = "", seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it never happened: {what}"
        time.sleep(0.02)
    return value
