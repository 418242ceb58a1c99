"""The driver's own programs (nvidia-smi, nvidia-cuda-mps-control), run from the driver root without a shell.

A program needs the C library it was built for. Where the driver root is a whole file system (the host's, a driver
container's) it is entered with chroot; where it has only the driver's files (as on Container-Optimized OS) the program
runs here, with the root's libraries.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra.host.chroot import chroot_command
from dra.host.driver_lists import BINARY_DIRS, LIBRARY_DIRS
from dra.host.paths import HostPaths
from dra.host.rooted import resolve_inside

# Program interpreters of glibc on the architectures that have NVIDIA drivers.
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
# A process that the kernel cannot end is left behind after this.
_REAP_SECONDS = 2.0
# What is kept of a program's output.
_OUTPUT_BYTES = 1 << 16
NOT_RUN = 127
_ENTER = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended. `status` is 127 where it could not be run, or did not end in time (`timed_out`).

    `left`: the process, where not even being killed has ended it yet.
    """

    status: int
    output: str = ""
    timed_out: bool = False
    left: subprocess.Popen[bytes] | None = None

    @property
    def words(self) -> str:
        """Its output in one line."""
        return " ".join(self.output.split())[:300]


@dataclass(frozen=True, slots=True)
class DriverProgram:
    """A program of the driver.

    Args:
        inside: its path inside the driver root.
        root: the driver root as this process sees it.
        enter: whether the root is entered with chroot.
        environment: what it needs to find the driver's libraries.
    """

    inside: str
    root: str
    enter: bool
    environment: Mapping[str, str]

    @property
    def here(self) -> str:
        """Its path as this process sees it."""
        return self.root.rstrip("/") + self.inside

    def command(self, *arguments: str) -> list[str]:
        """Give the argument vector."""
        if self.enter:
            return chroot_command(self.root, [self.inside, *arguments])
        return [self.here, *arguments]

    def run(
        self,
        *arguments: str,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> ProgramEnd:
        """Run it to its end, or for so long."""
        return run_bounded(
            self.command(*arguments),
            seconds=seconds,
            environment={**self.environment, **(environment or {})},
            stdin=stdin,
        )


def find_program(paths: HostPaths, name: str) -> DriverProgram | None:
    """Look for a program of the driver; None if it has none of this name."""
    root = str(paths.driver_root)
    candidates = (resolve_inside(root, f"{directory}/{name}") for directory in BINARY_DIRS)
    inside = next(
        (path for path in candidates if path is not None and os.access(_join(root, path), os.X_OK)), None
    )
    if inside is None:
        return None
    environment = {"PATH": ":".join(BINARY_DIRS)}
    if root == "/":
        return DriverProgram(inside, root, enter=False, environment=environment)
    if any(resolve_inside(root, loader) is not None for loader in _LOADERS):
        return DriverProgram(inside, root, enter=True, environment=environment)
    libraries = [real for path in LIBRARY_DIRS if (real := resolve_inside(root, path)) not in (None, "/")]
    environment["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(_join(root, path) for path in libraries if path))
    return DriverProgram(inside, root, enter=False, environment=environment)


def run_bounded(
    command: Sequence[str], *, seconds: float, environment: Mapping[str, str], stdin: str = ""
) -> ProgramEnd:
    """Run a program without a shell, with its output and errors in one text.

    It has a session of its own, all of which is killed when its time is over. One that not even that ends (it hangs in
    the kernel) is left behind: nobody waits for it.
    """
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return ProgramEnd(NOT_RUN, f"cannot run {command[0]}: {error.strerror or error}")
    try:
        output, _ = process.communicate(stdin.encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_REAP_SECONDS)
        return ProgramEnd(
            NOT_RUN, f"{command[0]} did not end within {seconds:g} s", timed_out=True,
            left=process if process.poll() is None else None,
        )  # fmt: skip
    return ProgramEnd(process.returncode, output[:_OUTPUT_BYTES].decode("utf-8", "replace"))


def _join(root: str, inside: str) -> str:
    return root.rstrip("/") + inside
