"""Releasing what nobody will unprepare, and removing what nobody needs.

The kubelet does not unprepare after a node was lost, a pod force-deleted while the driver was down, or a reboot.
The janitor compares the records with the API at start, every half minute and on request. It changes a claim only
through the engine, under the claim's lock, and only if the record is the one that it judged. What it looks for is in
`dra.prepare.sweep`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dra.errors import DraError
from dra.prepare.engine import Engine
from dra.prepare.model import ClaimSource, Notify, no_notice
from dra.prepare.record import Record
from dra.prepare.sweep.claims import Claims
from dra.prepare.sweep.leftovers import HalfWritten, sweep_files, sweep_hardware
from dra.prepare.sweep.lost import LostRecords, note_orphan_specs
from dra.prepare.sweep.patience import CONFIRM_SECONDS, IN_USE_GRACE_SECONDS, Patience, Waits
from dra.prepare.sweep.report import SweepReport, teller
from dra.prepare.sweep.retries import UnprepareRetries
from dra.prepare.sweep.stale import StaleRecords
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

INTERVAL_SECONDS = 30.0
# How often it is looked whether the CDI specs are there: containers that start in between fail, and are tried again.
SPEC_SECONDS = 5.0


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
        self._interval_seconds = interval_seconds
        self._claims = claims = Claims(source, driver=engine.settings.driver)
        tell = teller(notify)
        self._patience = patience = Patience(
            engine.settings.boot_id,
            Waits(confirm_seconds, grace_seconds, monotonic),
            device_in_use=device_in_use,
            tell=tell,
        )
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._stale = StaleRecords(engine, claims, patience, tell=tell, stopping=self._stopping.is_set)
        self._lost = LostRecords(engine, claims, patience, notify=notify)
        self._retries = UnprepareRetries(engine, notify=notify, monotonic=monotonic)
        self._half_written = HalfWritten(monotonic)
        self._sweeping = threading.Lock()
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
        report = SweepReport()
        with self._sweeping:
            self._patience.begin()
            try:
                note_orphan_specs(self._engine)
            except DraError as error:
                self._log.warning("sweep_incomplete", **error_fields(error))
            for part in (self._lost.sweep, self._stale.sweep, self._sweep_hardware):
                try:
                    part(report)
                except DraError as error:
                    report.api_answered = False
                    self._log.info("sweep_incomplete", **error_fields(error))
            sweep_files(self._engine, self._half_written)
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
            if self._patience.is_time_to_look_again():
                return

    def _sweep_hardware(self, _report: SweepReport) -> None:
        sweep_hardware(self._engine, self._claims, self._patience)
