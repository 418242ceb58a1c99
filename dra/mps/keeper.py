"""The keeper: has the daemons run that are wanted, restarts those that die, and remembers all of it on disk.

It may be restarted at any moment: the daemons have sessions of their own and live on, and the next keeper finds them by
process id and start time. One lock for each daemon; nothing slow happens under the lock of the table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dra.errors import DeviceError, DraError, HostError
from dra.host.processes import Running
from dra.mps import table
from dra.mps.control import Control
from dra.mps.table import Content, Happening, Row
from dra.prepare.sharing.mps_folders import remove_folders
from dra.prepare.sharing.mps_model import TABLE_NAME, DaemonFolders, DaemonSpec, daemon_folders, mps_folder
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

_EVENTS_KEPT = 256
_LOOK_SECONDS = 0.2
# How long one call waits for another that works on the same daemon.
_LOCK_SECONDS = 40.0


@dataclass(slots=True)
class _Live:
    """What is known of a daemon beside its row. `busy`: somebody brings it back."""

    lock: threading.Lock
    running: Running | None = None
    since: float = 0.0
    busy: bool = False
    failures: int = 0


class Keeper:
    """See the module's text. Thread-safe; one for each state directory."""

    def __init__(
        self,
        state_dir: Path,
        control: Control,
        *,
        boot_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state_dir, self._control, self._boot_id = state_dir, control, boot_id
        self._table = mps_folder(state_dir) / TABLE_NAME
        self._clock = clock
        self._changed = threading.Condition()
        self._content = Content(boot_id)
        self._live: dict[str, _Live] = {}
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    # -- life --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the table, find the daemons again, and begin to watch them.

        Raises:
            HostError: the table cannot be read.
        """
        self._content = table.load(self._table, self._boot_id)
        for row in self._content.rows.values():
            running = Running.find(row.pid, row.started)
            self._live[row.spec.id] = _Live(threading.Lock(), running, self._clock())
            log.info("mps_daemon_found" if running else "mps_daemon_gone", daemon=row.spec.id, pid=row.pid)
        self._watcher = threading.Thread(target=self._watch, name="mps-watch", daemon=True)
        start_thread(self._watcher)

    def close(self) -> None:
        """Stop watching. The daemons run on."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._watcher is not None:
            self._watcher.join(2.0)
        for live in self._live.values():
            if live.running is not None:
                live.running.close()

    # -- calls of the plugin -------------------------------------------------------------------------

    def ensure(self, spec: DaemonSpec) -> dict[str, Any]:
        """Have a daemon run that is ready and has these limits. Nothing is left of one that cannot be had.

        Raises:
            DraError: see `Control.start`.
        """
        with self._locked(spec.id) as live:
            row = self._content.rows.get(spec.id)
            if row is not None and row.spec.needs_restart(spec):
                log.info("mps_daemon_replaced", daemon=spec.id, devices=spec.devices)
                self._end(live, spec.id)
                row = None
            if row is not None and live.running is not None and live.running.alive and row.ready:
                return self._adjust(row, spec, live.running)
            known = row is not None
            try:
                self._start(live, Row(spec, restarts=row.restarts if row else 0))
            except DraError:
                if not known:
                    self._forget(spec.id)
                raise
            if known:
                self._tell_restarted(spec, 0)
            return {"pid": live.running.pid if live.running else 0, "started": True}

    def status(self, daemon_id: str) -> dict[str, Any]:
        """Give what is known of a daemon."""
        row, live = self._content.rows.get(daemon_id), self._live.get(daemon_id)
        if row is None:
            return {"known": False}
        ready = row.ready and live is not None and live.running is not None and live.running.alive
        return {
            "known": True, "ready": ready, "pid": row.pid, "restarts": row.restarts, "daemon": row.spec.as_json(),
        }  # fmt: skip

    def stop(self, daemon_id: str) -> bool:
        """End a daemon and remove its files; whether it was known.

        Raises:
            DeviceError: DRA-MPS-DAEMON-STUCK: it cannot be ended.
            HostError: its files cannot be removed.
        """
        folders = self._folders(daemon_id)
        if daemon_id not in self._content.rows:
            remove_folders(folders)
            return False
        with self._locked(daemon_id) as live:
            self._end(live, daemon_id)
            self._forget(daemon_id)
        return True

    def all_daemons(self) -> list[dict[str, Any]]:
        """Give all daemons."""
        return [self.status(daemon_id) for daemon_id in tuple(self._content.rows)]

    def happenings(self, after: int | None, wait_seconds: float) -> tuple[list[Happening], int]:
        """Give what happened after a number, waiting for it if nothing did; and the last number.

        The number says that what is up to it was told. None: go on where the plugin before this one ended.
        """
        with self._changed:
            if after is not None and after > self._content.heard:
                self._content = replace(self._content, heard=min(after, self._content.last))
                self._save()
            start = self._content.heard if after is None else after

            def news() -> bool:
                return self._content.last > start or self._stopping.is_set()

            self._changed.wait_for(news, max(0.0, wait_seconds))
            found = [each for each in self._content.happenings if each.number > start]
            return found, self._content.last

    # -- work on one daemon ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, daemon_id: str) -> Iterator[_Live]:
        while True:
            with self._changed:
                live = self._live.setdefault(daemon_id, _Live(threading.Lock()))
            if not live.lock.acquire(timeout=_LOCK_SECONDS):
                raise DeviceError(
                    "DRA-MPS-DAEMON-BUSY",
                    f"MPS daemon {daemon_id} is being started or ended for long",
                    remedy="The call is retried by itself.",
                    retryable=True,
                    daemon=daemon_id,
                )
            if self._live.get(daemon_id) is live:
                break
            live.lock.release()  # it was forgotten while this call waited
        try:
            yield live
        finally:
            with self._changed:
                if daemon_id not in self._content.rows and self._live.get(daemon_id) is live:
                    del self._live[daemon_id]
            live.lock.release()

    def _start(self, live: _Live, row: Row) -> None:
        folders = self._folders(row.spec.id)
        self._put(replace(row, pid=0, started=0, ready=False))

        def started(running: Running) -> None:
            self._put(replace(row, pid=running.pid, started=running.started, ready=False))

        live.running = None
        running = self._control.start(row.spec, folders, started=started)
        live.running, live.since = running, self._clock()
        self._put(replace(row, pid=running.pid, started=running.started, ready=True))
        log.info("mps_daemon_started", daemon=row.spec.id, pid=running.pid, devices=row.spec.devices)

    def _adjust(self, row: Row, spec: DaemonSpec, running: Running) -> dict[str, Any]:
        folders = self._folders(spec.id)
        if spec != row.spec:
            if spec.commands() != row.spec.commands():
                self._control.set_limits(spec, folders)
            self._put(replace(row, spec=spec))
        return {"pid": running.pid, "started": False}

    def _end(self, live: _Live, daemon_id: str) -> None:
        """End the process. Its row stays."""
        running, live.running = live.running, None
        row = self._content.rows.get(daemon_id)
        if running is None and row is not None:
            running = Running.find(row.pid, row.started)
        if running is not None and not self._control.stop(running, self._folders(daemon_id)):
            live.running = running
            raise DeviceError(
                "DRA-MPS-DAEMON-STUCK",
                f"MPS daemon {daemon_id} (process {running.pid}) cannot be ended: it hangs in the driver",
                remedy="Look for 'NVRM' in the kernel log (dmesg); drain and reboot the node. The call is retried by itself.",
                retryable=True,
                daemon=daemon_id,
            )
        log.info("mps_daemon_ended", daemon=daemon_id)

    def _forget(self, daemon_id: str) -> None:
        remove_folders(self._folders(daemon_id))
        with self._changed:
            self._content = self._content.without(daemon_id)
            self._save()

    # -- watching --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            for daemon_id, live in tuple(self._live.items()):
                if live.busy or live.lock.locked() or daemon_id not in self._content.rows:
                    continue
                if live.running is None or not live.running.alive:
                    live.busy = True
                    try:
                        start_thread(
                            threading.Thread(
                                target=self._bring_back,
                                args=(daemon_id, live),
                                name="mps-restart",
                                daemon=True,
                            )
                        )
                    except HostError as error:
                        live.busy = False
                        log.warning("mps_restart_failed", daemon=daemon_id, **error_fields(error))

    def _bring_back(self, daemon_id: str, live: _Live) -> None:
        """Restart a daemon until it runs, or nobody wants it any more."""
        pause = self._control.timings.first_back_off
        if live.running is None or self._clock() - live.since >= self._control.timings.steady:
            pause = 0.0
        try:
            while not self._stopping.wait(pause):
                with live.lock:
                    row = self._content.rows.get(daemon_id)
                    if row is None or self._live.get(daemon_id) is not live:
                        return
                    if live.running is not None and live.running.alive:
                        return  # a call of the plugin was quicker
                    if self._restart_once(live, row):
                        return
                timings = self._control.timings
                pause = min(max(pause, timings.first_back_off / 2) * 2, timings.longest_back_off)
        except Exception:  # marked border: the thread's end must not be the last of the daemon
            log.exception("mps_restart_bug", daemon=daemon_id)
            self._stopping.wait(1.0)
        finally:
            live.busy = False

    def _restart_once(self, live: _Live, row: Row) -> bool:
        died = live.running
        if died is not None:
            # Servers and clients' contexts are worth nothing without it, and in the way of the next one.
            Control.end(died)
        log.warning("mps_daemon_died", daemon=row.spec.id, pid=row.pid)
        try:
            self._start(live, replace(row, restarts=row.restarts + 1))
        except DraError as error:
            live.running = None
            live.failures += 1
            log.warning("mps_restart_failed", daemon=row.spec.id, **error_fields(error))
            if live.failures == 1:
                self._tell(
                    row.spec.id,
                    "MpsDaemonFailed",
                    f"the MPS control daemon of {', '.join(row.spec.devices)} has ended and cannot be started again yet: "
                    f"{error}",
                )
            return False
        live.failures = 0
        self._tell_restarted(row.spec, row.pid)
        return True

    def _tell_restarted(self, spec: DaemonSpec, old_pid: int) -> None:
        which = f" (process {old_pid})" if old_pid else ""
        self._tell(
            spec.id,
            "MpsDaemonRestarted",
            f"the MPS control daemon of {', '.join(spec.devices)}{which} has ended and was started again with the same "
            "limits; processes that used it have lost their CUDA contexts: restart containers that report errors",
        )

    def _tell(self, daemon_id: str, reason: str, message: str) -> None:
        with self._changed:
            number = self._content.last + 1
            kept = (*self._content.happenings, Happening(number, daemon_id, reason, message))[-_EVENTS_KEPT:]
            self._content = replace(self._content, happenings=kept, last=number)
            self._save()
            self._changed.notify_all()

    # -- the table -------------------------------------------------------------------------------------

    def _put(self, row: Row) -> None:
        with self._changed:
            self._content = self._content.with_row(row)
            # A daemon that nobody could find again must not be started.
            table.save(self._table, self._content)

    def _save(self) -> None:
        try:
            table.save(self._table, self._content)
        except HostError as error:
            log.warning("mps_table_not_saved", **error_fields(error))

    def _folders(self, daemon_id: str) -> DaemonFolders:
        return daemon_folders(self._state_dir, daemon_id)
