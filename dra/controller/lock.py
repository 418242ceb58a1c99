"""Which of two instances publishes: whoever holds `publisher.lock`.

During a rolling update the old and the new pod run at once and may describe the devices differently; both
publishing would be a war of updates. The lock is the kernel's (flock): it is free the moment its holder is
gone, however it went.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dra.errors import HostError


class PublisherLock:
    """An flock on a file. One thread uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def held(self) -> bool:
        """Whether this instance publishes."""
        return self._file is not None

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it.

        Raises:
            HostError: DRA-PUBLISHER-LOCK if the file cannot be opened.
        """
        if self._file is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostError(
                "DRA-PUBLISHER-LOCK",
                f"cannot open {self.path}: {error.strerror or error}",
                remedy="Make the state directory writable; until then two instances may both publish.",
                path=str(self.path),
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._file = file
        self._sign(file)
        return True

    def confirm(self) -> bool:
        """Whether it still keeps others out; if not it is let go.

        A file that somebody removed or replaced is locked for us alone: the next instance locks the new one.
        """
        if self._file is None:
            return False
        try:
            there, ours = self.path.stat(), os.fstat(self._file)
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
                return True
        except OSError:
            pass
        self.release()
        return False

    def release(self) -> None:
        """Let the other instance take over."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @staticmethod
    def _sign(file: int) -> None:
        """Leave the process id for people; a full disk is no reason not to publish."""
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            return
