"""Finishing unprepares that could not be finished: a partition in use, a mode that something keeps on.

The kubelet calls again as long as its pod is there, and only then; a claim whose pod was removed by force, or whose
kubelet is away, would stay half unprepared. Its record says what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dra.errors import DraError
from dra.prepare.engine import Engine
from dra.prepare.model import Notice, Notify
from dra.prepare.record import Record
from dra.telemetry.log import error_fields, get_logger

FIRST_SECONDS = 5.0
LAST_SECONDS = 300.0
# Somebody is at work on the claim at this moment.
_BUSY = frozenset({"DRA-LOCK-TIMEOUT"})


@dataclass(slots=True)
class _Waiting:
    """A claim that is to be tried again at `due`; `told` is the code that its owner has heard of."""

    due: float
    pause_seconds: float
    told: str = ""


class UnprepareRetries:
    """Tries again with growing pauses. Called from one thread at a time."""

    def __init__(self, engine: Engine, *, notify: Notify, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._notify = notify
        self._monotonic = monotonic
        self._waiting: dict[str, _Waiting] = {}
        self._log = get_logger()

    def run(self) -> list[str]:
        """Try what is due; give the UIDs of the claims that are finished now."""
        left = {r.ref.uid: r for r in self._engine.store.records() if r.state == "unpreparing"}
        self._waiting = {uid: waiting for uid, waiting in self._waiting.items() if uid in left}
        now = self._monotonic()
        done = []
        for uid, record in left.items():
            # The call that left it so may still be at work: the first try is not at once.
            waiting = self._waiting.setdefault(uid, _Waiting(now + FIRST_SECONDS, FIRST_SECONDS))
            if now >= waiting.due and self._try(record, waiting):
                done.append(uid)
                del self._waiting[uid]
        return done

    def _try(self, record: Record, waiting: _Waiting) -> bool:
        ref = record.ref
        try:
            if not self._engine.unprepare_if(ref.uid, record, "its unprepare was finished"):
                return False
        except DraError as error:
            if error.code not in _BUSY:
                waiting.pause_seconds = min(2 * waiting.pause_seconds, LAST_SECONDS)
                self._tell(record, waiting, error)
            waiting.due = self._monotonic() + waiting.pause_seconds
            self._log.info(
                "unprepare_retried", claim=str(ref), claim_uid=ref.uid, again_in_s=waiting.pause_seconds,
                **{key: value for key, value in error_fields(error).items() if key not in ("claim", "claim_uid")},
            )  # fmt: skip
            return False
        if waiting.told:
            text = "its unprepare was finished; its devices are free again"
            self._notify(Notice(ref, "UnprepareFinished", text, warning=False))
        return True

    def _tell(self, record: Record, waiting: _Waiting, error: DraError) -> None:
        if error.code != waiting.told:
            waiting.told = error.code
            self._notify(Notice(record.ref, "UnprepareWaiting", str(error)))
