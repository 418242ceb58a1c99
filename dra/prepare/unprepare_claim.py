"""What one claim's unprepare does: undo what its record tells, under its locks. No API, no NVML but for effects."""

from __future__ import annotations

import time
from dataclasses import replace

from dra.api.claim import ClaimRef
from dra.errors import DraError, HostError
from dra.prepare import steps
from dra.prepare.attempts import Attempts
from dra.prepare.batch import as_dra_error, claim_busy, fields_of, ms_since
from dra.prepare.journal import Journal, only_spec
from dra.prepare.model import is_safe_uid
from dra.prepare.node_state import NodeState, gpus_of
from dra.prepare.partitions import DEVICE_KIND
from dra.prepare.passthrough.model import KIND as VFIO_KIND
from dra.prepare.record import Record
from dra.prepare.setup import ROUNDS, EnginePorts
from dra.telemetry.log import error_fields, get_logger

# Effects that change what the inventory shows.
_HARDWARE = frozenset({DEVICE_KIND, VFIO_KIND})


class ClaimUnpreparer:
    """Unprepares claims, one a call. Thread-safe."""

    def __init__(self, state: NodeState, ports: EnginePorts, journal: Journal, attempts: Attempts) -> None:
        self._state = state
        self._ports = ports
        self._journal = journal
        self._attempts = attempts
        self._log = get_logger()

    def unprepare(self, ref: ClaimRef) -> DraError | None:
        """Unprepare a claim; give None, or what is wrong. An unknown claim is fine."""
        if not is_safe_uid(ref.uid):
            return None  # Such a claim was never prepared.
        began = time.monotonic()
        try:
            self._state.open_if_taking_over()
            known = self._in_rounds(ref)
        except Exception as error:  # marked border: one claim's failure is its own
            problem = as_dra_error(error, verb="unprepare", ref=ref)
            self._log.warning(
                "claim_unprepare_failed", claim=str(ref), claim_uid=ref.uid, duration_ms=ms_since(began),
                **fields_of(problem),
            )  # fmt: skip
            return problem
        self._log.info(
            "claim_unprepared", claim=str(ref), claim_uid=ref.uid, duration_ms=ms_since(began), known=known
        )
        return None

    def unprepare_if(self, uid: str, expected: Record | None, reason: str, *, wait_seconds: float) -> bool:
        """Unprepare a claim unless its record is no longer `expected`; whether it was done.

        Raises:
            DraError: what keeps it from being unprepared.
        """
        ref = expected.ref if expected is not None else ClaimRef("", "", uid)
        with self._state.locked(ref, gpus_of(expected), "clean-up", wait_seconds):
            self._state.store.refresh()
            if self._state.store.get(uid) != expected:
                return False
            self._take_down(ref, expected)
        self._log.info("claim_released", claim=str(ref), claim_uid=uid, reason=reason)
        return True

    def _in_rounds(self, ref: ClaimRef) -> bool:
        state = self._state
        for _ in range(ROUNDS):
            seen = state.store.get(ref.uid)
            wait_seconds = state.lock_wait(seen.results if seen else ())
            try:
                with state.locked(ref, gpus_of(seen), "unprepare", wait_seconds):
                    if state.store.get(ref.uid) != seen:
                        continue
                    return self._take_down(ref, seen)
            except HostError as error:
                # Where no lock can be had because nothing can be written, an unknown claim is still fine.
                if error.code == "DRA-LOCK-TIMEOUT" or state.is_known(ref.uid):
                    raise
                return False
        raise claim_busy(ref)

    def _take_down(self, ref: ClaimRef, record: Record | None) -> bool:
        """Undo a claim under its locks; whether there was anything. The CDI spec goes before the devices are free."""
        self._ports.step(steps.UNPREPARE_PLANNED)
        known = record is not None or self._state.is_known(ref.uid)
        if record is not None:
            record = self._mark(record)
            self._ports.step(steps.RECORD_MARKED)
            try:
                self._journal.undo(record)
            finally:
                if any(entry.kind in _HARDWARE for entry in record.journal):
                    self._ports.layout_changed()
        # Also what no record tells of: a lost record's spec.
        self._state.cdi.remove(self._state.cdi.path(ref.uid))
        # Not fsynced: after a power failure the record is one of an earlier boot, which holds nothing.
        self._state.store.remove(ref.uid, fsync=False)
        self._ports.step(steps.RECORD_REMOVED)
        self._attempts.outdate(ref.uid)
        return known

    def _mark(self, record: Record) -> Record:
        if record.state == "unpreparing" or only_spec(record):
            # With nothing to undo but the spec there is no half way: a record without spec is what a crash leaves
            # between the two removals. The next unprepare removes it, a prepare writes the spec again.
            return record
        marked = replace(record, state="unpreparing")
        try:
            self._state.store.put(marked, fsync=False)
        except HostError as error:
            # A full disk must not keep devices from being freed; undoing again does no harm.
            self._log.warning("record_not_marked", claim_uid=record.ref.uid, **error_fields(error))
        return marked
