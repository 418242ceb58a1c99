"""Checks of GPUs, beside the monitor's thread: one that hangs in the driver delays nobody's news."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

from dra.errors import DraError, HostError
from dra.health.model import Reading
from dra.inventory.model import Gpu
from dra.nvml.health import read_health
from dra.nvml.session import NvmlSession
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

# A GPU that does not answer in this time hangs; with the interval of checks it is known within 30 s.
DEADLINE_SECONDS = 15.0
# Checks that may be under way at once; each may hang in the driver.
MOST_AT_ONCE = 4

# GPU's UUID, what it said, when (monotonic) it was asked.
Answer = tuple[str, Reading, float]


class Checks:
    """Asks GPUs about themselves. Thread-safe.

    Args:
        session: NVML.
        answered: hears what some GPUs said, on a thread of the check.
        deadline_seconds: for all GPUs of a check together.
    """

    def __init__(
        self,
        session: NvmlSession,
        answered: Callable[[list[Answer]], None],
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._session, self._answered, self._deadline_seconds = session, answered, deadline_seconds
        self._lock = threading.Lock()
        self._running = 0
        self._all = False

    @property
    def all_asked(self) -> bool:
        """Whether a check of all GPUs is under way."""
        return self._all

    def start(self, gpus: Sequence[Gpu], *, all_gpus: bool = False) -> bool:
        """Ask some GPUs; whether that could be started. Returns at once."""
        with self._lock:
            if self._running >= MOST_AT_ONCE:
                return False
            self._running += 1
            self._all = self._all or all_gpus
        thread = threading.Thread(target=self._check, args=(gpus, all_gpus), name="health-check", daemon=True)
        try:
            start_thread(thread)
        except HostError as error:
            log.warning("health_check_not_started", **error_fields(error))
            self._end(all_gpus=all_gpus)
            return False
        return True

    def _check(self, gpus: Sequence[Gpu], all_gpus: bool) -> None:
        began = time.monotonic()
        try:
            answers = self._ask(gpus, began)
        except Exception as error:  # marked border: an answer always comes
            log.exception("health_check_bug")
            answers = [(gpu.uuid, Reading(error="DRA-BUG", message=repr(error)), began) for gpu in gpus]
        self._end(all_gpus=all_gpus)
        self._answered(answers)

    def _ask(self, gpus: Sequence[Gpu], began: float) -> list[Answer]:
        calls = {
            # A GPU in MIG mode takes no part in the fabric.
            str(gpu.pci_address): functools.partial(
                read_health, address=gpu.pci_address, fabric=not gpu.mig_enabled
            )
            for gpu in gpus
        }
        try:
            results = self._session.run_each(calls, deadline_seconds=self._deadline_seconds)
        except DraError as error:
            log.debug("health_check_failed", **error_fields(error))
            return [(gpu.uuid, _refused(error), began) for gpu in gpus]
        answers = []
        for gpu in gpus:
            result = results[str(gpu.pci_address)]
            reading = _refused(result) if isinstance(result, DraError) else result
            answers.append((gpu.uuid, reading, began))
        return answers

    def _end(self, *, all_gpus: bool) -> None:
        with self._lock:
            self._running -= 1
            if all_gpus:
                self._all = False


def _refused(error: DraError) -> Reading:
    return Reading(error=error.code, message=error.message)
