"""Keeps the driver's files that were found for as long as the directories do not change.

Nothing that is incomplete is ever kept: a node whose driver is just being installed is looked at again on the next
call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Lock

from dra.host.driver_files import DriverFiles, find_driver_files
from dra.host.driver_lists import CAPABILITIES
from dra.host.paths import HostPaths

# A directory that changed this recently may change again within the same tick of its clock.
_SETTLED_SECONDS = 1.0


class DriverCatalog:
    """Keeps the driver files of a root while its directories stay as they are. Safe for several threads.

    A look costs some milliseconds, a look at the fingerprint (one stat for each of some thirty directories) 50 us.
    """

    def __init__(
        self,
        paths: HostPaths,
        *,
        capabilities: frozenset[str] = CAPABILITIES,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths = paths
        self._capabilities = capabilities
        self._wall_clock = wall_clock
        self._lock = Lock()
        self._kept: tuple[tuple[object, ...], DriverFiles] | None = None

    def get(self, version: str) -> DriverFiles:
        """Give the files of the driver of this version.

        Raises:
            StackError: as `find_driver_files`; nothing is kept then.
        """
        kept = self._kept
        if kept is not None and kept[0] == self._fingerprint(version, kept[1].watched):
            return kept[1]
        with self._lock:
            self._kept = None
            found = find_driver_files(self._paths, version, capabilities=self._capabilities)
            if not self._is_settled(found.watched):
                return found
            self._kept = (self._fingerprint(version, found.watched), found)
            return found

    def forget(self) -> None:
        """Look again on the next call."""
        self._kept = None

    def _fingerprint(self, version: str, watched: tuple[str, ...]) -> tuple[object, ...]:
        root = os.path.realpath(self._paths.driver_root)
        return (version, root, *(_directory_state(directory) for directory in watched))

    def _is_settled(self, watched: tuple[str, ...]) -> bool:
        now = self._wall_clock()
        changed = (_directory_state(directory) for directory in watched)
        return all(state is None or abs(now - state[2] / 1e9) > _SETTLED_SECONDS for state in changed)


def _directory_state(view: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(view)  # noqa: PTH116 - thirty at each prepare
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
