"""One control daemon: started, made ready, given its limits, ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from dra.errors import DeviceError, DraError
from dra.host.processes import Running
from dra.host.programs import ProgramEnd
from dra.mps.launcher import Launcher, clear_pipe, last_words
from dra.prepare.sharing.mps_folders import make_folders
from dra.prepare.sharing.mps_model import DaemonFolders, DaemonSpec

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_STOP_GRACE = 3.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds.

    Args:
        ready: until a started daemon answers.
        command: for one talk with a daemon.
        quit: for a daemon that is asked to quit.
        first_back_off, longest_back_off: between attempts to restart.
        steady: so long a daemon must have lived for its next restart to come at once.
    """

    ready: float = 15.0
    command: float = 5.0
    quit: float = 5.0
    first_back_off: float = 0.5
    longest_back_off: float = 30.0
    steady: float = 60.0


@dataclass(frozen=True, slots=True)
class Control:
    """What is done to daemons. Its callers see to it that nothing else is done to the same one meanwhile."""

    launcher: Launcher
    timings: Timings
    # shm is a tmpfs of its own.
    memory: bool

    def start(
        self, spec: DaemonSpec, folders: DaemonFolders, *, started: Callable[[Running], None]
    ) -> Running:
        """Start a daemon and give it its limits.

        Args:
            spec: what it is to be.
            folders: where its files are.
            started: called with the process before it becomes the daemon: it must be written down then.

        Raises:
            DeviceError: DRA-MPS-DAEMON-FAILED, DRA-MPS-DAEMON-SLOW, DRA-MPS-LIMITS; retryable. Nothing runs then.
            DraError: DRA-MPS-PROGRAM; of the disk.
        """
        make_folders(folders, memory=self.memory)
        clear_pipe(folders)
        child = self.launcher.start(spec, folders)
        running = Running.of_child(child)
        if running is None:
            child.kill()
            child.wait()
            raise self._failed(spec, folders, "its process ended at once")
        try:
            started(running)
            self.launcher.go(child)
            self._wait_ready(spec, folders, running)
        except BaseException:
            self.end(running)
            raise
        return running

    def set_limits(self, spec: DaemonSpec, folders: DaemonFolders) -> None:
        """Tell a daemon that runs its defaults.

        Raises:
            DeviceError: DRA-MPS-LIMITS: it does not take them; retryable.
        """
        commands = spec.commands()
        if commands:
            self._check_limits(spec, self.launcher.ask(folders, commands, seconds=self.timings.command))

    @staticmethod
    def _check_limits(spec: DaemonSpec, end: ProgramEnd) -> None:
        # The front-end says what is wrong and ends as if nothing were.
        complaint = any(word in end.output.lower() for word in ("invalid", "error", "fail", "unknown"))
        if end.status != 0 or complaint:
            raise DeviceError(
                "DRA-MPS-LIMITS",
                f"MPS daemon {spec.id} does not take its limits ({'; '.join(spec.commands())}): {end.words or end.status}",
                remedy="Check the limits against the devices; the NVIDIA driver must be 470 or newer for limits of memory.",
                retryable=True,
                daemon=spec.id,
            )

    def _is_ready(self, spec: DaemonSpec, folders: DaemonFolders) -> bool:
        """Whether a daemon answers; it is given its limits in the same talk, for each talk costs a process.

        Source: the readiness of NVIDIA's device plugin asks the same.

        Raises:
            DeviceError: DRA-MPS-LIMITS: it answers and does not take them; retryable.
        """
        commands = ("get_default_active_thread_percentage", *spec.commands())
        end = self.launcher.ask(folders, commands, seconds=self.timings.command)
        try:
            answers = float(end.output.split()[0]) > 0
        except (ValueError, IndexError):
            return False
        if answers:
            self._check_limits(spec, end)
        return answers

    def stop(self, running: Running, folders: DaemonFolders) -> bool:
        """End a daemon and its servers: politely, then not; whether it has ended."""
        if running.alive:
            self.launcher_quit(folders)
            running.wait(self.timings.quit)
        return self.end(running)

    def launcher_quit(self, folders: DaemonFolders) -> None:
        """Ask a daemon to quit; one that does not hear is ended by other means."""
        try:
            self.launcher.ask(folders, ("quit",), seconds=self.timings.quit)
        except DraError:
            return  # no front-end any more

    @staticmethod
    def end(running: Running) -> bool:
        """End a process and what it started."""
        ended = running.end(grace_seconds=_STOP_GRACE)
        if ended:
            running.close()
        return ended

    def _wait_ready(self, spec: DaemonSpec, folders: DaemonFolders, running: Running) -> None:
        deadline, pause = time.monotonic() + self.timings.ready, _FIRST_PAUSE
        while True:
            if running.wait(pause):
                raise self._failed(spec, folders, "it ended")
            # Nothing in the directory: it does not listen yet. Looking costs nothing, asking costs a process.
            if any(os.scandir(folders.pipe)):
                if self._is_ready(spec, folders):
                    return
                pause = min(pause * 2, _LONGEST_PAUSE)
            if time.monotonic() >= deadline:
                raise DeviceError(
                    "DRA-MPS-DAEMON-SLOW",
                    f"MPS daemon {spec.id} did not answer within {self.timings.ready:g} s: {last_words(folders)}",
                    remedy="The call is retried by itself; if it stays so, look at the node's kernel log and at "
                    f"{folders.log}.",
                    retryable=True,
                    daemon=spec.id,
                )

    @staticmethod
    def _failed(spec: DaemonSpec, folders: DaemonFolders, what: str) -> DeviceError:
        return DeviceError(
            "DRA-MPS-DAEMON-FAILED",
            f"MPS daemon {spec.id} for {', '.join(spec.devices)} could not be started, {what}: {last_words(folders)}",
            remedy=f"Look at {folders.log} on the node; the call is retried by itself.",
            retryable=True,
            daemon=spec.id,
        )
