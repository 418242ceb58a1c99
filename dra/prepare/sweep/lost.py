"""Claims whose record was lost: prepared again if the API still has them, else released like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra.api.claim import AllocatedDevice, ClaimView, admit_claim
from dra.errors import DraError
from dra.host.files import read_bytes
from dra.prepare.engine import Engine
from dra.prepare.imports.names import CHECKPOINT
from dra.prepare.model import Notice, Notify
from dra.prepare.record import Record
from dra.prepare.setup import EngineSettings
from dra.prepare.store import Damage
from dra.prepare.sweep.claims import Claims, uid_of
from dra.prepare.sweep.judgement import Stale
from dra.prepare.sweep.patience import Patience, are_many
from dra.prepare.sweep.report import SweepReport
from dra.telemetry.log import error_fields, get_logger

log = get_logger()


def note_orphan_specs(engine: Engine) -> None:
    """Count claims as lost that have a CDI spec of ours but no record.

    Raises:
        DraError: the directories cannot be read.
    """
    store = engine.store
    # Specs first: prepare writes the record before the spec, unprepare removes the spec before the record.
    specs = engine.cdi.uids()
    store.refresh(fully=True)
    known = {record.ref.uid for record in store.records()}
    known |= store.damaged().keys() | store.unreadable().keys()
    checkpoint: bytes | None = None
    for uid in specs - known:
        if checkpoint is None:
            checkpoint = read_bytes(engine.settings.state_dir / CHECKPOINT) or b""
        # A claim that NVIDIA's driver prepared and that was not taken over.
        if uid.encode() in checkpoint:
            continue
        if engine.cdi.path(uid).exists() and store.get(uid) is None:
            store.mark_lost(uid, "there is a CDI file but no record")


class LostRecords:
    """Rebuilds or releases them."""

    def __init__(self, engine: Engine, claims: Claims, patience: Patience, *, notify: Notify) -> None:
        self._engine = engine
        self._claims = claims
        self._patience = patience
        self._notify = notify

    def sweep(self, report: SweepReport) -> None:
        """Bring each to an end, as far as that can be done now. Raises KubeError where the API gives no answer."""
        damaged = self._engine.store.damaged()
        if not damaged:
            return
        # By UID only: names in a damaged file are not to be trusted.
        claims = {uid: claim for claim in self._claims.all() if (uid := uid_of(claim)) in damaged}
        many = are_many(len(damaged) - len(claims), len(damaged))
        for uid, damage in damaged.items():
            self._resolve(uid, damage, claims.get(uid), report=report, many=many)

    def _resolve(
        self, uid: str, damage: Damage, claim: Mapping[str, Any] | None, *, report: SweepReport, many: bool
    ) -> None:
        ref = damage.ref
        try:
            view = None if claim is None else self._claims.parse(claim)
            if view is not None:
                ref = view.ref
            if view is not None and self._is_live(view):
                self._rebuild(view, report)
            elif not self._is_gone(damage, many=many):
                report.waiting.append(uid)
            elif self._engine.unprepare_if(uid, None, damage.reason):
                report.released.append(uid)
        except DraError as error:
            report.waiting.append(uid)
            log.warning(
                "lost_record_not_resolved", **{"claim": str(ref), "claim_uid": uid, **error_fields(error)}
            )

    def _rebuild(self, view: ClaimView, report: SweepReport) -> None:
        ref = view.ref
        outcome = self._engine.prepare([ref])[ref.uid]
        if isinstance(outcome, DraError):
            raise outcome
        report.rebuilt.append(ref.uid)
        self._notify(Notice(ref, "ClaimRecordRebuilt", "the lost record was rebuilt", warning=False))

    def _is_gone(self, damage: Damage, *, many: bool) -> bool:
        stale = Stale("the claim of a lost record was deleted")
        return self._patience.is_due(_stand_in(damage, self._engine.settings), stale, many=many)

    def _is_live(self, view: ClaimView) -> bool:
        try:
            admit_claim(view, view.ref, pool=self._engine.settings.pool)
        except DraError:
            return False
        return bool(view.results)


def _stand_in(damage: Damage, settings: EngineSettings) -> Record:
    """Give a record with what is known of a lost one, to ask whether its devices are in use."""
    results = tuple(
        AllocatedDevice("", settings.driver, settings.pool, device, share_id=share)
        for device, share in damage.devices
    )
    return Record(damage.ref, "prepared", settings.boot_id, results=results)
