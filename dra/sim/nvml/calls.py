"""Count calls where other processes can read the counts.

Each library object has a small file of its own that is mapped into memory: counting is one store, reading from
outside needs no cooperation, and a process that was killed leaves its counts behind.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_FOLDER = "calls"
_serial = 0
_serial_lock = threading.Lock()

# Slots besides the functions.
SESSIONS, WAKE_UPS = "sessions", "wake-ups"


def attached_slot(uuid: str) -> str:
    """Give the slot that counts who has a GPU attached, that is its device node open."""
    return f"attached {uuid}"


class CallCounts:
    """The counts of one library object. Increments hold a lock: `+=` on the map is not atomic."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        global _serial
        with _serial_lock:
            _serial += 1
            serial = _serial
        directory = folder / _FOLDER
        directory.mkdir(parents=True, exist_ok=True)
        slots = (SESSIONS, WAKE_UPS, *names)
        self._index = {name: position for position, name in enumerate(slots)}
        header = ("\n".join((str(os.getpid()), *slots)) + "\n\0").encode()
        self._at = (len(header) + 7) & ~7
        path = directory / f"{os.getpid()}-{serial}"
        path.write_bytes(header.ljust(self._at, b"\0") + bytes(8 * len(slots)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._values = memoryview(self._map)[self._at :].cast("Q")
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count a call, or an open session (which may be taken back with -1)."""
        position = self._index[name]
        with self._lock:
            self._values[position] += amount


def read_counts(folder: Path, *, alive_only: bool = False) -> Counter[str]:
    """Sum the counts of all library objects of a node, of living processes only if asked."""
    total: Counter[str] = Counter()
    directory = folder / _FOLDER
    for path in directory.iterdir() if directory.is_dir() else ():
        data = path.read_bytes()
        header, end, _ = data.partition(b"\n\0")
        pid, *names = header.decode().split("\n")
        if not end or (alive_only and not _alive(int(pid))):
            continue
        at = (len(header) + 2 + 7) & ~7
        values = memoryview(data)[at : at + 8 * len(names)].cast("Q")
        total.update(dict(zip(names, values, strict=True)))
    return total


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
