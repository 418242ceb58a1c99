"""Whether the MPS keeper of this node answers: shares that are published as held to their amounts need it.

Looked at from a thread that begins when something is shared. A keeper that is replaced, or that comes later than this
process after a reboot, is away for a while; only one that stays away changes what is published. Until then claims wait
for it. So that a new process knows what the one before it published, a file says that a keeper was there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from dra.errors import DraError
from dra.host.files import ensure_dir, remove_durable, write_durable
from dra.prepare.sharing.keeper_client import KeeperClient
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

LOOK_SECONDS = 3.0
# So long without an answer is an absence. A pod that is replaced may have to pull its image first.
AWAY_SECONDS = 120.0
# Beside the keeper's own files.
SEEN_NAME = "keeper.seen"
_SEEN = b"The MPS keeper answers on this node: shares are published as held to their amounts by it.\n"


class KeeperPresence:
    """Looks at the keeper and tells of each change.

    Args:
        keeper: whom to ask.
        on_change: hears whether there is one, each time that what `present` says changes.
        folder: where it is remembered (`mps_folder`).
        look_seconds: how often it is looked at.
        away_seconds: how long it may be away.
        monotonic: the clock.
    """

    def __init__(
        self,
        keeper: KeeperClient,
        on_change: Callable[[bool], None],
        *,
        folder: Path,
        look_seconds: float = LOOK_SECONDS,
        away_seconds: float = AWAY_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper, self._on_change = keeper, on_change
        self._look_seconds, self._away_seconds, self._monotonic = look_seconds, away_seconds, monotonic
        self._memory = folder / SEEN_NAME
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._present = self._memory.exists()
        self._away_since: float | None = None

    def present(self) -> bool:
        """Say what is published, by this process or the one before it: true while the keeper is away for a moment."""
        return self._present

    def begin(self) -> None:
        """Look from now on; may be called again. A system without threads: the next call tries again."""
        with self._lock:
            if self._thread is not None or self._ending.is_set():
                return
            thread = threading.Thread(target=self._run, name="mps-presence", daemon=True)
            try:
                start_thread(thread)
            except DraError as error:
                log.warning("mps_presence_not_started", **error_fields(error))
                return
            self._thread = thread

    def stop(self) -> None:
        """End; a question that waits is left behind."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look()
            except Exception:  # marked border: the thread lives on
                log.exception("mps_presence_crashed")
            self._ending.wait(self._look_seconds)

    def look(self) -> None:
        """Ask once, and tell of a change."""
        if answers(self._keeper):
            self._away_since, present = None, True
        else:
            now = self._monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            present = self._present and now - self._away_since < self._away_seconds
        if present == self._present:
            return
        # What is published is written down before, and struck after: the next process must not promise less than this one.
        if present:
            self._remember(present)
        self._present = present
        log.info("mps_keeper_presence", present=present)
        self._on_change(present)
        if not present:
            self._remember(present)

    def _remember(self, present: bool) -> None:
        try:
            if present:
                ensure_dir(self._memory.parent)
                write_durable(self._memory, _SEEN, mode=0o600)
            else:
                remove_durable(self._memory)
        except DraError as error:
            log.warning("mps_keeper_presence_not_remembered", **error_fields(error))


def answers(keeper: KeeperClient) -> bool:
    """Ask the keeper whether it is there, now."""
    try:
        keeper.hello()
    except DraError as error:
        log.debug("mps_keeper_not_there", **error_fields(error))
        return False
    return True
