"""What the GPUs do, sampled when somebody asks and not more often than a set time.

One round reads all GPUs at once, each on a lane of its own; one that hangs costs its own reading. Sleeping GPUs are
left alone: without persistence mode a GPU that nobody has open takes seconds and watts to wake, so it is read only
while a claim holds it or this process has it open anyway.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from dra.errors import BugError, DraError
from dra.inventory.model import Gpu, Inventory
from dra.nvml.api import NvmlApi
from dra.nvml.session import NvmlSession
from dra.nvml.telemetry import GpuReading, TelemetryReader
from dra.telemetry.log import get_logger
from dra.telemetry.threads import start_thread

MIN_INTERVAL_SECONDS = 1.0
# Prometheus gives a scrape ten seconds.
WAIT_SECONDS = 5.0

log = get_logger()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One round. Keys are GPUs' UUIDs.

    A GPU is in one of the three: read, not read because of an error, or left asleep. `inventory` is the one that the
    round went by; `taken` is in seconds since 1970, 0 for no round yet; `duration_seconds` is None while it goes on.
    """

    inventory: Inventory = field(default_factory=Inventory)
    readings: Mapping[str, GpuReading] = field(default_factory=dict)
    errors: Mapping[str, DraError] = field(default_factory=dict)
    asleep: frozenset[str] = frozenset()
    taken: float = 0.0
    duration_seconds: float | None = None


class _Round:
    """A round under way; its readings come in one by one."""

    def __init__(self, inventory: Inventory, asleep: frozenset[str]) -> None:
        self.inventory, self.asleep = inventory, asleep
        self.began, self.wall = time.monotonic(), time.time()
        self.readings: dict[str, GpuReading] = {}
        self.errors: dict[str, DraError] = {}
        self.duration_seconds: float | None = None
        self.over = threading.Event()


class Sampler:
    """Thread-safe; many askers share a round.

    Args:
        session: NVML.
        inventory: the GPUs there are.
        held: names of devices that claims hold.
        min_interval_seconds: a younger round is given again.
        interval: asked at each round where that may change; the longer of the two counts.
        call_seconds: how long a GPU may take; None for the session's own limit.
    """

    def __init__(
        self,
        session: NvmlSession,
        inventory: Callable[[], Inventory],
        *,
        held: Callable[[], Collection[str]] = tuple,
        min_interval_seconds: float = MIN_INTERVAL_SECONDS,
        interval: Callable[[], float] = lambda: 0.0,
        call_seconds: float | None = None,
        reader: TelemetryReader | None = None,
    ) -> None:
        self._session, self._inventory, self._held = session, inventory, held
        self._min_interval_seconds, self._call_seconds = min_interval_seconds, call_seconds
        self._interval = interval
        self._reader = reader or TelemetryReader()
        self._mutex = threading.Lock()
        self._round: _Round | None = None

    def sample(self, *, wait_seconds: float = WAIT_SECONDS) -> Snapshot:
        """Give a round that is at most the interval old; after `wait_seconds` what there is of it. Never raises.

        A GPU that has not answered by then is in none of the snapshot's three groups.
        """
        this = self._current_round()
        this.over.wait(wait_seconds)
        with self._mutex:
            return Snapshot(
                this.inventory,
                dict(this.readings),
                dict(this.errors),
                this.asleep,
                this.wall,
                this.duration_seconds,
            )

    def _current_round(self) -> _Round:
        with self._mutex:
            this = self._round
            if this is not None:
                young = time.monotonic() - this.began < max(self._min_interval_seconds, self._interval())
                if young or not this.over.is_set():
                    return this
            inventory = self._inventory()
            this = self._round = _Round(inventory, self._sleepers(inventory))
        try:
            start_thread(threading.Thread(target=self._go_round, args=(this,), name="telemetry", daemon=True))
        except DraError as error:
            self._end(this, error)
        return this

    def _sleepers(self, inventory: Inventory) -> frozenset[str]:
        sleepy = [gpu for gpu in inventory.gpus if not gpu.persistence]
        if not sleepy:
            return frozenset()
        held = {name.partition("-mig-")[0] for name in self._held()}
        return frozenset(
            gpu.uuid
            for gpu in sleepy
            if f"gpu-{gpu.minor}" not in held and not self._session.has_handle(str(gpu.pci_address))
        )

    def _go_round(self, this: _Round) -> None:
        try:
            self._read(this)
        except DraError as error:
            self._end(this, error)
        except Exception as error:  # a marked border: whoever waits must be told
            with contextlib.suppress(Exception):
                log.exception("telemetry_failed", error_code="DRA-BUG")
            self._end(this, BugError("DRA-BUG", f"reading the GPUs failed: {type(error).__name__}: {error}"))
        else:
            self._end(this, None)

    def _read(self, this: _Round) -> None:
        wanted = {str(gpu.pci_address): gpu for gpu in this.inventory.gpus if gpu.uuid not in this.asleep}
        self._reader.keep_only(frozenset(wanted))
        if not wanted:
            return
        calls = {
            subject: functools.partial(self._read_one, this=this, gpu=gpu) for subject, gpu in wanted.items()
        }
        for subject, result in self._session.run_each(calls, deadline_seconds=self._call_seconds).items():
            if isinstance(result, DraError):
                with self._mutex:
                    this.errors[wanted[subject].uuid] = result

    def _read_one(self, api: NvmlApi, *, this: _Round, gpu: Gpu) -> None:
        reading = self._reader.read(api, gpu.pci_address, mig_enabled=gpu.mig_enabled)
        # Here and not when all are done: whoever waits takes what is there.
        with self._mutex:
            if not this.over.is_set():
                this.readings[gpu.uuid] = reading

    def _end(self, this: _Round, error: DraError | None) -> None:
        with self._mutex:
            if error is not None:
                for gpu in this.inventory.gpus:
                    if gpu.uuid not in this.readings and gpu.uuid not in this.asleep:
                        this.errors.setdefault(gpu.uuid, error)
            this.duration_seconds = time.monotonic() - this.began
            this.over.set()
