"""Keeps the driver's files that were found for as long as the directories do not change.

What is incomplete is kept for a few seconds at most: a node whose driver is just being installed is looked at again.
While that is likely, an incomplete driver is an error that is retried; else it is used, with one warning.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from threading import Lock

from dra.host.driver_files import DriverFiles, find_driver_files
from dra.host.driver_lists import CAPABILITIES
from dra.host.driver_required import INSTALL_REMEDY, missing_error
from dra.host.paths import HostPaths
from dra.host.proc import kernel_driver_version
from dra.telemetry.log import get_logger

# A directory that changed this recently may change again within the same tick of its clock.
_SETTLED_SECONDS = 1.0
# So long an incomplete driver that was just whole, or whose directories just changed, counts as being installed.
INSTALL_SECONDS = 5.0
# So long an incomplete driver is not looked for again.
_INCOMPLETE_SECONDS = 3.0

_log = get_logger(room="host")


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._capabilities = capabilities
        self._wall_clock = wall_clock
        self._clock = clock
        self._lock = Lock()
        # Fingerprint, files, and until when they count.
        self._kept: tuple[tuple[object, ...], DriverFiles, float] | None = None
        self._last: DriverFiles | None = None
        self._lost_at: float | None = None
        self._state: tuple[object, ...] = ()

    def get(self, version: str) -> DriverFiles:
        """Give the files of the driver of this version.

        Raises:
            StackError: as `find_driver_files`; and DRA-DRIVER-LIBRARIES-MISSING while an incomplete driver seems to be
                just being installed or removed. Nothing is kept then.
        """
        kept = self._kept
        if (
            kept is not None
            and kept[0] == self._fingerprint(version, kept[1].watched)
            and self._clock() < kept[2]
        ):
            return kept[1]
        with self._lock:
            self._kept = None
            found = find_driver_files(self._paths, version, capabilities=self._capabilities)
            self._refuse_unfinished(found)
            self._last = found
            self._tell(found)
            if not self._is_settled(found.watched):
                return found
            until = self._clock() + _INCOMPLETE_SECONDS if found.missing else math.inf
            self._kept = (self._fingerprint(version, found.watched), found, until)
            return found

    def forget(self) -> None:
        """Look again on the next call."""
        self._kept = None

    def _refuse_unfinished(self, found: DriverFiles) -> None:
        """Fail while a library that is missing may still come: a container that starts now would never get it."""
        if not found.missing:
            self._lost_at = None
            return
        now = self._clock()
        if self._lost_at is None and self._last is not None and not self._last.missing:
            self._lost_at = now
        just_lost = self._lost_at is not None and now - self._lost_at < INSTALL_SECONDS
        # Without a loaded module it is a rig with a stand-in for NVML, which is as it is.
        if just_lost or (kernel_driver_version(self._paths) and self._changed_lately(found.library_dirs)):
            raise missing_error(
                self._paths,
                found.searched,
                " and no ".join(found.missing),
                remedy=f"The driver is being installed or removed, it seems; the call is retried. {INSTALL_REMEDY}",
            )

    def _changed_lately(self, directories: tuple[str, ...]) -> bool:
        root = str(self._paths.driver_root).rstrip("/")
        now = self._wall_clock()
        states = (_directory_state(root + directory) for directory in directories)
        return any(state is not None and abs(now - state[2] / 1e9) < INSTALL_SECONDS for state in states)

    def _tell(self, found: DriverFiles) -> None:
        """Log once that the driver is not whole, and once that it is again."""
        state = (found.version, found.missing, found.assumed) if found.missing or found.assumed else ()
        before, self._state = self._state, state
        if state == before:
            return
        if not state:
            _log.info("driver_libraries_complete", driver_version=found.version)
            return
        _log.warning(
            "driver_libraries_missing",
            driver_version=found.version,
            missing=list(found.missing),
            without_version=list(found.assumed),
            driver_root=self._paths.driver_root_host,
            searched=list(found.searched),
            remedy=f"Containers are given what is there. {INSTALL_REMEDY}",
        )

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
