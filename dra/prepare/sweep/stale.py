"""Records of claims that nobody wants here any more: judged one by one against the API, and released."""

from __future__ import annotations

from collections.abc import Callable

from dra.api.claim import ClaimView
from dra.errors import DraError
from dra.prepare.engine import Engine
from dra.prepare.record import Record
from dra.prepare.sweep.claims import Claims, ClaimsByUid, is_no_answer
from dra.prepare.sweep.judgement import Stale, judge_record
from dra.prepare.sweep.patience import Patience, are_many
from dra.prepare.sweep.report import SweepReport, Tell
from dra.telemetry.log import error_fields, get_logger

log = get_logger()


class StaleRecords:
    """Finds and releases them."""

    def __init__(
        self, engine: Engine, claims: Claims, patience: Patience, *, tell: Tell, stopping: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._claims = claims
        self._patience = patience
        self._tell = tell
        self._stopping = stopping

    def sweep(self, report: SweepReport) -> None:
        """Judge each record, and release those whose time has come.

        Raises:
            KubeError: the API gives no answer; what was judged by then is released.
        """
        found: list[tuple[Record, Stale]] = []
        asked, failure = 0, None
        nameless = ClaimsByUid(self._claims)
        for record in self._engine.store.records():
            if self._stopping():
                return
            try:
                stale = judge_record(record, self._claim_of(record, nameless))
            except DraError as error:
                if is_no_answer(error):
                    failure = error
                    break  # The next claim would only wait as long.
                log.warning("claim_not_judged", **{"claim": str(record.ref), **error_fields(error)})
                continue
            asked += 1
            if stale is not None:
                found.append((record, stale))
        many = are_many(sum(not stale.patience_seconds for _, stale in found), asked)
        for record, stale in found:
            if self._patience.is_due(record, stale, many=many):
                self._release(record, stale, report)
            else:
                report.waiting.append(record.ref.uid)
        if failure is not None:
            raise failure
        seen = {(record.ref.uid, stale.reason) for record, stale in found}
        self._patience.keep(seen, self._engine.store.damaged().keys())

    def _release(self, record: Record, stale: Stale, report: SweepReport) -> None:
        try:
            done = self._engine.unprepare_if(record.ref.uid, record, stale.reason)
        except DraError as error:
            report.waiting.append(record.ref.uid)
            log.warning("stale_claim_not_released", **{"claim": str(record.ref), **error_fields(error)})
            return
        if done:
            report.released.append(record.ref.uid)
            self._tell(record, "StaleClaimReleased", f"{stale.reason}; its devices are free again", False)

    def _claim_of(self, record: Record, nameless: ClaimsByUid) -> ClaimView | None:
        """Read a record's claim; None if there is none. Raises KubeError where the API gives no answer."""
        if record.ref.name:
            return self._claims.read(record.ref)
        # Taken over from NVIDIA's driver, whose checkpoint has the UID only.
        claim = nameless.get(record.ref.uid)
        if claim is None:
            return None
        view = self._claims.parse(claim)
        self._engine.name_claim(record, view.ref)
        return view
