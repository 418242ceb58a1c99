"""What one claim's prepare does.

Read the claim from the API, outside of any lock; take the locks of the claim and of its GPUs; look whether the record
is still the one that was seen, else start over; make the node match (`dra.prepare.reconcile`).
"""

from __future__ import annotations

import time

from dra.api.claim import ClaimRef, ClaimView, admit_claim, parse_claim
from dra.prepare.attempts import Attempts
from dra.prepare.batch import as_dra_error, claim_busy, fields_of, ms_since
from dra.prepare.fetch import ClaimFetcher
from dra.prepare.metadata import pod_claim_of
from dra.prepare.model import Notice, PreparedDevice, PrepareOutcome, check_uid
from dra.prepare.node_state import NodeState, gpus_of, gpus_to_lock
from dra.prepare.reconcile import Reconciler
from dra.prepare.record import Record
from dra.prepare.setup import ROUNDS, EnginePorts
from dra.prepare.timing import API, timed
from dra.telemetry.log import get_logger


class ClaimPreparer:
    """Prepares claims, one a call. Thread-safe."""

    def __init__(
        self, state: NodeState, ports: EnginePorts, reconciler: Reconciler, attempts: Attempts
    ) -> None:
        self._state = state
        self._ports = ports
        self._reconciler = reconciler
        self._attempts = attempts
        self._fetcher = ClaimFetcher(
            ports.source,
            deadline_seconds=state.settings.api_deadline_seconds,
            record_wait_seconds=state.settings.record_wait_seconds,
        )
        self._log = get_logger()

    def prepare(self, ref: ClaimRef, give_up_at: float | None) -> PrepareOutcome:
        """Prepare a claim; give its devices, or what is wrong. `give_up_at`: when the caller stops listening."""
        began = time.monotonic()
        try:
            check_uid(ref)
            self._state.open()
            devices = self._in_rounds(ref, give_up_at)
        except Exception as error:  # marked border: one claim's failure is its own
            problem = as_dra_error(error, verb="prepare", ref=ref)
            self._log.warning(
                "claim_prepare_failed", claim=str(ref), claim_uid=ref.uid, duration_ms=ms_since(began),
                **fields_of(problem),
            )  # fmt: skip
            return problem
        self._log.info(
            "claim_prepared", claim=str(ref), claim_uid=ref.uid, duration_ms=ms_since(began),
            devices=[device.device for device in devices],
        )  # fmt: skip
        return devices

    def restore_spec(self, expected: Record, *, wait_seconds: float) -> bool:
        """Write the CDI spec of a prepared claim again if it is gone; whether that was needed. No API.

        Raises:
            DraError: what keeps it from being written.
        """
        ref, path = expected.ref, self._state.cdi.path(expected.ref.uid)
        if path.exists() or not expected.is_complete(self._state.settings.boot_id):
            return False
        view = _view_of(expected)
        inventory = self._reconciler.inventory_for(view)
        with self._state.locked(ref, gpus_of(expected), "restoring", wait_seconds):
            self._state.store.refresh()
            if self._state.store.get(ref.uid) != expected or path.exists():
                return False
            self._reconciler.bring_about(ref, view, inventory, expected)
        self._log.warning("cdi_spec_restored", claim=str(ref), claim_uid=ref.uid)
        self._ports.notify(
            Notice(
                ref, "CdiSpecRestored", "its CDI file was gone and was written again; containers that start find it",
                consumers=expected.consumers,
            )
        )  # fmt: skip
        return True

    def _in_rounds(self, ref: ClaimRef, give_up_at: float | None) -> tuple[PreparedDevice, ...]:
        store = self._state.store
        with self._attempts.under_way(ref.uid) as attempt:
            for _ in range(ROUNDS):
                attempt.stale = False
                seen = store.get(ref.uid)
                with timed(self._ports.timing, API):
                    view = self._view(ref, seen)
                if not view.results:
                    return ()
                inventory = self._reconciler.inventory_for(view)
                wait_seconds = self._state.lock_wait(view.results, give_up_at)
                locks = gpus_to_lock(view.results, inventory)
                with self._state.locked(ref, locks, "prepare", wait_seconds):
                    store.refresh()
                    if attempt.stale or store.get(ref.uid) != seen:
                        # Prepared or unprepared by another call while this one waited: look again.
                        continue
                    return self._reconciler.bring_about(ref, view, inventory, seen)
        raise claim_busy(ref)

    def _view(self, ref: ClaimRef, record: Record | None) -> ClaimView:
        settings = self._state.settings
        if record is not None and record.is_complete(settings.boot_id):
            claim = self._fetcher.fetch_if_quick(ref)
            if claim is None:
                self._log.info("claim_served_from_record", claim=str(ref), claim_uid=ref.uid)
                return _view_of(record)
        else:
            claim = self._fetcher.fetch(ref)
        view = parse_claim(claim, driver=settings.driver)
        admit_claim(view, ref, pool=settings.pool)
        return view


def _view_of(record: Record) -> ClaimView:
    """Give the claim as it was when it was prepared."""
    return ClaimView(
        record.ref, True, record.results, record.configs,
        reserved_for=record.consumers, pod_claim_name=pod_claim_of(record),
    )  # fmt: skip
