"""Starts a control daemon, and talks to one through its front-end, as the driver root needs it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.errors import StackError
from dra.host.files import host_error
from dra.host.paths import HostPaths
from dra.host.programs import DriverProgram, ProgramEnd, find_program, run_bounded
from dra.mps import launch
from dra.prepare.sharing.mps_model import (
    CONTAINER_LOG,
    CONTAINER_PIPE,
    CONTAINER_SHM,
    DaemonFolders,
    DaemonSpec,
)

PROGRAM = "nvidia-cuda-mps-control"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Knows where the program is and what it needs around it.

    Args:
        paths: the node.
        isolate: each daemon has a mount namespace with its own `/dev/shm`. Needed wherever real clients are served:
            they and their daemon meet in shared memory, under that name.
        environment: more for the daemons' environment.
    """

    paths: HostPaths
    isolate: bool
    environment: Mapping[str, str]

    def start(self, spec: DaemonSpec, folders: DaemonFolders) -> subprocess.Popen[bytes]:
        """Start the daemon's process, which waits for `go` before it becomes the daemon. It has a session of its own.

        Raises:
            StackError: DRA-MPS-PROGRAM: the driver root has no such program.
            HostError: no process can be started.
        """
        # In the foreground, so that the process that is started is the daemon.
        arguments = ["-f", *(["-M"] if spec.multi_user else [])]
        command, environment = self._call(folders, arguments, devices=spec.devices, wait=True)
        output = folders.log / "control.out"
        try:
            with output.open("wb") as log:
                return subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise host_error(error, "start a process that writes", output) from error

    @staticmethod
    def go(child: subprocess.Popen[bytes]) -> None:
        """Let a started process become the daemon."""
        assert child.stdin is not None
        # A process that has ended is seen by whoever waits for it.
        with contextlib.suppress(OSError), child.stdin:
            child.stdin.write(b"go\n")

    def ask(self, folders: DaemonFolders, commands: Sequence[str], *, seconds: float) -> ProgramEnd:
        """Send commands to a daemon through the front-end.

        Raises:
            StackError: DRA-MPS-PROGRAM.
        """
        command, environment = self._call(folders, [], devices=(), wait=False)
        text = "".join(f"{each}\n" for each in commands)
        return run_bounded(command, seconds=seconds, environment=environment, stdin=text)

    def _call(
        self, folders: DaemonFolders, arguments: Sequence[str], *, devices: Sequence[str], wait: bool
    ) -> tuple[list[str], dict[str, str]]:
        program = self._program()
        environment = {**self.environment, **program.environment}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        wanted: dict[str, Any] = {"wait": wait}
        if self.isolate:
            # The usual places, seen from inside the driver root; a `/tmp` of its own to make them in.
            base = program.root.rstrip("/") if program.enter else ""
            places = (
                (folders.shm, CONTAINER_SHM),
                (folders.pipe, CONTAINER_PIPE),
                (folders.log, CONTAINER_LOG),
            )
            wanted["empty"] = f"{base}/tmp"  # noqa: S108 - of its own
            wanted["binds"] = [[str(path), base + place] for path, place in places]
            wanted["root"] = program.root if program.enter else ""
            environment |= {
                "CUDA_MPS_PIPE_DIRECTORY": CONTAINER_PIPE,
                "CUDA_MPS_LOG_DIRECTORY": CONTAINER_LOG,
            }
        else:
            environment |= {
                "CUDA_MPS_PIPE_DIRECTORY": str(folders.pipe),
                "CUDA_MPS_LOG_DIRECTORY": str(folders.log),
            }
        inside = self.isolate and program.enter
        wanted["command"] = [program.inside if inside else program.here, *arguments]
        # -I -S: the few lines need no packages.
        return [sys.executable, "-I", "-S", str(Path(launch.__file__)), json.dumps(wanted)], environment

    def _program(self) -> DriverProgram:
        program = find_program(self.paths, PROGRAM)
        if program is None:
            raise StackError(
                "DRA-MPS-PROGRAM",
                f"there is no {PROGRAM} under the driver root {self.paths.driver_root}",
                remedy="Install the NVIDIA driver's compute programs, or set --nvidia-driver-root of the keeper to where "
                "they are.",
            )
        return program


def clear_pipe(folders: DaemonFolders) -> None:
    """Remove what a dead daemon left in its pipe directory. The directory stays: containers have it mounted."""
    try:
        for entry in os.scandir(folders.pipe):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(entry.path)  # noqa: PTH108
    except FileNotFoundError:
        return


def last_words(folders: DaemonFolders) -> str:
    """Give the end of what a daemon wrote, in one line."""
    for name in ("control.out", "control.log"):
        with contextlib.suppress(OSError):
            text = (folders.log / name).read_text(encoding="utf-8", errors="replace")
            if words := " ".join(text.split()):
                return words[-300:]
    return "it wrote nothing"
