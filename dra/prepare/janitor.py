"""Releasing what nobody will unprepare, and removing what nobody needs.

The kubelet does not unprepare after a node was lost, a pod force-deleted while the driver was down, or a reboot.
The janitor compares the records with the API at start, every half minute and on request. It changes a claim only
through the engine, under the claim's lock, and only if the record is the one that it judged.

That a claim is gone is only the API server's word, and a pod whose claim is released loses its devices to another:
it is asked a second time, some seconds later, and is given longer if it wants to take most claims of the node at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.api.claim import AllocatedDevice, ClaimRef, ClaimView, admit_claim, parse_claim
from dra.errors import DraError, KubeError
from dra.host.files import read_bytes
from dra.prepare.cdi_files import remove_if_old
from dra.prepare.engine import Engine, EngineSettings
from dra.prepare.judgement import Stale, judge_record
from dra.prepare.mig_orphans import find_orphans
from dra.prepare.model import ClaimSource, Notice, Notify, no_notice, says_gone
from dra.prepare.record import Record
from dra.prepare.retries import UnprepareRetries
from dra.prepare.store import Damage
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

INTERVAL_SECONDS = 30.0
# How often it is looked whether the CDI specs are there: containers that start in between fail, and are tried again.
SPEC_SECONDS = 5.0
# How long a device whose claim is gone is left to processes that still use it.
IN_USE_GRACE_SECONDS = 600.0
# How long after the first look a second one must say the same before a claim is released.
CONFIRM_SECONDS = 5.0
# So many times as long where more than half of the claims look gone at once, and there are at least so many.
_MANY_TIMES = 3
_MANY = 3
_API_SECONDS = 5.0
# A write takes milliseconds; a temporary file this old belongs to a process that is gone.
_LEFTOVER_SECONDS = 60.0
_NVIDIA_CHECKPOINT = "checkpoint.json"


@dataclass(slots=True)
class SweepReport:
    """What a sweep did, by claim UID."""

    released: list[str]
    rebuilt: list[str]
    waiting: list[str]
    api_answered: bool = True


class Janitor:
    """Sweeps a node. `sweep` may be called from any thread; two sweeps never run at once."""

    def __init__(
        self,
        engine: Engine,
        source: ClaimSource,
        *,
        device_in_use: Callable[[Record], bool],
        notify: Notify = no_notice,
        interval_seconds: float = INTERVAL_SECONDS,
        grace_seconds: float = IN_USE_GRACE_SECONDS,
        confirm_seconds: float = CONFIRM_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._source = source
        self._device_in_use = device_in_use
        self._notify = notify
        self._interval_seconds = interval_seconds
        self._grace_seconds = grace_seconds
        self._confirm_seconds = confirm_seconds
        self._monotonic = monotonic
        # Since when a record is stale, by UID and reason.
        self._stale_since: dict[tuple[str, str], float] = {}
        # Since when a partition of ours is nobody's, by device name.
        self._orphans_since: dict[str, float] = {}
        # When the next second look is due.
        self._look_again_at: float | None = None
        self._told_in_use: set[str] = set()
        self._retries = UnprepareRetries(engine, notify=notify, monotonic=monotonic)
        self._sweeping = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = get_logger()

    def start(self) -> None:
        """Sweep now and then regularly, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)
        start_thread(self._thread)

    def stop(self, *, wait_seconds: float = 1.0) -> None:
        """End the thread; a sweep that waits for the API is left behind."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(wait_seconds)

    def request(self, _holder_uid: str = "") -> None:
        """Have a sweep happen soon: a claim was refused a device, and its holder may be gone."""
        self._wake.set()

    def sweep(self) -> SweepReport:
        """Do everything once. Never raises for one claim; an API that does not answer ends the claims' part."""
        report = SweepReport([], [], [])
        with self._sweeping:
            self._look_again_at = None
            try:
                self._find_orphans()
            except DraError as error:
                self._log.warning("sweep_incomplete", **error_fields(error))
            for part in (self._sweep_damaged, self._sweep_records, self._sweep_partitions):
                try:
                    part(report)
                except DraError as error:
                    report.api_answered = False
                    self._log.info("sweep_incomplete", **error_fields(error))
            self._sweep_files()
        report.released += self.retry_unprepares()
        self.restore_specs()
        return report

    def retry_unprepares(self) -> list[str]:
        """Try unprepares again that could not be finished, as far as they are due; give the UIDs that are done."""
        with self._sweeping:
            return self._retries.run()

    def restore_specs(self) -> int:
        """Write the CDI specs of prepared claims that somebody removed; how many."""
        restored = 0
        for record in self._engine.store.records():
            try:
                restored += self._engine.restore_spec(record)
            except DraError as error:
                self._log.warning(
                    "cdi_spec_not_restored", **{"claim": str(record.ref), **error_fields(error)}
                )
        return restored

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self.sweep()
            except Exception:  # marked border: the thread lives on
                self._log.exception("sweep_bug")
            self._pause()

    def _pause(self) -> None:
        """Wait for the next sweep."""
        seconds = min(SPEC_SECONDS, self._interval_seconds)
        for _ in range(round(self._interval_seconds / seconds)):
            if self._wake.wait(seconds):
                return
            try:
                self.restore_specs()
                self.retry_unprepares()
            except Exception:  # marked border: the thread lives on
                self._log.exception("sweep_bug")
            if self._look_again_at is not None and self._monotonic() >= self._look_again_at:
                return

    # -- records -----------------------------------------------------------------------------------------

    def _sweep_records(self, report: SweepReport) -> None:
        found: list[tuple[Record, Stale]] = []
        asked, failure = 0, None
        nameless = _ByUid(self._source)
        for record in self._engine.store.records():
            if self._stopping.is_set():
                return
            try:
                stale = judge_record(record, self._claim_of(record, nameless))
            except DraError as error:
                if _is_no_answer(error):
                    failure = error
                    break  # The next claim would only wait as long.
                self._log.warning("claim_not_judged", **{"claim": str(record.ref), **error_fields(error)})
                continue
            asked += 1
            if stale is not None:
                found.append((record, stale))
        many = _are_many(sum(not stale.patience_seconds for _, stale in found), asked)
        for record, stale in found:
            if self._is_due(record, stale, many=many):
                self._release(record, stale, report)
            else:
                report.waiting.append(record.ref.uid)
        if failure is not None:
            raise failure
        seen = {(record.ref.uid, stale.reason) for record, stale in found}
        damaged = self._engine.store.damaged()
        self._stale_since = {
            key: since for key, since in self._stale_since.items() if key in seen or key[0] in damaged
        }
        self._told_in_use &= {uid for uid, _ in self._stale_since}

    def _is_due(self, record: Record, stale: Stale, *, many: bool) -> bool:
        since = self._stale_since.setdefault((record.ref.uid, stale.reason), self._monotonic())
        seconds = self._monotonic() - since
        patience = max(stale.patience_seconds, self._confirm_seconds * (_MANY_TIMES if many else 1))
        if seconds < patience:
            if not stale.patience_seconds:
                again = since + patience
                self._look_again_at = min(again, self._look_again_at or again)
            return False
        if record.boot_id != self._engine.settings.boot_id or not self._device_in_use(record):
            return True
        uid = record.ref.uid
        if seconds < max(patience, stale.patience_seconds + self._grace_seconds):
            if uid not in self._told_in_use:
                self._told_in_use.add(uid)
                self._tell(record, "StaleClaimInUse", f"{stale.reason}, but processes still use its devices")
            return False
        self._tell(
            record, "StaleClaimInUse",
            f"{stale.reason} {seconds:.0f} s ago; its devices are released although processes still use them",
        )  # fmt: skip
        return True

    def _release(self, record: Record, stale: Stale, report: SweepReport) -> None:
        try:
            done = self._engine.unprepare_if(record.ref.uid, record, stale.reason)
        except DraError as error:
            report.waiting.append(record.ref.uid)
            self._log.warning("stale_claim_not_released", **{"claim": str(record.ref), **error_fields(error)})
            return
        if done:
            report.released.append(record.ref.uid)
            self._tell(
                record, "StaleClaimReleased", f"{stale.reason}; its devices are free again", warning=False
            )

    def _claim_of(self, record: Record, nameless: _ByUid) -> ClaimView | None:
        """Read a record's claim; None if there is none. Raises KubeError where the API gives no answer."""
        if record.ref.name:
            return self._read_claim(record.ref)
        # Taken over from NVIDIA's driver, whose checkpoint has the UID only.
        claim = nameless.get(record.ref.uid)
        if claim is None:
            return None
        view = self._parse(claim)
        self._engine.name_claim(record, view.ref)
        return view

    def _read_claim(self, ref: ClaimRef) -> ClaimView | None:
        """Read a claim; None if there is none. Raises KubeError where the API gives no answer."""
        try:
            claim = self._source.get(ref.namespace, ref.name, _API_SECONDS)
        except KubeError as error:
            if says_gone(error):
                return None
            raise
        return self._parse(claim)

    def _parse(self, claim: Mapping[str, Any]) -> ClaimView:
        return parse_claim(claim, driver=self._engine.settings.driver)

    # -- lost records and orphan specs -------------------------------------------------------------------

    def _find_orphans(self) -> None:
        """Note claims that have a CDI spec of ours but no record."""
        store = self._engine.store
        # Specs first: prepare writes the record before the spec, unprepare removes the spec before the record.
        specs = self._engine.cdi.uids()
        store.refresh(fully=True)
        known = {record.ref.uid for record in store.records()}
        known |= store.damaged().keys() | store.unreadable().keys()
        checkpoint: bytes | None = None
        for uid in specs - known:
            if checkpoint is None:
                path = self._engine.settings.state_dir / _NVIDIA_CHECKPOINT
                checkpoint = read_bytes(path) or b""
            # A claim that NVIDIA's driver prepared and that was not taken over.
            if uid.encode() in checkpoint:
                continue
            if self._engine.cdi.path(uid).exists() and store.get(uid) is None:
                store.mark_lost(uid, "there is a CDI file but no record")

    def _sweep_damaged(self, report: SweepReport) -> None:
        damaged = self._engine.store.damaged()
        if not damaged:
            return
        # By UID only: names in a damaged file are not to be trusted.
        claims = {}
        for claim in self._source.list(_API_SECONDS):
            uid = (claim.get("metadata") or {}).get("uid")
            if uid in damaged:
                claims[uid] = claim
        many = _are_many(len(damaged) - len(claims), len(damaged))
        for uid, damage in damaged.items():
            self._resolve(uid, damage, claims.get(uid), report=report, many=many)

    def _resolve(
        self, uid: str, damage: Damage, claim: Mapping[str, Any] | None, *, report: SweepReport, many: bool
    ) -> None:
        ref = damage.ref
        try:
            view = None if claim is None else self._parse(claim)
            if view is not None:
                ref = view.ref
            if view is not None and self._is_live(view):
                outcome = self._engine.prepare([view.ref])[uid]
                if isinstance(outcome, DraError):
                    raise outcome
                report.rebuilt.append(uid)
                self._notify(Notice(ref, "ClaimRecordRebuilt", "the lost record was rebuilt", warning=False))
            elif not self._is_due(
                _stand_in(damage, self._engine.settings),
                Stale("the claim of a lost record was deleted"),
                many=many,
            ):
                report.waiting.append(uid)
            elif self._engine.unprepare_if(uid, None, damage.reason):
                report.released.append(uid)
        except DraError as error:
            report.waiting.append(uid)
            self._log.warning(
                "lost_record_not_resolved", **{"claim": str(ref), "claim_uid": uid, **error_fields(error)}
            )

    def _is_live(self, view: ClaimView) -> bool:
        try:
            admit_claim(view, view.ref, pool=self._engine.settings.pool)
        except DraError:
            return False
        return bool(view.results)

    # -- partitions --------------------------------------------------------------------------------------

    def _sweep_partitions(self, _report: SweepReport) -> None:
        """Destroy partitions of lost records whose claims are gone too; the API is asked only if there are any."""
        orphans, modes = find_orphans(self._engine)
        if not orphans:
            self._orphans_since.clear()
            if modes:
                self._engine.release_partitions(())
            return
        settings = self._engine.settings
        claimed = {
            result.device
            for claim in self._source.list(_API_SECONDS)
            for result in self._parse(claim).results
            if result.pool == settings.pool
        }
        now = self._monotonic()
        since = {name: self._orphans_since.get(name, now) for name in orphans.keys() - claimed}
        self._orphans_since = since
        waiting = {name for name, at in since.items() if now - at < self._confirm_seconds}
        if waiting:
            again = min(since[name] for name in waiting) + self._confirm_seconds
            self._look_again_at = min(again, self._look_again_at or again)
        if since.keys() - waiting:
            self._engine.release_partitions(claimed | waiting)

    # -- files -------------------------------------------------------------------------------------------

    def _sweep_files(self) -> None:
        store, locks = self._engine.store, self._engine.locks
        leftovers: list[Path] = store.leftovers()
        removed = sum(remove_if_old(path, _LEFTOVER_SECONDS) for path in leftovers)
        removed += self._engine.marks.clear_old(older_than_seconds=_LEFTOVER_SECONDS)
        removed += self._engine.cdi.remove_leftovers(older_than_seconds=_LEFTOVER_SECONDS)
        known = {record.ref.uid for record in store.records()} | store.unreadable().keys()
        for name in locks.names("claim-"):
            if name.removeprefix("claim-") not in known:
                removed += locks.remove_unused(name)
        if removed:
            self._log.info("leftovers_removed", files=removed)

    def _tell(self, record: Record, reason: str, message: str, *, warning: bool = True) -> None:
        self._log.info(
            "stale_claim", claim=str(record.ref), claim_uid=record.ref.uid, reason=reason, text=message
        )
        self._notify(Notice(record.ref if record.ref.name else None, reason, message, warning=warning))


class _ByUid:
    """The claims of the API by UID, listed once, when the first is asked for."""

    def __init__(self, source: ClaimSource) -> None:
        self._source = source
        self._claims: dict[str, Mapping[str, Any]] | None = None

    def get(self, uid: str) -> Mapping[str, Any] | None:
        """Give a claim. Raises KubeError."""
        if self._claims is None:
            found = self._source.list(_API_SECONDS)
            self._claims = {str((claim.get("metadata") or {}).get("uid")): claim for claim in found}
        return self._claims.get(uid)


def _is_no_answer(error: DraError) -> bool:
    """Whether the API server said nothing about claims at all: each further question would end the same way."""
    return isinstance(error, KubeError) and (error.status == 0 or error.code == "DRA-API-NOT-SERVED")


def _are_many(gone: int, asked: int) -> bool:
    """Whether so many claims look gone at once that the API server may be the one that lost them."""
    return asked >= _MANY and 2 * gone > asked


def _stand_in(damage: Damage, settings: EngineSettings) -> Record:
    """Give a record with what is known of a lost one, to ask whether its devices are in use."""
    results = tuple(
        AllocatedDevice("", settings.driver, settings.pool, device, share_id=share)
        for device, share in damage.devices
    )
    return Record(damage.ref, "prepared", settings.boot_id, results=results)
