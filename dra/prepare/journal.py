"""Carrying out and undoing effects, with the claim's record always one step ahead of the node.

Called under the claim's lock and the locks of its GPUs. What is on disk when the process dies, at any instruction,
is enough for the next prepare to go on and for an unprepare to clean up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dra.errors import DraError, HostError
from dra.prepare import steps
from dra.prepare.effects import Effect, EffectCatalog, WriteCdi, journal_entry, knows_outcome, outcome_of
from dra.prepare.model import Step
from dra.prepare.record import Record
from dra.prepare.store import RecordStore
from dra.telemetry.log import error_fields, get_logger


class Journal:
    """Brings the node and a claim's record to what is wanted."""

    def __init__(self, store: RecordStore, catalog: EffectCatalog, *, boot_id: str, step: Step) -> None:
        self._store = store
        self._catalog = catalog
        self._boot_id = boot_id
        self._step = step
        self._log = get_logger()

    def carry_out(self, wanted: Record, effects: Sequence[Effect], *, previous: Record | None) -> Record:
        """Make the node match; give the complete record.

        `wanted` says who and what; its journal and state are set here. The last effect is the CDI spec. With a complete `previous` whose effects
        are all as they should be, nothing is written. A first prepare that fails leaves nothing behind; a repair
        that fails leaves the record, since containers may run.

        Raises:
            DraError: of an effect, or of the record's disk.
        """
        previous = self._drop_obsolete(previous, effects)
        wanted = self._with_journal(wanted, effects, previous)
        if (
            previous is not None
            and previous.is_complete(self._boot_id)
            and previous.results == wanted.results
        ):
            return self._repair(wanted, effects, previous)
        work = _Work(wanted)
        try:
            return self._first(work, effects)
        except Exception as error:
            self._roll_back(work.record, error)
            raise

    def undo(self, record: Record, *, prefix: str = steps.UNDO) -> None:
        """Undo all effects, the last one first.

        Undoing again does no harm, so that after a crash it is all done once more. Until the record goes, or is written,
        its effects count as held, and nobody else ends what they have in common. Struck at once is what was made and is
        gone: somebody's hand may make one that cannot be told from it.

        Raises:
            DraError: of the effect that could not be undone; it and those before it are still in the record, no others.
        """
        left = written = record
        try:
            for index in reversed(range(len(record.journal))):
                entry = record.journal[index]
                self._step(f"{prefix}:effect-undoing:{index}")
                effect = self._catalog.revive(entry)
                self._undo_effect(left, effect)
                self._step(f"{prefix}:effect-undone:{index}")
                left = left.without_entry(entry)
                if left.journal and entry.outcome and not knows_outcome(effect):
                    self._store.put(left, fsync=False)
                    written = left
        except Exception:
            if left != written:
                self._strike(left)
            raise

    def _strike(self, left: Record) -> None:
        try:
            self._store.put(left, fsync=False)
        except HostError as error:
            # What matters is why an effect could not be undone; the others are undone again with it.
            self._log.warning("record_not_struck", claim_uid=left.ref.uid, **error_fields(error))

    def _first(self, work: _Work, effects: Sequence[Effect]) -> Record:
        """Carry out all effects, the spec last, with two writes of the record, or one where there is only the spec.

        What is begun is written down before it is touched: a crash of the process leaves it in the page cache. A power
        failure ends what effects make, with the records of its boot; so nothing is fsynced here.

        The complete record goes before the spec. It holds the devices and names the spec; that the spec is there is
        never taken from it: each prepare compares the file with what it should be. So a crash between the two leaves
        what a lost CDI file leaves, and the next prepare writes the file, the next unprepare takes the record away.
        """
        *before, spec = effects
        alone = only_spec(work.record)
        if not alone:
            work.record = replace(work.record, state="preparing")
            self._store.put(work.record, fsync=False)
            self._step(steps.RECORD_WRITTEN)
        for index, effect in enumerate(before):
            self._apply(work, index, effect)
            # What came of the last one is in the complete record.
            self._note(work, index, outcome_of(effect), write=index + 1 < len(before))
        complete = _completed(work.record, effects)
        self._store.put(complete, fsync=True)
        if alone:
            self._step(steps.RECORD_WRITTEN)
        self._apply(work, len(before), spec)
        self._step(steps.RECORD_COMPLETED)
        return complete

    def _apply(self, work: _Work, index: int, effect: Effect) -> None:
        self._step(f"{steps.EFFECT_APPLYING}:{index}")
        if work.record.journal[index].state != "applied" or not effect.verify():
            self._apply_one(work, index, effect)
        self._step(f"{steps.EFFECT_APPLIED}:{index}")

    def _apply_one(self, work: _Work, index: int, effect: Effect) -> None:
        """Apply an effect. What came of an earlier application is struck from the record first.

        Should this process die before it can write down what came of this one, the record must say that it is not
        known, not name something that is gone.
        """
        if work.record.journal[index].outcome and not knows_outcome(effect) and not effect.verify():
            self._note(work, index, {})
        try:
            effect.apply()
        except Exception:
            # For the rollback only: it may be that nothing was done which it could undo.
            entry = replace(work.record.journal[index], outcome=outcome_of(effect))
            work.record = work.record.with_entry(entry)
            raise

    def _note(self, work: _Work, index: int, outcome: Mapping[str, Any], *, write: bool = True) -> None:
        entry = work.record.journal[index]
        if entry.outcome == outcome:
            return
        work.record = work.record.with_entry(
            replace(entry, outcome=outcome, state=entry.state if outcome else "pending")
        )
        if write:
            self._store.put(work.record, fsync=False)

    def _repair(self, record: Record, effects: Sequence[Effect], previous: Record) -> Record:
        if any(entry.state != "applied" for entry in record.journal if entry.kind != WriteCdi.kind):
            # An effect that the claim did not have before: it is written down first, like any other.
            self._store.put(replace(record, state="prepared"), fsync=False)
        work = _Work(replace(record, state="prepared"))
        for index, effect in enumerate(effects):
            if not effect.verify():
                self._log.warning(
                    "effect_repaired", claim=str(record.ref), claim_uid=record.ref.uid, effect=effect.kind
                )
                self._step(f"{steps.EFFECT_APPLYING}:{index}")
                self._apply_one(work, index, effect)
                self._step(f"{steps.EFFECT_APPLIED}:{index}")
            # Or it was applied by a process that died before it could write this down.
            self._note(work, index, outcome_of(effect))
        record = _completed(work.record, effects)
        if record != previous:
            self._store.put(record, fsync=True)
        return record

    def _with_journal(self, wanted: Record, effects: Sequence[Effect], previous: Record | None) -> Record:
        known = {} if previous is None else {entry.key: entry for entry in previous.journal}
        fresh = [journal_entry(effect) for effect in effects]
        entries = tuple(known.get(entry.key, entry) for entry in fresh)
        extra = {} if previous is None else previous.extra
        return replace(wanted, boot_id=self._boot_id, journal=entries, extra=extra)

    def _drop_obsolete(self, previous: Record | None, effects: Sequence[Effect]) -> Record | None:
        if previous is None:
            return None
        keys = {journal_entry(effect).key for effect in effects}
        for entry in reversed(previous.journal):
            if entry.key not in keys:
                self._undo_effect(previous, self._catalog.revive(entry))
                previous = previous.without_entry(entry)
                self._store.put(previous, fsync=False)
        return previous

    def _undo_effect(self, record: Record, effect: Effect) -> None:
        if effect.ends_with_boot and record.boot_id != self._boot_id:
            return
        if effect.shared_resource is not None and self._others_hold(record, effect):
            return
        effect.undo()

    def _others_hold(self, record: Record, effect: Effect) -> bool:
        self._store.refresh()
        return any(
            entry.kind == effect.kind
            and self._catalog.revive(entry).shared_resource == effect.shared_resource
            for other in self._store.records()
            if other.ref.uid != record.ref.uid and other.holds(self._boot_id)
            for entry in other.journal
        )

    def _roll_back(self, record: Record, error: Exception) -> None:
        try:
            self.undo(record, prefix=steps.ROLLBACK)
            self._store.remove(record.ref.uid, fsync=False)
        except DraError as problem:
            # The record stays and says what is left to undo; unprepare or the next prepare does it.
            self._log.warning(
                "claim_rollback_failed",
                claim=str(record.ref),
                claim_uid=record.ref.uid,
                cause=str(error),
                **error_fields(problem),
            )


@dataclass(slots=True)
class _Work:
    """A prepare under way: the record as it is on disk, or will be with the next write."""

    record: Record


def only_spec(record: Record) -> bool:
    """Whether a record's journal has nothing but the CDI spec, so that there is no half way worth writing down."""
    return all(entry.kind == WriteCdi.kind for entry in record.journal)


def _completed(record: Record, effects: Sequence[Effect]) -> Record:
    digests = [effect.sha256 for effect in effects if isinstance(effect, WriteCdi)]
    return replace(
        record,
        state="prepared",
        # A spec stays pending: whether the file is there is always looked up, never taken from the record.
        journal=tuple(
            entry if entry.kind == WriteCdi.kind else replace(entry, state="applied")
            for entry in record.journal
        ),
        cdi_sha256=digests[0] if digests else "",
    )
