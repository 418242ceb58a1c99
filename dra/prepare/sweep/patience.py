"""How long a claim that looks gone is waited for before its devices are taken from it.

That a claim is gone is only the API server's word, and a pod whose claim is released loses its devices to another:
it is asked a second time, some seconds later, and is given longer if it wants to take most claims of the node at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from dra.prepare.record import Record
from dra.prepare.sweep.judgement import Stale
from dra.prepare.sweep.report import Tell

# How long a device whose claim is gone is left to processes that still use it.
IN_USE_GRACE_SECONDS = 600.0
# How long after the first look a second one must say the same before a claim is released.
CONFIRM_SECONDS = 5.0
# So many times as long where more than half of the claims look gone at once, and there are at least so many.
_MANY_TIMES = 3
_MANY = 3


@dataclass(frozen=True, slots=True)
class Waits:
    """For how long: `confirm_seconds` for the second look, `grace_seconds` for processes that use a device."""

    confirm_seconds: float = CONFIRM_SECONDS
    grace_seconds: float = IN_USE_GRACE_SECONDS
    monotonic: Callable[[], float] = time.monotonic


class Patience:
    """Since when what looks gone. Used by one sweep at a time."""

    def __init__(
        self, boot_id: str, waits: Waits, *, device_in_use: Callable[[Record], bool], tell: Tell
    ) -> None:
        self._boot_id = boot_id
        self._waits = waits
        self._device_in_use = device_in_use
        self._tell = tell
        # When the next second look is due; None: none is.
        self.look_again_at: float | None = None
        # Since when a record is stale, by UID and reason.
        self._since: dict[tuple[str, str], float] = {}
        # Since when a partition of ours is nobody's, by device name.
        self._orphans_since: dict[str, float] = {}
        self._told_in_use: set[str] = set()

    def begin(self) -> None:
        """Begin a sweep: what is looked at again is found anew."""
        self.look_again_at = None

    def is_time_to_look_again(self) -> bool:
        """Whether a second look is due by now."""
        return self.look_again_at is not None and self._waits.monotonic() >= self.look_again_at

    def is_due(self, record: Record, stale: Stale, *, many: bool) -> bool:
        """Whether a claim that was found stale now is to be released now.

        Args:
            record: its record, or what is known of a lost one.
            stale: why it is stale.
            many: whether most claims look gone (`are_many`).
        """
        now = self._waits.monotonic()
        since = self._since.setdefault((record.ref.uid, stale.reason), now)
        patience = max(stale.patience_seconds, self._waits.confirm_seconds * (_MANY_TIMES if many else 1))
        if now - since < patience:
            if not stale.patience_seconds:
                self._look_again(since + patience)
            return False
        if record.boot_id != self._boot_id or not self._device_in_use(record):
            return True
        return self._has_had_grace(record, stale, since, patience)

    def are_due(self, orphans: AbstractSet[str]) -> set[str]:
        """Give those of the devices that are nobody's now that were so at the first look, too."""
        now = self._waits.monotonic()
        self._orphans_since = {name: self._orphans_since.get(name, now) for name in orphans}
        due = {name for name, at in self._orphans_since.items() if now - at >= self._waits.confirm_seconds}
        for name in orphans - due:
            self._look_again(self._orphans_since[name] + self._waits.confirm_seconds)
        return due

    def keep(self, stale: AbstractSet[tuple[str, str]], uids: AbstractSet[str]) -> None:
        """Forget all records but the stale ones, by UID and reason, and those of `uids`."""
        self._since = {key: since for key, since in self._since.items() if key in stale or key[0] in uids}
        self._told_in_use &= {uid for uid, _ in self._since}

    def _has_had_grace(self, record: Record, stale: Stale, since: float, patience: float) -> bool:
        seconds = self._waits.monotonic() - since
        uid = record.ref.uid
        if seconds < max(patience, stale.patience_seconds + self._waits.grace_seconds):
            if uid not in self._told_in_use:
                self._told_in_use.add(uid)
                text = f"{stale.reason}, but processes still use its devices"
                self._tell(record, "StaleClaimInUse", text, True)
            return False
        text = (
            f"{stale.reason} {seconds:.0f} s ago; its devices are released although processes still use them"
        )
        self._tell(record, "StaleClaimInUse", text, True)
        return True

    def _look_again(self, at: float) -> None:
        self.look_again_at = at if self.look_again_at is None else min(at, self.look_again_at)


def are_many(gone: int, asked: int) -> bool:
    """Whether so many claims look gone at once that the API server may be the one that lost them."""
    return asked >= _MANY and 2 * gone > asked
