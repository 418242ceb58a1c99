"""The process's one NVML session: opens late, survives loss, reopens, lets go.

Nothing else may call `pynvml`. A call goes through `NvmlSession.run`, which opens the library if need be, runs
the call on a worker with a deadline, translates errors, and opens again once if the session was lost.

Rules it keeps:

* With hold `auto` the session is open only while somebody uses or holds it, and a few seconds after.
* `release` lets go of the driver within its timeout and stays away until `resume`.
* A GPU that hangs is refused (DRA-NVML-HUNG) until the driver answers again; the others go on.
* A replaced library or kernel module means a new session, not a new process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from dra.errors import DraError, StackError
from dra.nvml.api import NvmlApi, Opened, open_library, retire
from dra.nvml.errors import RELEASED, SESSION_ENDED, SESSION_LOST, SYSTEM
from dra.nvml.lanes import CallLanes
from dra.nvml.library import LibrarySource
from dra.telemetry.log import error_fields, get_logger

T = TypeVar("T")

# A handle look-up under load was seen to take 10 s; a hung GPU must be known within 30 s.
CALL_SECONDS = 20.0
INIT_SECONDS = 25.0
LINGER_SECONDS = 5.0
RELEASE_SECONDS = 5.0
# An event wait takes a second.
REOPEN_SECONDS = 3.0
# How long a call waits for the end of a pause: the kernel may take so long to take a GPU from a driver.
PAUSE_SECONDS = 20.0
_IDLE, _CLOSED = "idle", "closed"
_QUIET = (_IDLE, _CLOSED)


class HoldPolicy(StrEnum):
    """How long a session stays open: always, while somebody needs it, or for single calls only."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SessionState:
    """What the session is now, for `doctor` and logs. `hung` maps subjects to seconds."""

    is_open: bool
    released: str
    generation: int
    driver_version: str
    holders: tuple[str, ...]
    hung: dict[str, float]


class Hold:
    """A reason to keep the session open. `let_go` is set when the holder must give up at once."""

    __slots__ = ("holder", "let_go")

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.let_go = threading.Event()


class NvmlSession:
    """See the module's text. Thread-safe; one per process may be open at a time (pynvml is global).

    Args:
        source: where the library comes from.
        hold: how long to stay open.
        kernel_version: gives the loaded kernel module's version; a change means a new session.
        lanes: the call workers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        source: LibrarySource,
        *,
        hold: HoldPolicy = HoldPolicy.AUTO,
        kernel_version: Callable[[], str] = lambda: "",
        lanes: CallLanes | None = None,
        clock: Callable[[], float] = time.monotonic,
        linger_seconds: float = LINGER_SECONDS,
        call_seconds: float = CALL_SECONDS,
        init_seconds: float = INIT_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._source = source
        self._policy = hold
        self._kernel_version = kernel_version
        self._clock = clock
        self._linger_seconds = linger_seconds
        self._call_seconds = call_seconds
        self._init_seconds = init_seconds
        self._pause_seconds = pause_seconds
        self._on_recovered: list[Callable[[str], None]] = []
        self._lanes = lanes or CallLanes(clock=clock, on_recovered=self._recovered)
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self._opened: Opened | None = None
        self._opened_for: tuple[object, str] = (None, "")
        # Ended, and perhaps not shut down yet: a call is still in it.
        self._leaving: list[Opened] = []
        self._generation = 0
        self._last_version = ""
        self._released = ""
        self._pauses = 0
        self._holds: list[Hold] = []
        self._log = get_logger()

    # Calls

    def run(
        self, call: Callable[[NvmlApi], T], *, subject: str = SYSTEM, deadline_seconds: float | None = None
    ) -> T:
        """Give what `call` gives with the open session; handles from `api` are good inside `call` only.

        Args:
            call: may make several NVML calls; runs on a worker thread, takes no locks of its own.
            subject: the GPU it is about (str of its PCI address): a hang costs this GPU only.
            deadline_seconds: for the whole call.

        Raises:
            StackError, DeviceError: DRA-NVML-…; see `dra.nvml.errors`.
        """
        deadline = self._call_seconds if deadline_seconds is None else deadline_seconds
        self._lanes.check(subject)
        for attempt in (1, 2):
            opened = self._ensure_open()
            try:
                use = functools.partial(self._use, opened, call)
                return self._lanes.run(subject, use, deadline_seconds=deadline)
            except DraError as error:
                if error.code not in SESSION_ENDED:
                    raise
                self._end(opened, why=error.code)
                if attempt == 2 or error.code != SESSION_LOST:
                    raise
        raise AssertionError("unreachable")

    def run_each(
        self, calls: Mapping[str, Callable[[NvmlApi], T]], *, deadline_seconds: float | None = None
    ) -> dict[str, T | DraError]:
        """Run one call for each GPU, all at once; what each gave, or its error. A hung GPU delays nobody else.

        Args:
            calls: by subject (str of the PCI address).
            deadline_seconds: for all of them together.

        Raises:
            StackError: the session cannot be opened, or was lost while they ran.
        """
        opened = self._entered()
        try:
            results = self._lanes.run_each(
                {subject: functools.partial(self._use, opened, call) for subject, call in calls.items()},
                deadline_seconds=self._call_seconds if deadline_seconds is None else deadline_seconds,
            )
        finally:
            self._left(opened)
        for result in results.values():
            if isinstance(result, DraError) and result.code in SESSION_ENDED:
                self._end(opened, why=result.code)
                raise result
        return results

    def _entered(self) -> Opened:
        """Give the open session, counted as used: it is not closed between two of the calls, whatever the policy."""
        for _ in range(2):
            opened = self._ensure_open()
            with self._changed:
                if not opened.ended:
                    opened.users += 1
                    return opened
        raise StackError(SESSION_LOST, "NVML: the session was closed meanwhile", retryable=True)

    def _use(self, opened: Opened, call: Callable[[NvmlApi], T]) -> T:
        with self._changed:
            if opened.ended:
                raise StackError(SESSION_LOST, "NVML: the session was closed meanwhile", retryable=True)
            opened.users += 1
        try:
            return call(NvmlApi(opened))
        finally:
            self._left(opened)

    def _left(self, opened: Opened) -> None:
        with self._changed:
            opened.users -= 1
            opened.last_used = self._clock()
            last = opened.users == 0
            give_up = last and (opened.ended or (self._policy is HoldPolicy.NEVER and not self._holds))
            if give_up and self._opened is opened:
                self._forget(opened)
            self._changed.notify_all()
        if give_up:
            retire(opened)

    # Opening and closing

    def refresh(self) -> bool:
        """Open if closed, and open anew if the library or the kernel module has changed; True for a new session.

        Raises:
            StackError: it cannot be opened.
        """
        with self._changed:
            opened, before = self._opened, self._generation
        if opened is not None:
            try:
                now = (self._source.fingerprint(), self._kernel_version())
            except StackError as error:
                self._end(opened, why=error.code)
                raise
            if now != self._opened_for:
                self._log.info("nvml_library_changed", driver_version=opened.driver_version)
                self._end(opened, why="changed")
        return self._ensure_open().generation != before

    def reopen(self, reason: str, *, timeout_seconds: float = REOPEN_SECONDS) -> None:
        """Close the session, so that the next call opens it anew: NVML counts its GPUs only when it is opened.

        Calls that run are waited for: the library is one for the whole process, and as long as any call is in it, opening
        it again counts nothing. One that is stuck is left where it is after the timeout. For holders see `paused`.
        """
        with self.paused(reason, timeout_seconds=timeout_seconds) as clean:
            if not clean:
                self._log.warning("nvml_reopened_beside_a_call", reason=reason)

    def _ensure_open(self) -> Opened:
        while True:
            with self._changed:
                self._check_released()
                self._wait_for_pauses()
                if self._opened is not None:
                    return self._opened
            with self._opening:
                opened = self._open()
            if opened is not None:
                return opened

    def _open(self) -> Opened | None:
        """Open, alone; None where a pause came in between."""
        with self._changed:
            self._check_released()
            if self._pauses or self._opened is not None:
                return self._opened
            self._generation += 1
            generation = self._generation
        # Looked at before the library is opened: a change in between is then seen by the next refresh.
        opened_for = (self._source.fingerprint(), self._kernel_version())
        opened = self._lanes.run(
            SYSTEM,
            lambda: open_library(self._source.load(), generation=generation, now=self._clock()),
            deadline_seconds=self._init_seconds,
            discard=retire,
        )
        with self._changed:
            if self._released or self._pauses:
                opened.ended = True
            else:
                self._opened, self._opened_for = opened, opened_for
        if opened.ended:
            retire(opened)
            self._check_released()
            return None
        # With hold auto it is opened for every scan: news is only another driver.
        say = self._log.debug if opened.driver_version == self._last_version else self._log.info
        say("nvml_session_opened", driver_version=opened.driver_version, generation=generation)
        self._last_version = opened.driver_version
        return opened

    def _wait_for_pauses(self) -> None:
        if not self._changed.wait_for(lambda: not self._pauses, self._pause_seconds):
            raise StackError(
                RELEASED,
                "NVML: the session is let go of while a GPU changes its kernel driver",
                remedy="It is opened again once that is over.",
            )

    def _check_released(self) -> None:
        if self._released:
            raise StackError(
                RELEASED,
                f"NVML: the session is let go of on request ({self._released})",
                remedy="It is opened again when the request is withdrawn.",
            )

    def _forget(self, opened: Opened) -> None:
        opened.ended = True
        self._leaving = [each for each in self._leaving if not each.shut_down.is_set()] + [opened]
        if self._opened is opened:
            self._opened = None

    def _end(self, opened: Opened, *, why: str) -> None:
        """Close a session; calls that are still in it finish first, stuck ones whenever they return."""
        with self._changed:
            if opened.ended:
                return
            self._forget(opened)
            idle = opened.users == 0
        say = self._log.debug if why in _QUIET else self._log.info
        say("nvml_session_closed", reason=why, generation=opened.generation)
        if idle:
            self._retire_with_deadline(opened)

    def _retire_with_deadline(self, opened: Opened) -> None:
        try:
            self._lanes.run(SYSTEM, lambda: retire(opened), deadline_seconds=RELEASE_SECONDS)
        except DraError as error:
            self._log.warning("nvml_close_failed", **error_fields(error))

    def tidy(self) -> float | None:
        """Close the session if nobody has needed it for a while; seconds until it may be closed, None if never.

        Called by whoever has a loop (the live inventory).
        """
        with self._changed:
            opened = self._opened
            if opened is None or self._policy is HoldPolicy.ALWAYS or self._holds or opened.users:
                return None
            left = opened.last_used + self._linger_seconds - self._clock()
        if left > 0:
            return left
        self._end(opened, why=_IDLE)
        return None

    def close(self) -> None:
        """Close the session; the next call opens it again."""
        with self._changed:
            opened = self._opened
        if opened is not None:
            self._end(opened, why=_CLOSED)
        self._lanes.close()

    # Holding and letting go

    @contextlib.contextmanager
    def hold(self, holder: str) -> Iterator[Hold]:
        """Keep the session open inside the block, as an event wait needs it.

        The holder must leave the block soon (in 2 s) after `let_go` is set.

        Raises:
            StackError: DRA-NVML-RELEASED: released, or the policy is never to hold.
        """
        hold = Hold(holder)
        with self._changed:
            self._check_released()
            self._wait_for_pauses()
            if self._policy is HoldPolicy.NEVER:
                raise StackError(
                    RELEASED, "NVML: holding the session is switched off (--nvml-hold=never)", retryable=False
                )
            self._holds.append(hold)
        try:
            yield hold
        finally:
            with self._changed:
                self._holds.remove(hold)
                self._changed.notify_all()

    def release(self, reason: str, *, timeout_seconds: float = RELEASE_SECONDS) -> bool:
        """Let go of the driver: True when the library is shut down and no device node is open any more.

        Holders are told, running calls may finish; nothing is opened again until `resume`. False after the
        timeout: a call is stuck in the driver, or a holder did not leave.
        """
        end = time.monotonic() + timeout_seconds
        with self._changed:
            self._released = reason
            for hold in self._holds:
                hold.let_go.set()

        def free() -> bool:
            return not self._holds and (self._opened is None or self._opened.users == 0)

        with self._changed:
            clean = self._changed.wait_for(free, timeout_seconds)
        return self._close(reason, end) and clean

    @contextlib.contextmanager
    def paused(self, reason: str, *, timeout_seconds: float = RELEASE_SECONDS) -> Iterator[bool]:
        """Let go of the driver while the block runs, which must be short: a GPU that is open keeps its kernel driver.

        Whoever wants something waits for the end of the block. Holders keep their hold; what they registered is gone, as
        their next call tells them (SESSION-LOST, or another generation). Gives whether no device node is open any more;
        False after the timeout: a call is stuck in the driver.
        """
        end = time.monotonic() + timeout_seconds
        with self._changed:
            self._pauses += 1
        try:
            yield self._close(reason, end)
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def _close(self, reason: str, end: float) -> bool:
        """Close the session once no call is in it; whether that was done before `end`, by `time.monotonic`."""
        # An opening that is under way sees the request when it is done, and closes again.
        if not self._opening.acquire(timeout=max(0.0, end - time.monotonic())):
            return False
        self._opening.release()
        with self._changed:
            opened = self._opened
        if opened is not None:
            self._end(opened, why=reason)
        with self._changed:
            leaving = tuple(self._leaving)
        return all(each.shut_down.wait(max(0.05, end - time.monotonic())) for each in leaving)

    def resume(self) -> None:
        """Allow opening again after `release`."""
        with self._changed:
            self._released = ""

    def set_policy(self, hold: HoldPolicy) -> None:
        """Change how long the session stays open; `never` tells the holders to leave."""
        with self._changed:
            self._policy = hold
            for each in self._holds if hold is HoldPolicy.NEVER else ():
                each.let_go.set()

    # Looking

    @property
    def state(self) -> SessionState:
        """What the session is now."""
        hung = self._lanes.hung
        with self._changed:
            opened = self._opened
            return SessionState(
                is_open=opened is not None,
                released=self._released,
                generation=self._generation,
                driver_version=opened.driver_version if opened else "",
                holders=tuple(hold.holder for hold in self._holds),
                hung=hung,
            )

    def has_handle(self, subject: str) -> bool:
        """Whether the open session has touched this GPU already, so that asking it wakes nothing."""
        with self._changed:
            return self._opened is not None and subject in self._opened.handles

    def on_recovered(self, told: Callable[[str], None]) -> None:
        """Have `told` called (on a worker thread) with a subject that answers again after a hang."""
        self._on_recovered.append(told)

    def _recovered(self, subject: str) -> None:
        self._log.info("nvml_call_returned", subject=subject)
        for told in self._on_recovered:
            told(subject)
