"""Preparing and unpreparing claims: the kubelet's two calls, as a reconcile.

Each claim of a call is on its own: it fails or succeeds, waits and hangs without the others. For one claim: read
it from the API, outside of any lock; take the locks of the claim and of its GPUs; look whether the record is still
the one that was seen; plan; make the node match. Unprepare needs the record only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from dra.api.claim import AllocatedDevice, ClaimRef, ClaimView, admit_claim, parse_claim
from dra.errors import BugError, DraError, HostError, StackError
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, parse_device_name
from dra.prepare import steps
from dra.prepare.cdi_files import CdiFiles
from dra.prepare.devices import MigView
from dra.prepare.effects import Effect, EffectCatalog, WriteCdi
from dra.prepare.fetch import ClaimFetcher
from dra.prepare.holds import lock_name
from dra.prepare.imports import CHECKPOINT, revive_foreign_mps, stands_as_imported, take_over
from dra.prepare.journal import Journal, only_spec
from dra.prepare.locks import LockDirectory, hold_shared
from dra.prepare.metadata import pod_claim_of
from dra.prepare.mig_effects import mig_effects
from dra.prepare.mig_marks import MarkDirectory
from dra.prepare.mig_orphans import release_orphans
from dra.prepare.model import (
    Notice,
    PreparedDevice,
    PrepareOutcome,
    check_uid,
    is_safe_uid,
)
from dra.prepare.partitions import DEVICE_KIND, MadePartition, looks_at, made_partitions
from dra.prepare.plan import Plan, lacks_device, plan_prepare
from dra.prepare.record import Record
from dra.prepare.setup import MIG_WORK_SECONDS, WORK_SECONDS, EnginePorts, EngineSettings
from dra.prepare.sharing.model import OpenEffect, SharingContext, open_effects
from dra.prepare.store import Damage, RecordStore
from dra.prepare.timing import API, APPLY, LOCK, PLAN, RENDER, timed
from dra.prepare.workers import WorkerPool
from dra.slices.sharing import identity_of
from dra.telemetry.log import error_fields, get_logger

__all__ = ["Engine", "EnginePorts", "EngineSettings"]

T = TypeVar("T")
# How often a record may change under a call before that is an error.
_ROUNDS = 5


class _Attempt:
    """A prepare under way; `stale` once an unprepare of its claim ended in the meantime."""

    def __init__(self) -> None:
        self.stale = False


class Engine:
    """Prepares and unprepares claims. Thread-safe; a second process on the same directories is expected."""

    def __init__(self, settings: EngineSettings, ports: EnginePorts) -> None:
        self._settings = settings
        self._ports = ports
        self.cdi = CdiFiles(settings.cdi_root, driver=settings.driver)
        self.store = RecordStore(
            settings.state_dir / "claims", report=self._report_damage, salvage=self.cdi.devices
        )
        self.locks = LockDirectory(settings.state_dir / "locks")
        self.marks = MarkDirectory(settings.state_dir, boot_id=settings.boot_id)
        catalog = EffectCatalog(
            {
                WriteCdi.kind: lambda args: WriteCdi.revive(args, files=self.cdi),
                **({} if ports.mig is None else mig_effects(ports.mig, self.marks)),
                "nvidia-mps": lambda args: revive_foreign_mps(
                    args, settings.state_dir, ports.delete_deployment
                ),
                **ports.effects,
                **({} if ports.metadata is None else ports.metadata.effects()),
            }
        )
        self._knows = catalog.knows
        self._journal = Journal(self.store, catalog, boot_id=settings.boot_id, step=ports.step)
        self._fetcher = ClaimFetcher(
            ports.source,
            deadline_seconds=settings.api_deadline_seconds,
            record_wait_seconds=settings.record_wait_seconds,
        )
        # Each verb has threads of its own: an API that hangs holds up prepares, which must not keep pods from ending.
        self._preparing = WorkerPool("claim", limit=settings.parallel_claims)
        self._unpreparing = WorkerPool("claim-end", limit=settings.parallel_claims)
        self._mutex = threading.Lock()
        self._attempts: dict[str, set[_Attempt]] = {}
        self._opened = False
        self._log = get_logger()

    @property
    def settings(self) -> EngineSettings:
        """What the engine was made with."""
        return self._settings

    def inventory(self) -> Inventory:
        """Give the hardware as of the last look."""
        return self._ports.inventory()

    def partitions(self) -> tuple[MadePartition, ...]:
        """Give the partitions that were made for claims, or may have been, in this boot."""
        return made_partitions(self.store.records(), self._settings.boot_id)

    def open(self) -> None:
        """Make the directories, read the records, and remove the CDI specs of an earlier boot.

        A disk that refuses does not stop the driver: it is logged, and tried again at each call.
        """
        try:
            self._open()
        except HostError as error:
            self._log.error("state_not_readable", **error_fields(error))

    def prepare(
        self, refs: Sequence[ClaimRef], *, within_seconds: float | None = None
    ) -> dict[str, PrepareOutcome]:
        """Prepare claims; give each UID its devices, or what is wrong. Never raises for one of them.

        Args:
            refs: the claims.
            within_seconds: how long the caller waits. A claim whose GPU is not free in time for that is refused while
                somebody still listens. What has begun is brought to its end, so that the next call finds it done.

        Source: NodePrepareResources of KEP-4381: each UID has an entry, the second answer is as the first.
        """
        give_up_at = None if within_seconds is None else time.monotonic() + within_seconds
        return self._each(refs, lambda ref: self._prepare(ref, give_up_at), pool=self._preparing)

    def unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, DraError | None]:
        """Unprepare claims; give each UID None or what is wrong. Unknown claims are fine. No API, no NVML."""
        return self._each(refs, self._unprepare, pool=self._unpreparing)

    def unprepare_if(
        self, uid: str, expected: Record | None, reason: str, *, wait_seconds: float = 0.5
    ) -> bool:
        """Unprepare a claim unless its record is no longer `expected`; whether it was done.

        Raises:
            DraError: what keeps it from being unprepared.
        """
        ref = expected.ref if expected is not None else ClaimRef("", "", uid)
        with self._locked(ref, _gpus_of(expected), "clean-up", wait_seconds):
            self.store.refresh()
            if self.store.get(uid) != expected:
                return False
            self._take_down(ref, expected)
        self._log.info("claim_released", claim=str(ref), claim_uid=uid, reason=reason)
        return True

    def name_claim(self, expected: Record, ref: ClaimRef, *, wait_seconds: float = 0.5) -> None:
        """Write down what a claim is called of which only the UID was known, unless its record changed meanwhile."""
        with self._locked(expected.ref, _gpus_of(expected), "naming", wait_seconds):
            self.store.refresh()
            if self.store.get(ref.uid) == expected:
                self.store.put(replace(expected, ref=ref), fsync=False)

    def restore_spec(self, expected: Record, *, wait_seconds: float = 0.5) -> bool:
        """Write the CDI spec of a prepared claim again if it is gone; whether that was needed. No API.

        No prepare call does it: the kubelet makes none for a container that it restarts, nor for the second pod
        of a claim. Nothing is done if the record is no longer `expected`.

        Raises:
            DraError: what keeps it from being written.
        """
        ref = expected.ref
        if self.cdi.path(ref.uid).exists() or not expected.is_complete(self._settings.boot_id):
            return False
        view = _view_of(expected)
        inventory = self._inventory_for(view)
        with self._locked(ref, _gpus_of(expected), "restoring", wait_seconds):
            self.store.refresh()
            if self.store.get(ref.uid) != expected or self.cdi.path(ref.uid).exists():
                return False
            self._bring_about(ref, view, inventory, expected)
        self._log.warning("cdi_spec_restored", claim=str(ref), claim_uid=ref.uid)
        self._ports.notify(
            Notice(
                ref, "CdiSpecRestored", "its CDI file was gone and was written again; containers that start find it",
                consumers=expected.consumers,
            )
        )  # fmt: skip
        return True

    def release_partitions(self, claimed: Collection[str], *, wait_seconds: float = 0.5) -> list[str]:
        """Destroy partitions of ours that no record tells of, nor any of the `claimed` devices; give their names."""
        if self._ports.mig is None:
            return []
        gone = release_orphans(self, self._ports.mig, claimed, wait_seconds=wait_seconds)
        if gone:
            self._ports.layout_changed()
        return gone

    # -- prepare -----------------------------------------------------------------------------------------

    def _prepare(self, ref: ClaimRef, give_up_at: float | None) -> PrepareOutcome:
        began = time.monotonic()
        try:
            check_uid(ref)
            self._open()
            devices = self._prepare_in_rounds(ref, give_up_at)
        except Exception as error:  # marked border: one claim's failure is its own
            problem = self._as_dra_error(error, "prepare", ref)
            self._log.warning(
                "claim_prepare_failed", claim=str(ref), claim_uid=ref.uid, duration_ms=_ms_since(began),
                **_without_claim(error_fields(problem)),
            )  # fmt: skip
            return problem
        self._log.info(
            "claim_prepared", claim=str(ref), claim_uid=ref.uid, duration_ms=_ms_since(began),
            devices=[device.device for device in devices],
        )  # fmt: skip
        return devices

    def _prepare_in_rounds(self, ref: ClaimRef, give_up_at: float | None) -> tuple[PreparedDevice, ...]:
        attempt = _Attempt()
        with self._mutex:
            self._attempts.setdefault(ref.uid, set()).add(attempt)
        try:
            for _ in range(_ROUNDS):
                attempt.stale = False
                seen = self.store.get(ref.uid)
                with timed(self._ports.timing, API):
                    view = self._view(ref, seen)
                if not view.results:
                    return ()
                inventory = self._inventory_for(view)
                gpus = [lock_name(r.device) for r in view.results if not r.admin_access]
                with self._locked(ref, gpus, "prepare", self._lock_wait(view.results, give_up_at)):
                    self.store.refresh()
                    if attempt.stale or self.store.get(ref.uid) != seen:
                        # Prepared or unprepared by another call while this one waited: look again.
                        continue
                    return self._bring_about(ref, view, inventory, seen)
        finally:
            with self._mutex:
                left = self._attempts[ref.uid]
                left.discard(attempt)
                if not left:
                    del self._attempts[ref.uid]
        raise HostError(
            "DRA-CLAIM-BUSY",
            f"claim {ref} was prepared and unprepared by others again and again",
            remedy="The call is retried by itself.",
            claim_uid=ref.uid,
        )

    def _view(self, ref: ClaimRef, record: Record | None) -> ClaimView:
        if record is not None and record.is_complete(self._settings.boot_id):
            claim = self._fetcher.fetch_if_quick(ref)
            if claim is None:
                self._log.info("claim_served_from_record", claim=str(ref), claim_uid=ref.uid)
                return _view_of(record)
        else:
            claim = self._fetcher.fetch(ref)
        view = parse_claim(claim, driver=self._settings.driver)
        admit_claim(view, ref, pool=self._settings.pool)
        return view

    def _inventory_for(self, view: ClaimView) -> Inventory:
        inventory = self._ports.inventory()
        if self._ports.fresh_inventory is not None and lacks_device(view, inventory):
            return self._ports.fresh_inventory()
        return inventory

    def _bring_about(
        self, ref: ClaimRef, view: ClaimView, inventory: Inventory, previous: Record | None
    ) -> tuple[PreparedDevice, ...]:
        boot_id = self._settings.boot_id
        # Who holds its devices already is not asked again: a lost record that may hold them too must not end it.
        holder = previous is not None and previous.is_complete(boot_id) and previous.results == view.results
        if previous is not None and holder and stands_as_imported(previous, self.cdi.path(ref.uid)):
            return previous.devices
        began = time.perf_counter()
        try:
            plan = plan_prepare(
                view,
                inventory=inventory,
                holds=() if holder else self.store.holds(boot_id),
                cdi_kind=self.cdi.kind,
                strategies=self._ports.strategies,
                mig=self._mig_view(view, inventory),
                sharing=SharingContext(ref, self._open_effects),
                settings=self._ports.settings(),
                holder=holder,
                shares=self._ports.shares,
            )
        except DraError as error:
            if (rival := error.fields.get("holder_uid")) is not None:
                self._ports.conflict(str(rival))
            if isinstance(error, StackError) and previous is not None and holder and self._stands(previous):
                # No driver answers, it may be replaced at this moment. That takes nothing from containers that run.
                self._log.warning(
                    "claim_answered_as_prepared", claim=str(ref), claim_uid=ref.uid,
                    **_without_claim(error_fields(error)),
                )  # fmt: skip
                return previous.devices
            raise
        self._ports.timing(PLAN, time.perf_counter() - began)
        for text in plan.warnings:
            self._log.warning("config_ignored", claim=str(ref), claim_uid=ref.uid, reason=text)
        self._ports.step(steps.PLANNED)
        path = self.cdi.path(ref.uid)
        spec = WriteCdi(path, files=self.cdi, uid=ref.uid, content=lambda: self._render(ref.uid, plan))
        metadata, devices = (
            ((), plan.devices) if self._ports.metadata is None else self._ports.metadata.add(view, plan)
        )
        effects: list[Effect] = [*plan.effects, *metadata, spec]
        wanted = Record(
            ref=ref,
            state="preparing",
            boot_id=self._settings.boot_id,
            results=view.results,
            configs=view.configs,
            consumers=view.reserved_for,
            devices=devices,
            cdi_file=str(path),
        )
        try:
            with timed(self._ports.timing, APPLY):
                return self._journal.carry_out(wanted, effects, previous=previous).devices
        finally:
            if any(not effect.was_there for effect in plan.made.values()):
                self._ports.layout_changed()

    def _stands(self, record: Record) -> bool:
        """Whether what was prepared is there as far as files tell, where the driver cannot be asked."""
        if any(entry.state != "applied" for entry in record.journal if entry.kind != WriteCdi.kind):
            return False
        spec = self.cdi.content(record.ref.uid, sha256=record.cdi_sha256)
        return spec is not None and not self._ports.renderer.missing_files(spec)

    def _open_effects(self) -> Sequence[OpenEffect]:
        self.store.refresh()
        return open_effects(self.store.records(), self._settings.boot_id)

    def _mig_view(self, view: ClaimView, inventory: Inventory) -> MigView:
        """Look at the claim's MIG devices. Costs nothing for a claim of whole GPUs."""
        if not any(_is_mig(result) for result in view.results):
            return MigView()
        boot_id = self._settings.boot_id
        self.store.refresh()
        devices = [result.device for result in view.results if _is_mig(result)]
        minors = {lock_name(device) for device in devices}
        gpus = [gpu.uuid for gpu in inventory.gpus if f"gpu-{gpu.minor}" in minors]
        return MigView(
            control=self._ports.mig,
            may_create=self._settings.create_partitions or self._any_dynamic(view, inventory),
            looks=looks_at(devices, inventory, self._ports.mig),
            journal=tuple(
                entry for record in self.store.records() if record.holds(boot_id) for entry in record.journal
            ),
            marks=self.marks.read_of(devices, gpus),
            directory=self.marks,
        )

    def _any_dynamic(self, view: ClaimView, inventory: Inventory) -> bool:
        """Whether a policy says of one of the claim's GPUs that its partitions are made on demand."""
        locks = {lock_name(result.device) for result in view.results}
        settings = self._ports.settings()
        return any(
            settings.of(identity_of(gpu)).mig.mode == "dynamic"
            for gpu in inventory.gpus
            if lock_name(str(GpuName(gpu.minor))) in locks
        )

    def _render(self, uid: str, plan: Plan) -> Mapping[str, Any]:
        with timed(self._ports.timing, RENDER):
            return self._ports.renderer.render(
                uid, plan.complete_targets(), driver_version=plan.driver_version
            )

    # -- unprepare ---------------------------------------------------------------------------------------

    def _unprepare(self, ref: ClaimRef) -> DraError | None:
        if not is_safe_uid(ref.uid):
            return None  # Such a claim was never prepared.
        began = time.monotonic()
        try:
            if not self._opened and (self._settings.state_dir / CHECKPOINT).exists():
                self._open()  # else a claim that NVIDIA's driver prepared would pass for an unknown one
            known = self._unprepare_in_rounds(ref)
        except Exception as error:  # marked border: one claim's failure is its own
            problem = self._as_dra_error(error, "unprepare", ref)
            self._log.warning(
                "claim_unprepare_failed", claim=str(ref), claim_uid=ref.uid, duration_ms=_ms_since(began),
                **_without_claim(error_fields(problem)),
            )  # fmt: skip
            return problem
        self._log.info(
            "claim_unprepared", claim=str(ref), claim_uid=ref.uid, duration_ms=_ms_since(began), known=known
        )
        return None

    def _unprepare_in_rounds(self, ref: ClaimRef) -> bool:
        for _ in range(_ROUNDS):
            seen = self.store.get(ref.uid)
            try:
                with self._locked(
                    ref, _gpus_of(seen), "unprepare", self._lock_wait(seen.results if seen else ())
                ):
                    if self.store.get(ref.uid) != seen:
                        continue
                    return self._take_down(ref, seen)
            except HostError as error:
                # Where no lock can be had because nothing can be written, an unknown claim is still fine.
                if error.code == "DRA-LOCK-TIMEOUT" or self._is_known(ref.uid):
                    raise
                return False
        raise HostError(
            "DRA-CLAIM-BUSY",
            f"claim {ref} was prepared and unprepared by others again and again",
            remedy="The call is retried by itself.",
            claim_uid=ref.uid,
        )

    def _take_down(self, ref: ClaimRef, record: Record | None) -> bool:
        """Undo a claim under its locks; whether there was anything. The CDI spec goes before the devices are free."""
        self._ports.step(steps.UNPREPARE_PLANNED)
        known = record is not None or self._is_known(ref.uid)
        if record is not None:
            record = self._mark(record)
            self._ports.step(steps.RECORD_MARKED)
            try:
                self._journal.undo(record)
            finally:
                if any(entry.kind == DEVICE_KIND for entry in record.journal):
                    self._ports.layout_changed()
        # Also what no record tells of: a lost record's spec.
        self.cdi.remove(self.cdi.path(ref.uid))
        # Not fsynced: after a power failure the record is one of an earlier boot, which holds nothing.
        self.store.remove(ref.uid, fsync=False)
        self._ports.step(steps.RECORD_REMOVED)
        with self._mutex:
            for attempt in self._attempts.get(ref.uid, ()):
                attempt.stale = True
        return known

    def _mark(self, record: Record) -> Record:
        if record.state == "unpreparing" or only_spec(record):
            # With nothing to undo but the spec there is no half way: a record without spec is what a crash leaves
            # between the two removals. The next unprepare removes it, a prepare writes the spec again.
            return record
        marked = replace(record, state="unpreparing")
        try:
            self.store.put(marked, fsync=False)
        except HostError as error:
            # A full disk must not keep devices from being freed; undoing again does no harm.
            self._log.warning("record_not_marked", claim_uid=record.ref.uid, **error_fields(error))
        return marked

    # -- both --------------------------------------------------------------------------------------------

    def _lock_wait(self, results: Sequence[AllocatedDevice], give_up_at: float | None = None) -> float:
        """Give how long a claim waits for its locks: so that there is still time to make what it needs."""
        settings = self._settings
        wait, work = settings.lock_wait_seconds, WORK_SECONDS
        if any(_is_mig(result) for result in results):
            wait, work = max(wait, settings.mig_lock_wait_seconds), MIG_WORK_SECONDS
        if give_up_at is None:
            return wait
        return max(0.0, min(wait, give_up_at - work - time.monotonic()))

    def _is_known(self, uid: str) -> bool:
        return (
            uid in self.store.damaged()
            or uid in self.store.unreadable()
            or any(path.exists() for path in (self.store.path(uid), self.cdi.path(uid)))
        )

    @contextlib.contextmanager
    def _locked(self, ref: ClaimRef, gpus: Sequence[str], verb: str, wait_seconds: float) -> Iterator[None]:
        what = f"the {verb} of claim {ref}"
        began = time.monotonic()
        # NVIDIA's plugin takes this one alone: the two never work at the same time during a change-over.
        with hold_shared(self._settings.state_dir / "pu.lock", what=what, wait_seconds=wait_seconds):
            left = max(0.0, wait_seconds - (time.monotonic() - began))
            with self.locks.hold([f"claim-{ref.uid}", *gpus], what=what, wait_seconds=left):
                if verb == "prepare":
                    self._ports.timing(LOCK, time.monotonic() - began)
                try:
                    yield
                finally:
                    if not self.store.path(ref.uid).exists():
                        self.locks.remove(f"claim-{ref.uid}")

    def _open(self) -> None:
        if self._opened:
            return
        self.locks.make()
        self.store.open()
        take_over(self._settings, self.store, self.cdi, knows=self._knows, step=self._ports.step)
        for record in self.store.records():
            if record.boot_id != self._settings.boot_id:
                # Device numbers may have changed. The kubelet prepares again what still runs here.
                self.cdi.remove(self.cdi.path(record.ref.uid))
        self._opened = True

    def _each(
        self, refs: Sequence[ClaimRef], call: Callable[[ClaimRef], T], *, pool: WorkerPool
    ) -> dict[str, T]:
        """Call for each claim at once; one after the other where the system gives no threads."""
        wanted = list({ref.uid: ref for ref in refs}.values())
        alone = wanted[:1]
        futures: dict[str, Future[T]] = {}
        for ref in wanted[1:]:
            try:
                futures[ref.uid] = pool.submit(lambda ref=ref: call(ref))  # type: ignore[misc]
            except HostError:
                alone.append(ref)
        outcomes = {ref.uid: call(ref) for ref in alone}
        return {**outcomes, **{uid: future.result() for uid, future in futures.items()}}

    def _as_dra_error(self, error: Exception, verb: str, ref: ClaimRef) -> DraError:
        if isinstance(error, DraError):
            return error
        self._log.error("claim_bug", claim=str(ref), claim_uid=ref.uid, exc_info=error)
        return BugError(
            "DRA-BUG",
            f"the {verb} of claim {ref} met a bug: {type(error).__name__}: {error}",
            remedy="Report it with the plugin's log.",
            retryable=True,
            claim_uid=ref.uid,
        )

    def _report_damage(self, damage: Damage) -> None:
        self._ports.notify(
            Notice(
                damage.ref if damage.ref.name else None,
                "ClaimRecordLost",
                f"the record of claim UID {damage.ref.uid} was lost ({damage.reason}); "
                "it is rebuilt, until then its devices count as held",
            )
        )


def _view_of(record: Record) -> ClaimView:
    """Give the claim as it was when it was prepared."""
    return ClaimView(
        record.ref, True, record.results, record.configs,
        reserved_for=record.consumers, pod_claim_name=pod_claim_of(record),
    )  # fmt: skip


def _gpus_of(record: Record | None) -> list[str]:
    if record is None:
        return []
    return [lock_name(result.device) for result in record.results if not result.admin_access]


def _is_mig(result: AllocatedDevice) -> bool:
    return isinstance(parse_device_name(result.device), MigName)


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 2)


def _without_claim(fields: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in fields.items() if key not in ("claim", "claim_uid")}
