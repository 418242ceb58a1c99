"""What a sweep did, and how the owners of claims hear of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dra.prepare.model import Notice, Notify
from dra.prepare.record import Record
from dra.telemetry.log import get_logger

log = get_logger()

# Tells what happened to a stale claim: its record, the reason of the Event, the text, whether that is a warning.
Tell = Callable[[Record, str, str, bool], None]


@dataclass(slots=True)
class SweepReport:
    """What a sweep did, by claim UID."""

    released: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    api_answered: bool = True


def teller(notify: Notify) -> Tell:
    """Make what tells of stale claims, in the log and by an Event; a claim without a name has no Event of its own."""

    def tell(record: Record, reason: str, message: str, warning: bool) -> None:
        ref = record.ref
        log.info("stale_claim", claim=str(ref), claim_uid=ref.uid, reason=reason, text=message)
        notify(Notice(ref if ref.name else None, reason, message, warning=warning))

    return tell
