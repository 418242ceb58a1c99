"""`dra sim up` and `dra sim down`: a cluster that runs in the foreground or in a session of its own, and its end.

Everything that `up` starts ends with it: threads with the process, driver processes by `dra.sim.leash` even after
kill -9. What may be left then are files; the run file tells that their owner is gone, and the next `up` or `down`
removes them.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from dra.errors import ConfigError, DraError, HostError
from dra.plugin.settings import offers_passthrough, parse_gates
from dra.sim.cluster import SimCluster
from dra.sim.cluster_status import cluster_status
from dra.sim.door import Door
from dra.sim.run_file import (
    LOG,
    RootLock,
    RunFile,
    clean,
    forget_run,
    has_leftovers,
    lock_holder,
    own_run_file,
    process_start,
    read_run_file,
    remove_nodes,
)
from dra.sim.switchboard import Switchboard

Json = dict[str, Any]

# With many threads of Python in one process a thread that waits for a disk gets its turn back sooner.
_SWITCH_SECONDS = 0.001
_END_SECONDS = 30.0
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class UpSettings:
    """What a cluster is made of; see `SimCluster`. `keep`: leave the nodes' files behind; `gates`: of the drivers."""

    root: Path
    nodes: tuple[tuple[str, str], ...]
    version: str = "1.36"
    port: int = 0
    real: int | None = None
    manifests: Path | None = None
    keep: bool = False
    gates: str = ""


class _Stopped(BaseException):
    """A signal came while the cluster was starting."""


class _Signals:
    """SIGINT, SIGTERM and SIGHUP end a cluster: during the start by an exception, afterwards `wait` returns."""

    def __init__(self) -> None:
        # Source: queue.SimpleQueue: a handler may put into it while its own thread gets; an Event would deadlock.
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.starting = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._came)

    def wait(self) -> None:
        """Wait for a signal, or return at once if one came."""
        self._signals.get()

    def _came(self, number: int, _frame: FrameType | None) -> None:
        self._signals.put(number)
        if self.starting:
            self.starting = False
            raise _Stopped


def run_up(settings: UpSettings, say: Callable[[str], None]) -> None:
    """Run a cluster until a signal comes. Call from the main thread.

    Raises:
        ConfigError: DRA-SIM-RUNNING and what `SimCluster` raises.
        DraError: a driver did not come up.
    """
    root = settings.root
    make_root(root)
    lock = RootLock(root)
    signals = _Signals()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        # Nobody runs what lies here: the lock is ours.
        forget_run(root)
        remove_nodes(root)
        mine = own_run_file(version=settings.version, nodes=tuple(name for name, _ in settings.nodes))
        mine.write(root)
        cluster = SimCluster(
            root, settings.nodes, version=settings.version, port=settings.port, real=settings.real,
            plugin_arguments=("--feature-gates", settings.gates) if settings.gates else (),
        )  # fmt: skip
        with cluster:
            cluster.wait_ready(timeout_seconds=START_SECONDS)
            if settings.manifests is not None and settings.manifests.is_file():
                cluster.apply(settings.manifests)
                # Beside it: the classes of MIG profiles, where pods ask for nvidia.com/mig-….
                cluster.apply(*settings.manifests.parent.glob("deviceclasses-mig.yaml"))
                if offers_passthrough(parse_gates(settings.gates)):
                    cluster.apply(*settings.manifests.parent.glob("optional/deviceclass-vfio.yaml"))
            door = Door(root, _answers(cluster))
            try:
                _running_file(mine, cluster).write(root)
                signals.starting = False
                say(f"export KUBECONFIG={cluster.kubeconfig}")
                signals.wait()
            finally:
                door.close()
    except _Stopped:
        pass
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE}:
            raise
        raise HostError(
            "DRA-SIM-FILES",
            f"the cluster cannot go on in {root}: {error.strerror}",
            remedy="Free what is short, or give another directory with --root.",
        ) from error
    finally:
        signals.starting = False
        clean(root, nodes=not settings.keep)
        lock.release()


def _running_file(mine: RunFile, cluster: SimCluster) -> RunFile:
    drivers = {name: node.process.pid for name, node in cluster.nodes.items() if node.process is not None}
    return replace(mine, ready=True, url=cluster.api.url, drivers=drivers)


def _answers(cluster: SimCluster) -> Callable[[Json], Any]:
    switchboard = Switchboard(cluster)

    def answer(request: Json) -> Any:
        match request.get("verb"):
            case "status":
                return cluster_status(cluster, switchboard)
            case "faults":
                return switchboard.active()
            case "fault":
                return switchboard.switch_on(request["target"], request["kind"], request.get("options") or {})
            case "clear":
                return switchboard.clear(request.get("target") or "")
        raise DraError("DRA-SIM-REQUEST", f"unknown request {request.get('verb')!r}")

    return answer


def start_detached(root: Path, arguments: Sequence[str]) -> RunFile:
    """Run `dra sim up` with these arguments in a session of its own; gives its run file when it is ready.

    Raises:
        DraError: DRA-SIM-UP with the end of its log.
    """
    make_root(root)
    # The log is read through this handle: a cluster that fails removes its files.
    with (root / LOG).open("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dra.cli.main", "sim", "up", *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            found = read_run_file(root)
            if found is not None and found.ready and found.pid == process.pid and found.alive:
                return found
            time.sleep(0.05)
        if process.poll() is None:
            process.terminate()
            process.wait()
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
    if not text and shutil.disk_usage(root).free < _LITTLE:
        text = f"error: DRA-SIM-FILES: the disk of {root} is full\n  Free space, or give another --root."
    said = _SAID.fullmatch(text)
    if said is not None:
        raise DraError(said[1], said[2], remedy=said[3] or "")
    raise DraError("DRA-SIM-UP", f"the cluster did not come up: {text[-1500:] or 'nothing was said'}")


# With less than this on the disk not even an error can be written.
_LITTLE = 64 * 1024
# An error as the command line prints it: code, message, remedy.
_SAID = re.compile(r"error: (DRA-[A-Z0-9-]+): ([^\n]*)(?:\n +([^\n]*))?")


def make_root(root: Path) -> None:
    """Make the cluster's directory.

    Raises:
        ConfigError: DRA-SIM-ROOT: it cannot be made, or not be written to.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = "" if os.access(root, os.W_OK | os.X_OK) else "it may not be written to"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigError(
            "DRA-SIM-ROOT",
            f"{root} cannot be the cluster's directory: {why}",
            remedy="Give another --root, for example /tmp/sim.",
        )


def run_down(root: Path, *, keep: bool = False) -> bool:
    """End the cluster of a directory and remove its files; whether one ran. Does nothing where there is none.

    Raises:
        DraError: DRA-SIM-DOWN: the process cannot be ended.
    """
    if not root.is_dir():
        return False
    found = read_run_file(root)
    if found is None and (holder := lock_holder(root)):
        # Its run file is gone or damaged: who holds the lock is the cluster.
        found = RunFile(holder, process_start(holder))
    ran = found is not None and found.alive
    if found is not None and ran:
        _end(found)
    if has_leftovers(root):
        clean(root, nodes=not keep)
    return ran


def _end(found: RunFile) -> None:
    """End exactly the process of the run file: ask, wait, kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(found.pid, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise DraError("DRA-SIM-DOWN", f"process {found.pid} is not ours to end") from error
        end = time.monotonic() + _END_SECONDS
        while process_start(found.pid) == found.started:
            if time.monotonic() > end:
                break
            time.sleep(0.03)
        else:
            return
    raise DraError("DRA-SIM-DOWN", f"process {found.pid} does not end")
