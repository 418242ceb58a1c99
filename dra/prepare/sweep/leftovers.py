"""What nobody needs any more: partitions of lost records, temporary files of processes that are gone, old locks."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from dra.prepare.engine import Engine
from dra.prepare.sweep.claims import Claims
from dra.prepare.sweep.metadata import find_orphan_metadata
from dra.prepare.sweep.patience import Patience
from dra.telemetry.log import get_logger

# A write takes milliseconds; a temporary file that was there so long belongs to a process that is gone.
LEFTOVER_SECONDS = 60.0

log = get_logger()


def sweep_hardware(engine: Engine, claims: Claims, patience: Patience) -> None:
    """Undo what lost records did to the hardware whose claims are gone too; the API is asked only if there is anything.

    Raises:
        DraError: the API gives no answer.
    """
    orphans, modes = engine.orphans()
    if not orphans:
        patience.are_due(set())
        if modes:
            engine.release_orphans(())
        return
    claimed = {
        result.device
        for claim in claims.all()
        for result in claims.parse(claim).results
        if result.pool == engine.settings.pool
    }
    unclaimed = orphans - claimed
    engine.release_orphans(claimed | (unclaimed - patience.are_due(unclaimed)))


class HalfWritten:
    """Temporary files of writes that never ended, and what belongs to nobody. Used by one sweep at a time.

    One goes once it was seen unchanged for `seconds` on our own clock. Its own time says nothing: it comes from a clock
    that may have been set since, and a file that a write is about to rename would look an hour old.
    """

    def __init__(self, monotonic: Callable[[], float], *, seconds: float = LEFTOVER_SECONDS) -> None:
        self._monotonic, self._seconds = monotonic, seconds
        self._since: dict[tuple[Path, int, int], float] = {}

    def remove_old(self, paths: Iterable[Path]) -> int:
        """Remove those of the files and empty directories that were there long enough; how many."""
        now, removed = self._monotonic(), 0
        since: dict[tuple[Path, int, int], float] = {}
        for path in paths:
            with contextlib.suppress(OSError):
                seen = path.stat()
                key = (path, seen.st_ino, seen.st_mtime_ns)
                since[key] = self._since.get(key, now)
                if now - since[key] >= self._seconds:
                    path.rmdir() if stat.S_ISDIR(seen.st_mode) else path.unlink()
                    removed += 1
        self._since = since
        return removed


def sweep_files(engine: Engine, half_written: HalfWritten) -> None:
    """Remove what belongs to claims that are gone, temporary files, and records set aside under odd names. Never raises."""
    store = engine.store
    marks = (engine.marks, engine.passthrough_marks)
    temporary = [*store.leftovers(), *engine.cdi.leftovers()]
    for each in marks:
        temporary += each.leftovers()
    temporary += find_orphan_metadata(engine, engine.metadata_files)
    removed = half_written.remove_old(temporary) + sum(each.clear_old() for each in marks)
    removed += store.remove_strays()
    if removed:
        log.info("leftovers_removed", files=removed)
