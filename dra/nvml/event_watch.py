"""A thread that waits for NVML's events, as long as the session may be held.

One event set for all GPUs; each is registered on its own, so that one that hangs or is lost costs the others nothing.
The wait is cut into short NVML calls: the session can be let go of within the time that the session promises. Whatever
ends the set (a lost GPU, a new session, a change of MIG) leads to a new one.

Source: nvmlEventSetWait_v2. A GPU that is lost ends every wait and does not say which it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dra.errors import DraError, HostError
from dra.nvml.api import NvmlApi
from dra.nvml.errors import GPU_LOST, SESSION_LOST
from dra.nvml.health_facts import NvmlEvent
from dra.nvml.session import NvmlSession
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread
from dra.values import PciAddress

log = get_logger()

# How long one NVML call waits; half of what a holder has to leave.
WAIT_MILLISECONDS = 1000
# So many of them are one call of the session, which costs two threads a wake-up.
WAITS = 5
# A call that is not back this much later hangs.
LATE_SECONDS = 15.0
REGISTER_SECONDS = 15.0
# Events that one call takes at once.
BATCH = 64
# Between two tries to get a set, while the driver does not answer.
RETRY_SECONDS = (0.5, 5.0)
# GPUs that could not be registered are tried again this often.
AGAIN_SECONDS = 10.0
EVENTS = "event wait"

# nvmlEventType*: double bit ECC, XID, GPU unavailable, recovery action.
_XID = 0x8
_WANTED = 0x2 | _XID | 0x4000 | 0x8000
_TIMEOUT = "DRA-NVML-TIMEOUT"
_NO_INSTANCE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class WatchedGpu:
    """A GPU whose events are wanted. `layout` is anything that changes when MIG changes: a new set is made then."""

    uuid: str
    address: PciAddress
    layout: object = None


@dataclass(frozen=True, slots=True)
class WatchState:
    """Which GPUs are registered now, why others are not (by UUID), and why there is no set at all."""

    registered: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    why: str = "the watch has not started"


class _StaleError(Exception):
    """The event set belongs to another session."""


@dataclass(slots=True)
class _Set:
    """An event set with the GPUs behind the handles that were registered."""

    handle: Any
    generation: int
    gpus: dict[int, str]


class EventWatch:
    """Tells events of GPUs as they come.

    Args:
        session: NVML.
        gpus: gives the GPUs to watch; asked again and again, must be quick.
        told: hears events, on this thread; must be quick.
        changed: hears that the state differs or that a GPU was lost (then the GPUs should be looked at).
    """

    def __init__(
        self,
        session: NvmlSession,
        *,
        gpus: Callable[[], tuple[WatchedGpu, ...]],
        told: Callable[[tuple[NvmlEvent, ...]], None],
        changed: Callable[[WatchState], None] = lambda _state: None,
        wait_milliseconds: int = WAIT_MILLISECONDS,
        again_seconds: float = AGAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._gpus, self._told, self._changed = gpus, told, changed
        self._wait_milliseconds = wait_milliseconds
        self._again_seconds = again_seconds
        self._clock = clock
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = WatchState()
        self._said = ""
        self._lost_at = -math.inf

    @property
    def state(self) -> WatchState:
        """What is watched now."""
        return self._state

    def start(self) -> None:
        """Start the thread. Raises HostError."""
        thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        start_thread(thread)
        self._thread = thread

    def stop(self, *, timeout_seconds: float = 2.0) -> bool:
        """End the thread; whether it is gone. One that hangs in the driver is left behind."""
        self._stop.set()
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """Try again at once: the session may be held again, or the GPUs are others."""
        self._wake.set()

    def _run(self) -> None:
        pause = RETRY_SECONDS[0]
        while not self._stop.is_set():
            why, worked = self._watch()
            if self._stop.is_set():
                return
            if why:
                self._set_state(WatchState(why=why))
            pause = RETRY_SECONDS[0] if worked else min(2 * pause, RETRY_SECONDS[1])
            if self._wake.wait(pause if why else 0.0):
                self._wake.clear()

    def _watch(self) -> tuple[str, bool]:
        """Hold the session and wait for events until something ends it; (why, whether there was a set).

        An empty reason: make a new set at once.
        """
        worked = False
        try:
            with self._session.hold("health") as hold:
                wanted = self._gpus()
                if not wanted:
                    return "there is no GPU to watch", False
                events = self._register(wanted)
                worked = bool(events.gpus)
                if not worked:
                    return "no GPU could be registered for events", False
                try:
                    return self._wait_for_events(hold.let_go, wanted, events), True
                finally:
                    self._free(events)
        except _StaleError:
            return "", True
        except HostError as error:
            return error.message, worked
        except DraError as error:
            if error.code == SESSION_LOST and worked:
                return "", True
            if error.code != self._said:
                log.debug("nvml_events_unavailable", **error_fields(error))
            self._said = error.code
            return error.message, worked
        except Exception as error:  # marked border: the thread lives on
            log.exception("nvml_events_bug")
            return f"{type(error).__name__}: {error}", worked

    def _register(self, wanted: tuple[WatchedGpu, ...]) -> _Set:
        def create(api: NvmlApi) -> _Set:
            return _Set(api.call("nvmlEventSetCreate"), api.generation, {})

        events = self._session.run(create)
        calls = {str(gpu.address): functools.partial(_register_gpu, gpu=gpu, events=events) for gpu in wanted}
        refused: dict[str, str] = {}
        results = self._session.run_each(calls, deadline_seconds=REGISTER_SECONDS)
        for gpu in wanted:
            result = results[str(gpu.address)]
            if isinstance(result, DraError):
                refused[gpu.uuid] = result.message
            else:
                events.gpus[result] = gpu.uuid
        self._said = ""
        self._set_state(WatchState(frozenset(events.gpus.values()), refused, ""))
        return events

    def _wait_for_events(self, let_go: threading.Event, wanted: tuple[WatchedGpu, ...], events: _Set) -> str:
        retry_at = self._clock() + self._again_seconds if self._state.refused else float("inf")

        def ends() -> bool:
            return (
                self._stop.is_set() or let_go.is_set() or self._clock() >= retry_at or self._gpus() != wanted
            )

        wait = functools.partial(_wait, events=events, milliseconds=self._wait_milliseconds, ends=ends)
        deadline = WAITS * self._wait_milliseconds / 1000 + LATE_SECONDS
        while not ends():
            told, lost = self._session.run(wait, subject=EVENTS, deadline_seconds=deadline)
            if told:
                self._told(told)
            if lost:
                # Without the lost one the others go on. NVML does not say which it is: who registers finds out.
                self._changed(self._state)
                self._pause_between_losses()
                return ""
        return "the session is let go of" if let_go.is_set() else ""

    def _pause_between_losses(self) -> None:
        """Pause, but not after the first: others may fall ill with it, and nothing is told while there is no set."""
        before, self._lost_at = self._lost_at, self._clock()
        if self._lost_at - before < 2 * RETRY_SECONDS[0] and self._wake.wait(RETRY_SECONDS[0]):
            self._wake.clear()

    def _free(self, events: _Set) -> None:
        def free(api: NvmlApi) -> None:
            if api.generation == events.generation:
                api.optional("nvmlEventSetFree", events.handle)

        # A session that ends takes its sets along; one that is let go of takes no more calls.
        if self._session.state.generation == events.generation:
            with contextlib.suppress(DraError):
                self._session.run(free, subject=EVENTS, deadline_seconds=LATE_SECONDS)

    def _set_state(self, state: WatchState) -> None:
        if state == self._state:
            return
        if state.registered != self._state.registered or state.why != self._state.why:
            log.info(
                "nvml_events_watched", gpus=len(state.registered), refused=len(state.refused), why=state.why
            )
        self._state = state
        self._changed(state)


def _register_gpu(api: NvmlApi, *, gpu: WatchedGpu, events: _Set) -> int:
    """Register one GPU; give its handle as a number."""
    if api.generation != events.generation:
        raise _StaleError
    subject = str(gpu.address)
    handle = api.handle(gpu.address)
    types = int(api.call("nvmlDeviceGetSupportedEventTypes", handle, subject=subject)) & _WANTED
    api.call("nvmlDeviceRegisterEvents", handle, types, events.handle, subject=subject)
    return _pointer(handle)


def _wait(
    api: NvmlApi, *, events: _Set, milliseconds: int, ends: Callable[[], bool]
) -> tuple[tuple[NvmlEvent, ...], bool]:
    """Wait for events, until `ends` or a few times; (those that came, whether a GPU is lost)."""
    if api.generation != events.generation:
        raise _StaleError
    told: list[NvmlEvent] = []
    waits = 1
    while len(told) < BATCH:
        try:
            data = api.call("nvmlEventSetWait_v2", events.handle, 0 if told else milliseconds)
        except DraError as error:
            if told:
                break  # what was told is not thrown away: the next wait says the error again
            if error.code == _TIMEOUT:
                if waits >= WAITS or ends():
                    break
                waits += 1
                continue
            if error.code == GPU_LOST:
                return (), True
            raise
        uuid = events.gpus.get(_pointer(data.device))
        if uuid is None:
            return tuple(told), True
        told.append(_event(uuid, data))
    return tuple(told), False


def _event(uuid: str, data: Any) -> NvmlEvent:
    kind = int(data.eventType)
    xid = int(data.eventData) if kind == _XID else None
    gi, ci = int(data.gpuInstanceId), int(data.computeInstanceId)
    return NvmlEvent(uuid, kind, xid, None if gi == _NO_INSTANCE else gi, None if ci == _NO_INSTANCE else ci)


def _pointer(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
