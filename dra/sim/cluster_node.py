"""A node of the simulated cluster with a driver process of its own: its files, its kubelet, its driver."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.sim.kubelet import PodLoop, SimKubelet, Timings
from dra.sim.leash import Leash
from dra.sim.mps import NodeKeeper
from dra.sim.node import SimulatedNode
from dra.sim.runtime import Runtime

DRIVER = "gpu.nvidia.com"
Json = dict[str, Any]

# A simulated kubelet looks and retries faster than a real one, so that a person does not wait.
TIMINGS = Timings(
    scan=0.1, first_back_off=0.2, health_retry=1.0, reconcile=5.0, prepare_retry=3.0, unprepare_retry=1.0
)


@dataclass(slots=True)
class ClusterNode:
    """A node of the cluster. `kubelet` and `loop` are others after `restart_kubelet`."""

    name: str
    profile: str
    root: Path
    machine: SimulatedNode
    kubelet: SimKubelet
    loop: PodLoop
    client: KubeClient
    leash: Leash
    kubeconfig: Path
    minor: int
    arguments: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    keeper: NodeKeeper | None = None

    @classmethod
    def make(
        cls,
        name: str,
        profile: str,
        root: Path,
        *,
        kubeconfig: Path,
        driver_kubeconfig: Path,
        minor: int,
        leash: Leash,
        arguments: Sequence[str] = (),
    ) -> ClusterNode:
        """Make the files and a kubelet that is not started. The driver's process comes with `start_driver`.

        Args:
            name: the node's name.
            profile: its machine.
            root: the folder for its files.
            kubeconfig: what the kubelet connects with.
            driver_kubeconfig: what the driver connects with, as itself.
            minor: Kubernetes 1.minor.
            leash: ends the processes with this one.
            arguments: more of `dra plugin`.
        """
        machine = SimulatedNode(profile, root, salt=name)
        (root / "var/lib/kubelet/plugins_registry").mkdir(parents=True, exist_ok=True)
        client = KubeClient(Connection(KubeOptions(kubeconfig=str(kubeconfig), user_agent="sim-kubelet")))
        kubelet, loop = _kubelet(name, root, client, minor)
        made = cls(
            name,
            profile,
            root,
            machine,
            kubelet,
            loop,
            client,
            leash,
            driver_kubeconfig,
            minor,
            tuple(arguments),
        )
        made.keeper = NodeKeeper(profile, root, leash)
        return made

    @property
    def cdi_root(self) -> Path:
        """Where the driver writes CDI files."""
        return self.root / "var/run/cdi"

    @property
    def state_dir(self) -> Path:
        """Where the driver keeps its records."""
        return self.root / f"var/lib/kubelet/plugins/{DRIVER}"

    @property
    def log(self) -> Path:
        """The driver's log."""
        return self.root / "plugin.log"

    @property
    def driver_runs(self) -> bool:
        """Whether the driver's process lives."""
        return self.process is not None and self.process.poll() is None

    @property
    def registered(self) -> bool:
        """Whether the kubelet knows the driver."""
        return self.kubelet.connection(DRIVER) is not None

    def start_kubelet(self) -> None:
        """Start the kubelet: it wipes the node's slices and looks for plugins and pods."""
        self.kubelet.start()
        self.loop.start()

    def restart_kubelet(self) -> None:
        """End the kubelet and start another one on its files; containers go on."""
        self.loop.stop()
        self.kubelet.stop()
        self.kubelet, self.loop = _kubelet(self.name, self.root, self.client, self.minor)
        self.start_kubelet()

    def start_driver(self) -> None:
        """Start the driver's process, if it does not run."""
        if self.driver_runs:
            return
        command = [
            sys.executable, "-m", "dra.cli.main", "plugin",
            "--simulate", self.profile, "--host-root", str(self.root), "--node-name", self.name,
            "--kubeconfig", str(self.kubeconfig), *self.arguments,
        ]  # fmt: skip
        self.process = self.leash.start(command, log=self.log, env={**os.environ, "POD_UID": ""})

    def stop_driver(self, *, timeout_seconds: float = 10.0, kill: bool = False) -> None:
        """End the driver's process: politely, then not; with `kill` at once."""
        if self.process is None:
            return
        self.process.kill() if kill else self.process.terminate()
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def ask_driver_to_stop(self) -> None:
        """Send the signal and do not wait: several drivers end side by side."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def stop(self) -> None:
        """End driver and kubelet. The files stay."""
        self.stop_driver()
        if self.keeper is not None:
            self.keeper.close()
        self.loop.stop()
        self.kubelet.stop()
        self.client.close()


def _kubelet(name: str, root: Path, client: KubeClient, minor: int) -> tuple[SimKubelet, PodLoop]:
    kubelet = SimKubelet(
        name, root / "var/lib/kubelet", client,
        slices=client, runtime=Runtime(root), minor=minor, timings=TIMINGS,
    )  # fmt: skip
    return kubelet, PodLoop(kubelet, client)


def tail(log: Path | None) -> str:
    """Give the last thing a driver logged, in one line."""
    if log is None or not log.exists():
        return "nothing was logged"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not lines:
        return "nothing was logged"
    try:
        entry = json.loads(lines[-1])
    except ValueError:
        return lines[-1][:300]
    return f"last log line: {entry.get('event')} {entry.get('error', '')}".strip()
