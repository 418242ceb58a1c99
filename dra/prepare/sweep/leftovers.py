"""What nobody needs any more: partitions of lost records, temporary files of processes that are gone, old locks."""

from __future__ import annotations

from dra.prepare.cdi_files import remove_if_old
from dra.prepare.engine import Engine
from dra.prepare.mig_orphans import find_orphans
from dra.prepare.sweep.claims import Claims
from dra.prepare.sweep.patience import Patience
from dra.telemetry.log import get_logger

# A write takes milliseconds; a temporary file this old belongs to a process that is gone.
_LEFTOVER_SECONDS = 60.0

log = get_logger()


def sweep_partitions(engine: Engine, claims: Claims, patience: Patience) -> None:
    """Destroy partitions of lost records whose claims are gone too; the API is asked only if there are any.

    Raises:
        DraError: the API gives no answer.
    """
    orphans, modes = find_orphans(engine)
    if not orphans:
        patience.are_due(set())
        if modes:
            engine.release_partitions(())
        return
    claimed = {
        result.device
        for claim in claims.all()
        for result in claims.parse(claim).results
        if result.pool == engine.settings.pool
    }
    unclaimed = orphans.keys() - claimed
    due = patience.are_due(unclaimed)
    if due:
        engine.release_partitions(claimed | (unclaimed - due))


def sweep_files(engine: Engine) -> None:
    """Remove old temporary files, and the locks of claims that are gone. Never raises."""
    store, locks = engine.store, engine.locks
    removed = sum(remove_if_old(path, _LEFTOVER_SECONDS) for path in store.leftovers())
    removed += engine.marks.clear_old(older_than_seconds=_LEFTOVER_SECONDS)
    removed += engine.cdi.remove_leftovers(older_than_seconds=_LEFTOVER_SECONDS)
    known = {record.ref.uid for record in store.records()} | store.unreadable().keys()
    for name in locks.names("claim-"):
        if name.removeprefix("claim-") not in known:
            removed += locks.remove_unused(name)
    if removed:
        log.info("leftovers_removed", files=removed)
