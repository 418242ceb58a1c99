"""Keeps the sockets in place: who removes or replaces one sees it served again within about a second.

Within ten where the file system does not tell of the change: a mount over the directory, another directory further up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

from dra.errors import HostError
from dra.host.file_watch import NAMES_CHANGED, FileWatch, start_watching
from dra.plugin.server import UnixServer
from dra.plugin.sockets import inode_of, refuses
from dra.telemetry.log import get_logger

log = get_logger()

INTERVAL_SECONDS = 1.0
FALLBACK_SECONDS = 10.0
_SETTLE_SECONDS = 0.2
_END_SECONDS = 5.0


class SocketGuard:
    """Re-creates the sockets of servers whose files vanish, in the order given.

    A kubelet, or a careless cleaner, may empty the registry directory under a running plugin. Runs in its own
    thread; `check` is one round. The file system tells when there is something to look at.

    Args:
        servers: in this order.
        interval_seconds: between two rounds while something is amiss, or a directory cannot be watched.
        fallback_seconds: the same while all is well: not every change is told (a mount over the directory).
    """

    def __init__(
        self,
        servers: Iterable[UnixServer],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        fallback_seconds: float = FALLBACK_SECONDS,
    ) -> None:
        self._servers = tuple(servers)
        self._folders = tuple(dict.fromkeys(server.path.parent for server in self._servers))
        self._interval, self._fallback = interval_seconds, fallback_seconds
        self._stop = threading.Event()
        self._complained: set[Path] = set()
        self._files: FileWatch | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises HostError."""
        self._files, self._thread = start_watching("socket-guard", self._run)

    def stop(self) -> None:
        """End the thread; after this returns no socket is re-created."""
        self._stop.set()
        if self._thread is None or self._files is None:
            return
        self._files.wake()
        # A file system that hangs must not keep the driver from ending.
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._files.close()

    def open_all(self) -> None:
        """Serve for the first time, taking over names that others have; what cannot be opened is tried later."""
        for server in self._servers:
            if not self._open(server):
                break  # the registration is never shown before the service

    def check(self) -> list[Path]:
        """Serve again where a file is missing or refuses; gives the paths that were re-created."""
        made = []
        for server in self._servers:
            if server.present:
                self._complained.discard(server.path)
                continue
            if inode_of(server.path) is not None and not refuses(server.path):
                # Another instance without a pod UID took the name over and serves: two must not fight for it.
                self._complain(server.path, "socket_taken_over")
                continue
            if not self._open(server):
                break
            log.info("socket_recreated", path=str(server.path))
            made.append(server.path)
        return made

    def _open(self, server: UnixServer) -> bool:
        try:
            server.open()
        except HostError as error:
            self._complain(server.path, "socket_missing", error=str(error))
            return False
        return True

    def _complain(self, path: Path, event: str, **fields: str) -> None:
        if path not in self._complained:
            self._complained.add(path)
            log.warning(event, path=str(path), **fields)

    def _run(self, files: FileWatch) -> None:
        while not self._stop.is_set():
            # Before the round: what changes after it is told.
            told = [files.follow(folder, NAMES_CHANGED) for folder in self._folders]
            well = self._round() and all(told)
            if files.wait(self._fallback if well else self._interval):
                # Whoever empties the directory may do it; and a storm of changes costs few rounds.
                self._stop.wait(_SETTLE_SECONDS)

    def _round(self) -> bool:
        """Check; whether all is well."""
        try:
            self.check()
        except Exception:  # marked border: the next round tries again
            log.exception("socket_guard_failed")
            return False
        return not self._complained
