"""Whether the MPS keeper of this node answers: shares that are published as held to their amounts need it.

Looked at from a thread that begins when something is shared. A keeper that is replaced is gone for a moment; only one that
stays away changes what is published.
"""

from __future__ import annotations

from collections.abc import Callable

from dra.errors import DraError
from dra.prepare.sharing.keeper_client import KeeperClient
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop

log = get_logger()

LOOK_SECONDS = 3.0
# So many looks in a row without an answer are an absence.
_PATIENCE = 4


class KeeperPresence:
    """Looks at the keeper and tells of each change.

    Args:
        on_change: hears whether there is one; first when one answers.
    """

    def __init__(
        self, keeper: KeeperClient, on_change: Callable[[bool], None], *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._keeper, self._on_change = keeper, on_change
        self._loop = Loop("mps-presence", self.look, seconds=look_seconds)
        self._misses = 0
        self._present = False

    def present(self) -> bool:
        """Say what was told last: true for the moments in which a keeper is replaced."""
        return self._present

    def answers(self) -> bool:
        """Ask now."""
        try:
            self._keeper.hello()
        except DraError as error:
            log.debug("mps_keeper_not_there", **error_fields(error))
            return False
        return True

    def begin(self) -> None:
        """Look from now on; may be called again. A system without threads: the next call tries again."""
        self._loop.begin()

    def stop(self) -> None:
        """End; a question that waits is left behind."""
        self._loop.stop(timeout_seconds=0.0)

    def look(self) -> None:
        """Ask once, and tell of a change."""
        self._misses = 0 if self.answers() else self._misses + 1
        present = self._misses == 0 or (self._present and self._misses < _PATIENCE)
        if present != self._present:
            self._present = present
            log.info("mps_keeper_presence", present=present)
            self._on_change(present)
