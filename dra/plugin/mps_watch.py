"""What the plugin hears of the MPS keeper: daemons that died and came back, a keeper that is gone, daemons of nobody.

One thread, from the first claim with a daemon on. Another instance of the plugin may do the same at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dra.errors import DraError
from dra.prepare.engine import Engine
from dra.prepare.model import Notice, Notify
from dra.prepare.record import Record
from dra.prepare.sharing.keeper_client import ABSENT, KeeperClient
from dra.prepare.sharing.mps import KIND
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop

log = get_logger()

# One question waits so long for news.
POLL_SECONDS = 25.0
RETRY_SECONDS = 2.0
# A keeper that is gone for longer than a restart takes is told of.
PATIENCE_SECONDS = 10.0
# How often daemons are compared with the records.
SWEEP_SECONDS = 300.0


class MpsWatch:
    """Hears the keeper. `begin` may be called from any thread, any number of times."""

    def __init__(
        self,
        keeper: KeeperClient,
        engine: Engine,
        notify: Notify,
        *,
        poll_seconds: float = POLL_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        sweep_seconds: float = SWEEP_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper, self._engine, self._notify = keeper, engine, notify
        self._poll_seconds, self._retry_seconds = poll_seconds, retry_seconds
        self._patience_seconds, self._sweep_seconds = patience_seconds, sweep_seconds
        self._monotonic = monotonic
        self._loop = Loop("mps-watch", self.hear, seconds=retry_seconds)
        # The number of the last news; None: where the instance before this one ended.
        self._last: int | None = None
        self._absent_since: float | None = None
        self._told_absent = False
        self._sweep_at = 0.0

    def begin(self) -> None:
        """Hear from now on. A system without threads is no reason to fail: the next call tries again."""
        self._loop.begin()

    def begin_if_needed(self) -> None:
        """Hear, if a claim has a daemon: of an instance before this one."""
        if self._users():
            self.begin()

    def stop(self, *, timeout_seconds: float = 0.0) -> bool:
        """End it; a question that waits longer is left behind. Whether the thread is gone."""
        return self._loop.stop(timeout_seconds=timeout_seconds)

    def hear(self) -> float:
        """Ask once, and tell what there is to tell; give after how many seconds to ask again."""
        try:
            if self._monotonic() >= self._sweep_at:
                self.sweep()
                self._sweep_at = self._monotonic() + self._sweep_seconds
            events, last = self._keeper.events(self._last, wait_seconds=self._poll_seconds)
        except DraError as error:
            self._no_answer(error)
            return self._retry_seconds
        if self._absent_since is not None:
            # A keeper that was gone may be another one, with another table.
            self._absent_since, self._told_absent, self._sweep_at = None, False, 0.0
        for event in events:
            log.warning("mps_daemon_news", daemon=event.daemon, reason=event.reason, text=event.message)
            for record in self._users().get(event.daemon, ()):
                self._notify(Notice(record.ref, event.reason, event.message))
        self._last = last
        return 0.0

    def sweep(self) -> None:
        """End daemons of nobody, and have those come back that a claim has and the keeper does not know.

        Raises:
            DraError: the keeper does not answer.
        """
        # Daemons first: a claim's record is there before its daemon is.
        known = {status.spec.id for status in self._keeper.list()}
        store = self._engine.store
        store.refresh(fully=True)
        unknown = store.damaged().keys() | store.unreadable().keys()
        users = self._users()
        for daemon_id in known - users.keys():
            if unknown and (
                daemon_id.startswith("card-") or any(daemon_id.startswith(uid) for uid in unknown)
            ):
                continue  # a record that cannot be read may have it
            log.warning("mps_daemon_of_nobody", daemon=daemon_id)
            self._keeper.stop(daemon_id)
        for daemon_id in users.keys() - known:
            for record in users[daemon_id]:
                if record.is_complete(self._engine.settings.boot_id):
                    log.warning("mps_daemon_unknown_to_keeper", daemon=daemon_id, claim=str(record.ref))
                    self._engine.prepare([record.ref])

    def _no_answer(self, error: DraError) -> None:
        now = self._monotonic()
        if self._absent_since is None:
            self._absent_since = now
            log.warning("mps_keeper_not_heard", **error_fields(error))
        if self._told_absent or error.code != ABSENT or now - self._absent_since < self._patience_seconds:
            return
        self._told_absent = True
        for record in {r.ref.uid: r for users in self._users().values() for r in users}.values():
            self._notify(
                Notice(
                    record.ref,
                    "MpsKeeperGone",
                    "the MPS keeper of this node is gone; if its pod was ended, so were its control daemons, and processes "
                    f"that use them fail until it is back. {error.remedy}",
                )
            )

    def _users(self) -> dict[str, list[Record]]:
        """Give the claims that have a daemon, by its id."""
        found: dict[str, list[Record]] = {}
        boot_id = self._engine.settings.boot_id
        for record in self._engine.store.records():
            for entry in record.journal:
                if entry.kind == KIND and record.holds(boot_id):
                    found.setdefault(str(entry.args.get("id", "")), []).append(record)
        return found
