"""Locks between threads and between processes: a byte a claim, a file a GPU, and NVIDIA's own file.

GPUs are few and stay: each has a file of its own, which a person can look at. Claims come and go by the thousand: a file
each would be made and removed with every claim, so that all have one in common, and each locks a byte of it that
follows from its UID. Both kinds belong to an open file description, so that they exclude threads of one process just
as well; a lock per name in memory stands in front, which wakes waiters of this process at once and in order of arrival.
Somebody may remove a lock file, or all of them: one that waited looks whether the file it locked still has the name.
A dead process holds nothing.

Source: flock(2); fcntl(2), open file description locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dra.errors import HostError
from dra.host.files import ensure_dir, host_error

# Longest wait for all locks of one call; the kubelet gives up after 45 s.
LOCK_WAIT_SECONDS = 10.0
_FIRST_POLL_SECONDS = 0.0005
_LAST_POLL_SECONDS = 0.02
CLAIM_PREFIX = "claim-"
# Which byte a claim locks: any of 2**56, so that two claims never meet.
_BYTES_OF_PLACE = 7
# struct flock: type, whence, start, length, process (0 for these locks).
_FLOCK = struct.Struct("hhqqi4x")


# Locks what a descriptor leads to, or raises OSError at once.
_TryLock = Callable[[int], None]


@dataclass(slots=True)
class _Turn:
    """The threads of this process that want one name, first come first served."""

    waiting: deque[threading.Event] = field(default_factory=deque)


class LockDirectory:
    """The locks under one directory. Thread-safe."""

    def __init__(self, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._turns: dict[str, _Turn] = {}
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def hold(
        self, names: Sequence[str], *, what: str, wait_seconds: float = LOCK_WAIT_SECONDS
    ) -> Iterator[None]:
        """Hold several locks, taken in the order of their names so that two callers never wait for each other.

        Raises:
            HostError: DRA-LOCK-TIMEOUT naming the lock (`what` says for whom it is wanted); DRA-HOST-... where
                the directory cannot be written.
        """
        deadline = self._monotonic() + wait_seconds
        with contextlib.ExitStack() as held:
            for name in sorted(set(names)):
                held.enter_context(self._hold_one(name, deadline, what))
            yield

    def make(self) -> None:
        """Make the directory.

        Raises:
            HostError: it cannot be made.
        """
        ensure_dir(self._path, mode=0o750)

    @contextlib.contextmanager
    def _hold_one(self, name: str, deadline: float, what: str) -> Iterator[None]:
        with self._turn(name, deadline, what):
            descriptor = self._lock_file(name, deadline, what)
            try:
                yield
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _turn(self, name: str, deadline: float, what: str) -> Iterator[None]:
        ticket = threading.Event()
        with self._mutex:
            turn = self._turns.setdefault(name, _Turn())
            turn.waiting.append(ticket)
            first = turn.waiting[0] is ticket
        try:
            if not first and not ticket.wait(max(0.0, deadline - self._monotonic())):
                raise _timeout(name, what, "another call of this plugin")
            yield
        finally:
            with self._mutex:
                was_first = turn.waiting[0] is ticket
                turn.waiting.remove(ticket)
                if not turn.waiting:
                    del self._turns[name]
                elif was_first:
                    turn.waiting[0].set()

    def _lock_file(self, name: str, deadline: float, what: str) -> int:
        is_claim = name.startswith(CLAIM_PREFIX)
        path = self._path / ("claims.lock" if is_claim else f"{name}.lock")
        try_lock = _claim_lock(name) if is_claim else _file_lock(fcntl.LOCK_EX)
        while True:
            descriptor = _wait_for(
                path, name, try_lock, give_up_at=deadline, monotonic=self._monotonic, what=what
            )
            if _is_at(descriptor, path):
                return descriptor
            # Somebody removed the file while this one waited for it.
            os.close(descriptor)


@contextlib.contextmanager
def hold_shared(
    path: Path,
    *,
    what: str,
    wait_seconds: float = LOCK_WAIT_SECONDS,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Hold a file's lock shared.

    Raises:
        HostError: DRA-LOCK-TIMEOUT while somebody holds it alone; DRA-HOST-...
    """
    descriptor = lock_file(
        path, exclusive=False, give_up_at=monotonic() + wait_seconds, monotonic=monotonic, what=what
    )
    try:
        yield
    finally:
        os.close(descriptor)


def lock_file(
    path: Path, *, exclusive: bool, give_up_at: float, monotonic: Callable[[], float], what: str
) -> int:
    """Open and lock a file; give the descriptor, whose closing unlocks. Waits until `give_up_at` at most."""
    try_lock = _file_lock(fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    return _wait_for(path, path.name, try_lock, give_up_at=give_up_at, monotonic=monotonic, what=what)


def _file_lock(kind: int) -> _TryLock:
    """Give what locks a whole file, or raises at once."""
    return lambda descriptor: fcntl.flock(descriptor, kind | fcntl.LOCK_NB)


def _claim_lock(name: str) -> _TryLock:
    """Give what locks the byte of a claim, or raises at once."""
    place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_BYTES_OF_PLACE).digest())
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)

    def try_lock(descriptor: int) -> None:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)

    return try_lock


def _wait_for(
    path: Path,
    name: str,
    try_lock: _TryLock,
    *,
    give_up_at: float,
    monotonic: Callable[[], float],
    what: str,
) -> int:
    descriptor = _open(path)
    pause = _FIRST_POLL_SECONDS
    try:
        while True:
            try:
                try_lock(descriptor)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise host_error(error, "lock", path) from error
            else:
                return descriptor
            if monotonic() >= give_up_at:
                raise _timeout(name, what, "another process")
            time.sleep(pause)
            pause = min(pause * 2, _LAST_POLL_SECONDS)
    except BaseException:
        os.close(descriptor)
        raise


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            # Somebody removed the directory under a running plugin.
            ensure_dir(path.parent, mode=0o750)
            return os.open(path, flags, 0o600)
    except OSError as error:
        raise host_error(error, "open the lock", path) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        here = path.lstat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), here)


def _timeout(name: str, what: str, holder: str) -> HostError:
    return HostError(
        "DRA-LOCK-TIMEOUT",
        f"{what} waited too long for the lock {name}, which {holder} holds",
        remedy="The call is retried by itself; if it stays so, look for a prepare that hangs in the plugin's log.",
        lock=name,
    )
