"""The run file of a cluster: which process runs it, where its doors are, and whether that process still lives.

A process is known by its pid, its start time and the boot, so that a pid that somebody else got is never taken for
ours. The lock beside it is held as long as the process lives: only one cluster can run in a directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dra.errors import ConfigError, DraError
from dra.sim.nvml.files import SIM_FOLDER

_NAME, _LOCK, SOCKET, LOG, KUBECONFIG = "run.json", "run.lock", "sim.sock", "up.log", "kubeconfig"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Directories of nodes: n0, n1 …, and those that in-process nodes share.
_NODE_FOLDER = re.compile(r"n\d+", re.ASCII)
IN_PROCESS_FOLDER = "p"


def process_start(pid: int) -> str:
    """Give what tells a living process from others that had its pid: boot and start time. Empty if it is gone.

    A process that has ended and was not waited for counts as gone. Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else f"{_boot()}/{fields[19]}"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, slots=True)
class RunFile:
    """What stands in a run file. `drivers` are the pids of the nodes' driver processes."""

    pid: int
    started: str
    version: str = ""
    url: str = ""
    ready: bool = False
    nodes: tuple[str, ...] = ()
    drivers: dict[str, int] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it still runs."""
        return bool(self.started) and process_start(self.pid) == self.started

    def write(self, root: Path) -> None:
        """Write it, whole or not at all."""
        temporary = root / f"{_NAME}.new"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(root / _NAME)


def own_run_file(**more: Any) -> RunFile:
    """Give a run file of this process."""
    return RunFile(os.getpid(), process_start(os.getpid()), **more)


def read_run_file(root: Path) -> RunFile | None:
    """Give the run file of a directory; None if there is none that can be read."""
    try:
        stored = json.loads((root / _NAME).read_text(encoding="utf-8"))
        known = {name: stored[name] for name in RunFile.__dataclass_fields__ if name in stored}
        return RunFile(**{**known, "nodes": tuple(known.get("nodes", ()))})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def running(root: Path) -> RunFile:
    """Give the run file of a cluster that runs.

    Raises:
        DraError: DRA-SIM-NOT-RUNNING.
    """
    found = read_run_file(root)
    holder = lock_holder(root) if found is None else 0
    if holder:
        raise DraError(
            "DRA-SIM-RUN-FILE",
            f"a cluster runs in {root} as process {holder}, but its run file {_NAME} cannot be read",
            remedy=f"End it with: dra sim down --root {root}",
        )
    if found is None or not found.alive:
        stale = " (its process has ended without cleaning up)" if found is not None else ""
        raise DraError(
            "DRA-SIM-NOT-RUNNING",
            f"no simulated cluster runs in {root}{stale}",
            remedy="Start one with: dra sim up --detach. Another directory is given with --root.",
        )
    return found


def lock_holder(root: Path) -> int:
    """Give the pid of the process that holds a directory, 0 if nobody does or it has not said so yet."""
    try:
        file = os.open(root / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(file, 20)
        return int(text) if text.isdigit() else 0
    finally:
        os.close(file)
    return 0


class RootLock:
    """Keeps a directory for one cluster, until `release` or the end of the process."""

    def __init__(self, root: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: DRA-SIM-RUNNING, DRA-SIM-ROOT.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise ConfigError(
                "DRA-SIM-ROOT",
                f"{root} belongs to another user",
                remedy="Give another directory with --root.",
            )
        self._file = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            holder = lock_holder(root)
            who = f" as process {holder}" if holder else ""
            raise ConfigError(
                "DRA-SIM-RUNNING",
                f"a simulated cluster runs in {root} already{who}",
                remedy=f"End it with: dra sim down --root {root}. Or give another directory with --root.",
            ) from error
        os.ftruncate(self._file, 0)
        os.write(self._file, str(os.getpid()).encode())

    def release(self) -> None:
        """Let the directory go."""
        os.close(self._file)


def clean(root: Path, *, nodes: bool = True) -> None:
    """Remove what a cluster left in its directory, and the directory if nothing else is in it.

    Only what a cluster makes is touched; with `nodes=False` the nodes' files and logs stay.
    """
    forget_run(root)
    if nodes:
        remove_nodes(root)
        (root / LOG).unlink(missing_ok=True)
    (root / _LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        root.rmdir()


def forget_run(root: Path) -> None:
    """Remove what leads to a running cluster."""
    for name in (_NAME, f"{_NAME}.new", SOCKET, KUBECONFIG):
        (root / name).unlink(missing_ok=True)


def remove_nodes(root: Path) -> None:
    """Remove the files of simulated nodes; directories that are none are left alone."""
    shared = root / IN_PROCESS_FOLDER
    own = [path for path in root.glob("n*") if _NODE_FOLDER.fullmatch(path.name)]
    for folder in (*own, *shared.glob("m*")):
        if (folder / SIM_FOLDER).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        shared.rmdir()


def has_leftovers(root: Path) -> bool:
    """Whether a cluster ran here and did not clean up."""
    return any((root / name).exists() for name in (_NAME, SOCKET, _LOCK))
