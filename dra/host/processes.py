"""Processes that may be children or not: known by id and start time, waited for by a file descriptor of the kernel."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Field 22 of /proc/<pid>/stat; what stands before the state may contain anything. Source: proc(5).
_START_FIELD, _SESSION_FIELD = 22 - 3, 6 - 3


def start_ticks(pid: int, proc: Path = _PROC) -> int | None:
    """Give when a process was started, in clock ticks since boot; None if there is no such process, or only its remains."""
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _START_FIELD or fields[0] in ("Z", "X"):
        return None
    return int(fields[_START_FIELD])


@dataclass(slots=True)
class Running:
    """A process that was started here, or by a keeper before this one. `descriptor` is readable once it has ended."""

    pid: int
    started: int
    descriptor: int
    child: subprocess.Popen[bytes] | None = None

    @classmethod
    def find(cls, pid: int, started: int) -> Running | None:
        """Give the process with this id that was started at this time; None if it has ended."""
        if pid <= 1:
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        # Looked at with the descriptor held: the id cannot go to another process now.
        if start_ticks(pid) != started:
            os.close(descriptor)
            return None
        return cls(pid, started, descriptor)

    @classmethod
    def of_child(cls, child: subprocess.Popen[bytes]) -> Running | None:
        """Give a child that was just started; None if it has ended already."""
        started = start_ticks(child.pid)
        if started is None:
            return None
        found = cls.find(child.pid, started)
        if found is not None:
            found.child = child
        return found

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it has ended."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def signal_all(self, number: int) -> None:
        """Send a signal to it and to what it started, which has its session; also to what it left behind.

        The kernel gives a session's id to nobody else while a process is in it.
        """
        for pid in session_members(self.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def end(self, *, grace_seconds: float) -> bool:
        """Ask it to end, then make it; whether it has ended. A process that hangs in the kernel cannot be ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal_all(number)
            if self.wait(grace_seconds):
                # What it had started.
                self.signal_all(signal.SIGKILL)
                self.reap()
                return True
        return False

    def reap(self) -> None:
        """Take its exit status, if it is a child that has ended."""
        if self.child is not None:
            self.child.poll()

    def close(self) -> None:
        """Let go of it; it runs on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def session_members(session: int, proc: Path = _PROC) -> list[int]:
    """Give the processes of a session; each daemon is started in one of its own."""
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if (
            len(fields) > _SESSION_FIELD
            and fields[_SESSION_FIELD] == str(session)
            and fields[0] not in ("Z", "X")
        ):
            found.append(int(entry.name))
    return found
