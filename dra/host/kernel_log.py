"""XIDs from the kernel log: what the NVIDIA kernel module prints, also while no NVML session is open.

Source: Documentation/ABI/testing/dev-kmsg; the module's line is
`NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 79, pid=…, GPU has fallen off the bus.`
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dra.errors import ValueFormatError
from dra.host.file_watch import ATTRIBUTES, MODIFIED, SELF_DELETED, SELF_MOVED, FileWatch, start_watching
from dra.telemetry.log import get_logger
from dra.values import PciAddress

log = get_logger()

_XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
    r"(?: GPU-I:(\d+))?(?: GPU-CI:(\d+))?\): (\d{1,5})\b",
    re.ASCII,
)
# The largest record that the kernel gives; a file that stands in for the device is read in larger pieces.
_RECORD = 8192
_PIECE = 1 << 16
_LONGEST_LINE = 1 << 16
# The device itself wakes its readers, and of a plain file inotify tells. A pipe without a writer, and a file for which no
# inotify instance is left, are looked at so often,
POLL_SECONDS = 0.3
# and a file that is watched still this often.
FALLBACK_SECONDS = 10.0
# Written, cut off, deleted (of a file that is open the kernel tells one link less), replaced.
_OF_A_FILE = MODIFIED | ATTRIBUTES | SELF_DELETED | SELF_MOVED
# After the log could not be opened.
RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An XID line. `at` are seconds since boot, None where the line does not say."""

    address: PciAddress
    xid: int
    gi: int | None = None
    ci: int | None = None
    at: float | None = None


def parse_record(line: str) -> KernelXid | None:
    """Read one record (`4,1234,5678901,-;NVRM: Xid …`) or a bare line; None if it is no XID."""
    match = _XID.search(line)
    if match is None:
        return None
    try:
        address = PciAddress.parse(f"{match[1]}.0")
    except ValueFormatError:
        return None
    prefix = line[: match.start()].partition(";")[0].split(",")
    at = int(prefix[2]) / 1e6 if len(prefix) >= 3 and prefix[2].isascii() and prefix[2].isdigit() else None
    gi, ci = (None if match[group] is None else int(match[group]) for group in (2, 3))
    return KernelXid(address, int(match[4]), gi, ci, at)


class KernelLog:
    """A thread that reads the log and tells the XIDs in it.

    Args:
        path: `/dev/kmsg` of the node, or a file or pipe of a simulated one.
        told: hears each XID, on this thread; must be quick.
        after: seconds since boot; older records are passed over. None: only what comes from now on.
        changed: hears that the log can be read, or not any more.
    """

    def __init__(
        self,
        path: Path,
        told: Callable[[KernelXid], None],
        *,
        after: float | None = None,
        changed: Callable[[], None] = lambda: None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._path, self._told, self._changed = path, told, changed
        self._after = after
        self._retry_seconds = retry_seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: FileWatch | None = None
        self._why = "the kernel log was not opened yet"
        self._heard = False

    @property
    def why(self) -> str:
        """Why nothing is heard; empty if the log is being read."""
        return self._why

    def start(self) -> None:
        """Start the thread. Raises HostError."""
        self._files, self._thread = start_watching("kernel-log", self._run)

    def stop(self, *, timeout_seconds: float = 2.0) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is None or self._files is None:
            return
        self._files.wake()
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._files.close()
            self._thread = None

    def _run(self, files: FileWatch) -> None:
        while not self._stop.is_set():
            pause = self._retry_seconds
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                self._say(f"{self._path} cannot be opened: {error.strerror}")
            else:
                try:
                    self._read(descriptor, files)
                    pause = POLL_SECONDS
                except OSError as error:
                    self._say(f"{self._path} cannot be read: {error.strerror}")
                except Exception as error:  # marked border: the thread lives on
                    log.exception("kernel_log_bug")
                    self._say(f"{type(error).__name__}: {error}")
                finally:
                    os.close(descriptor)
            self._stop.wait(pause)

    def _say(self, why: str) -> None:
        if why == self._why:
            return
        self._why = why
        log.info("kernel_log_read", path=str(self._path), why=why)
        self._changed()

    def _read(self, descriptor: int, files: FileWatch) -> None:
        mode = os.fstat(descriptor).st_mode
        device = stat.S_ISCHR(mode)
        if (self._after is None or self._heard) and not stat.S_ISFIFO(mode):
            os.lseek(descriptor, 0, os.SEEK_END)
        self._heard = True
        self._say("")
        pause: float | None = None
        if not device:
            # Before the first look at what stands there: a change after that is told.
            heard = stat.S_ISREG(mode) and files.follow(self._path, _OF_A_FILE)
            pause = FALLBACK_SECONDS if heard else POLL_SECONDS
        rest = b""
        while not self._stop.is_set():
            try:
                data = os.read(descriptor, _RECORD if device else _PIECE)
            except BlockingIOError:
                data = b""
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            if data:
                lines = (rest + data).split(b"\n")
                rest = lines.pop()[-_LONGEST_LINE:]
                for line in lines:
                    self._take(line)
                continue
            if not device and self._is_another(descriptor):
                return
            files.wait(pause, also=descriptor if device else -1)

    def _is_another(self, descriptor: int) -> bool:
        """Whether a file that stands for the device was replaced or cut off, as a simulated reboot does."""
        try:
            there, ours = self._path.stat(), os.fstat(descriptor)
        except OSError:
            return True
        if (there.st_ino, there.st_dev) != (ours.st_ino, ours.st_dev):
            return True
        return stat.S_ISREG(ours.st_mode) and ours.st_size < os.lseek(descriptor, 0, os.SEEK_CUR)

    def _take(self, line: bytes) -> None:
        if b"Xid" not in line:
            return
        found = parse_record(line.decode("utf-8", "replace"))
        if found is None:
            return
        if self._after is not None and found.at is not None and found.at < self._after:
            return
        self._told(found)


def seconds_since_boot() -> float:
    """Give the clock that the kernel stamps its records with, as near as a process can have it."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
