"""What this driver asks the kernel to change: attributes of sysfs and modules. The simulation takes the kernel's place here.

A write to `unbind` waits inside the kernel for as long as somebody has the device open, and no signal ends that wait.
So each write is a process of its own: what hangs is left behind, and this process can still end. The same write is not
begun again before the one that hangs has ended, so that calls that are tried again for days leave only a few behind.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Protocol

from dra.host.attribute import attribute_command
from dra.host.chroot import chroot_command
from dra.host.paths import HostPaths
from dra.host.programs import run_bounded
from dra.host.rooted import resolve_inside

# Of the 45 s that the kubelet gives a prepare call.
WRITE_SECONDS = 10.0
LOAD_SECONDS = 15.0
_MODPROBE = ("/usr/sbin/modprobe", "/sbin/modprobe", "/usr/bin/modprobe", "/bin/modprobe")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


class HostKernel(Protocol):
    """What of the kernel is changed through files and modules. Both give why it failed, empty if it did not."""

    def write(self, path: Path, text: str) -> str:
        """Write a text to an attribute of sysfs."""
        ...

    def load_module(self, name: str) -> str:
        """Load a module and what it needs; one that is there already is fine."""
        ...


class RealKernel:
    """The kernel of this machine. Thread-safe.

    Args:
        paths: where its files are. modprobe is the host's own and runs in the host's root.
        write_seconds: how long a write is waited for.
    """

    def __init__(self, paths: HostPaths, *, write_seconds: float = WRITE_SECONDS) -> None:
        self._root, self._write_seconds = str(paths.host_root), write_seconds
        self._lock = threading.Lock()
        self._hanging: dict[tuple[Path, str], subprocess.Popen[bytes]] = {}

    def write(self, path: Path, text: str) -> str:
        """See `HostKernel`."""
        with self._lock:
            self._hanging = {key: each for key, each in self._hanging.items() if each.poll() is None}
            hanging = self._hanging.get((path, text))
        if hanging is not None:
            return f"it has not answered an earlier request of this kind yet (process {hanging.pid})"
        end = run_bounded(attribute_command(str(path), text), seconds=self._write_seconds, environment={})
        if end.left is not None:
            with self._lock:
                self._hanging[path, text] = end.left
        if end.timed_out:
            return f"the kernel did not answer within {self._write_seconds:g} s"
        return "" if end.status == 0 else end.words or f"status {end.status}"

    def load_module(self, name: str) -> str:
        """See `HostKernel`."""
        program = next((path for path in _MODPROBE if resolve_inside(self._root, path) is not None), None)
        if program is None:
            return f"there is no modprobe below {self._root}"
        command = [program, "--", name]
        if self._root != "/":
            command = chroot_command(self._root, command)
        end = run_bounded(command, seconds=LOAD_SECONDS, environment={"PATH": _PATH})
        return "" if end.status == 0 else end.words or f"modprobe ended with status {end.status}"
