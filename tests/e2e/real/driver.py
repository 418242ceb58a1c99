"""The driver under test: real processes of `dra plugin`, on a simulated machine or on a driver root with NVML."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.real.control_plane import NODE_NAME

DRIVER = "gpu.nvidia.com"
SIMULATED, DRIVER_ROOT = "simulated", "driver-root"
# Simulated GPUs that are cut into 100 shares each.
SHARED = "shared"


class DriverProcess:
    """One `dra plugin` process."""

    def __init__(self, arguments: list[str], *, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dra.cli.plugin", *arguments],
                env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it logged."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one event."""
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def terminate(self, *, within_seconds: float = 10.0) -> int:
        """SIGTERM; gives the exit status. It must end in time."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.log.read_text()[-3000:]}") from None

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End it whatever it does."""
        if self.running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)


def machine_arguments(kind: str, simulated_root: Path) -> list[str]:
    """Give the flags that say where the GPUs are.

    The simulated machine is told its root as the container runtime spells it: its device nodes and libraries are
    mounted from there.
    """
    if kind in (SIMULATED, SHARED):
        root = str(simulated_root)
        return [
            *(["--sharing", "100"] if kind == SHARED else []),
            "--simulate",
            "dgx-h100",
            "--host-root",
            root,
            "--nvidia-driver-root",
            root,
            "--container-driver-root",
            root,
        ]
    root = os.environ["DRA_TEST_DRIVER_ROOT"]
    return ["--nvidia-driver-root", root, "--container-driver-root", root]


class Drivers:
    """The driver on the node: starts and ends its processes, and knows its files."""

    def __init__(
        self, directory: Path, *, plugins: Path, registry: Path, cdi: Path, kubeconfig: Path
    ) -> None:
        self._directory, self._kubeconfig = directory, kubeconfig
        self._plugins, self._registry, self._cdi = plugins, registry, cdi
        self._count = 0
        self.kind = ""
        self.flags: tuple[str, ...] = ()
        self.current: DriverProcess | None = None
        self.extra: list[DriverProcess] = []

    def start(
        self,
        kind: str = "",
        *,
        node_name: str = NODE_NAME,
        pod_uid: str = "",
        current: bool = True,
        flags: tuple[str, ...] | None = None,
    ) -> DriverProcess:
        """Start an instance; `current` is the one that `restart` and `stop` are about. Flags stay until others come."""
        self.kind = kind or self.kind
        self.flags = self.flags if flags is None else flags
        self._count += 1
        self.simulated_root = self._directory / "machine"
        made = DriverProcess(
            [
                *machine_arguments(self.kind, self.simulated_root), "--node-name", node_name,
                "--kubelet-plugins-directory-path", str(self._plugins),
                "--kubelet-registrar-directory-path", str(self._registry),
                "--cdi-root", str(self._cdi), "--kubeconfig", str(self._kubeconfig), "--log-level", "debug",
                *self.flags,
            ],
            environment={"POD_UID": pod_uid}, log=self._directory / f"driver-{self._count}.log",
        )  # fmt: skip
        if current:
            self.current = made
        else:
            self.extra.append(made)
        return made

    @property
    def process(self) -> DriverProcess:
        """The instance that runs."""
        assert self.current is not None
        return self.current

    def last_words(self) -> str:
        """Give the end of the running instance's log, for errors; nothing where the test runs the driver otherwise."""
        return "" if self.current is None else self.current.log.read_text()[-2000:]

    def stop(self) -> None:
        """End all instances as a node's shutdown would."""
        for instance in (self.current, *self.extra):
            if instance is not None and instance.running:
                instance.process.send_signal(signal.SIGCONT)
                instance.terminate()
        self.current, self.extra = None, []

    def close(self) -> None:
        """End all instances whatever they do."""
        for instance in (self.current, *self.extra):
            if instance is not None:
                instance.close()

    # -- the disk ----------------------------------------------------------------------------------

    def records(self) -> set[str]:
        """UIDs of the claims that have a record."""
        return {path.stem for path in (self._plugins / DRIVER / "claims").glob("*.json")}

    def cdi_files(self) -> set[str]:
        """UIDs of the claims that have a CDI file."""
        prefix = f"k8s.{DRIVER}-claim_"
        return {path.stem.removeprefix(prefix) for path in self._cdi.glob(f"{prefix}*.yaml")}

    def leftovers(self) -> list[str]:
        """Names of what is left of claims, sorted; empty on a node without pods."""
        folders = (self._plugins / DRIVER / "claims", self._cdi)
        return sorted(path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
