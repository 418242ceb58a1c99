"""The prepare and unprepare calls, in both versions, over one engine.

Each claim of a request gets an entry in the answer and no other claim does; one claim's failure is its own entry.
A gRPC status is never used for a claim. Source: kubelet DRA manager, NodePrepareResources.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import grpc

from dra.api.claim import ClaimRef
from dra.errors import BugError, DraError, HostError
from dra.pb.services import PREPARE_V1, PREPARE_V1BETA1, UNPREPARE_V1, UNPREPARE_V1BETA1, Method
from dra.plugin.call_pool import CallPool
from dra.plugin.server import Behaviour
from dra.telemetry.log import bound, error_fields, get_logger

log = get_logger()

# The kubelet shows an entry's error in an Event, which holds 1024 bytes with its own words in front.
MAX_ERROR_CHARACTERS = 800
# Prepares that are worked on at once: a call that waits for the lock of its GPU is one, too, and 16 GPUs may have four
# claims each.
MAX_PREPARES = 64
# Prepares that wait for their turn have a thread as well, so that each is answered in time: more than a node's pods.
MAX_PREPARE_THREADS = 320
# An unprepare never waits for the API.
MAX_UNPREPARE_THREADS = 32
# How long a prepare waits for its turn. What follows may take some 20 s, and the kubelet gives up after 45.
TURN_SECONDS = 20.0
# How often a call that waits looks whether its caller is still there.
_LOOK_SECONDS = 1.0


class Prepared(Protocol):
    """One device of a prepared claim, as the kubelet is told about it."""

    @property
    def request_names(self) -> tuple[str, ...]: ...
    @property
    def pool(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def cdi_ids(self) -> tuple[str, ...]: ...
    @property
    def share_id(self) -> str | None: ...


class Engine(Protocol):
    """What prepares claims. Both calls are safe from several threads and never raise for a single claim."""

    def prepare(
        self, refs: Sequence[ClaimRef], *, within_seconds: float | None = None
    ) -> Mapping[str, Sequence[Prepared] | DraError]:
        """Give devices or an error for each UID."""

    def unprepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, DraError | None]:
        """Give None or an error for each UID."""


OnFailure = Callable[[str, ClaimRef, DraError], None]
# Runs around a call: is told the verb, and gives a list that takes the errors of its claims.
Measure = Callable[[str], AbstractContextManager[list[DraError]]]


def unmeasured(_verb: str) -> AbstractContextManager[list[DraError]]:
    """Measure nothing."""
    return contextlib.nullcontext([])


class PrepareService:
    """The prepare methods of both versions; messages differ only in their classes and in `share_id`.

    An API that hangs holds up prepares. Unprepares have threads of their own, so that pods end all the same, and
    prepares are answered in the driver's words before the kubelet gives up, however many wait.

    Args:
        engine: does the work.
        on_failure: told of each claim's failure: the verb, the claim, the error. It must not wait.
        measure: runs around each call with claims.
        max_prepares: prepares with claims that are worked on at once.
        turn_seconds: how long another one waits for its turn.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_failure: OnFailure = lambda _verb, _ref, _error: None,
        measure: Measure = unmeasured,
        max_prepares: int = MAX_PREPARES,
        turn_seconds: float = TURN_SECONDS,
    ) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._measure = measure
        self._turns = threading.BoundedSemaphore(max_prepares)
        self._max_prepares, self._turn_seconds = max_prepares, turn_seconds
        self._preparing = CallPool("prepare", threads=MAX_PREPARE_THREADS)
        self.pool = CallPool("unprepare", threads=MAX_UNPREPARE_THREADS)

    def methods(self) -> tuple[tuple[Method, Behaviour], ...]:
        """Give the methods for a server whose own pool is `pool`; the server opens that of a method."""
        return (
            *((method, self._prepare_behaviour(method)) for method in (PREPARE_V1, PREPARE_V1BETA1)),
            (UNPREPARE_V1, lambda request, context: self._unprepare(UNPREPARE_V1, request, context)),
            (
                UNPREPARE_V1BETA1,
                lambda request, context: self._unprepare(UNPREPARE_V1BETA1, request, context),
            ),
        )

    def shut(self) -> None:
        """Let the threads go. Call after the server has stopped."""
        self._preparing.shutdown()
        self.pool.shutdown()

    def _prepare_behaviour(self, method: Method) -> Behaviour:
        def prepare(request: Any, context: grpc.ServicerContext) -> Any:
            return self._prepare(method, request, context)

        # Source: grpcio's per-method pool.
        prepare.experimental_thread_pool = self._preparing  # type: ignore[attr-defined]
        return prepare

    def _prepare(self, method: Method, request: Any, context: grpc.ServicerContext) -> Any:
        response: Any = method.response()
        refs = _refs(request)
        if not refs:
            return response  # a probe
        with self._measure("prepare") as errors:
            outcomes = self._prepare_in_turn(refs, context)
            errors += [outcome for outcome in outcomes.values() if isinstance(outcome, DraError)]
        for uid, outcome in outcomes.items():
            _fill_prepared(response, uid, outcome, with_share_id=method is PREPARE_V1)
        return response

    def _prepare_in_turn(self, refs: Sequence[ClaimRef], context: grpc.ServicerContext) -> dict[str, Any]:
        refusal = self._wait_for_turn(context)
        if refusal is not None:
            return self._refuse(refs, refusal)
        try:
            # The kubelet's clock ran while this call waited for its turn.
            left = context.time_remaining()
            return self._outcomes("prepare", refs, lambda: self._engine.prepare(refs, within_seconds=left))
        finally:
            self._turns.release()

    def _wait_for_turn(self, context: grpc.ServicerContext) -> DraError | None:
        """Take a turn, which the caller gives back; an error if there is none in time or nobody waits any more."""
        began = time.monotonic()
        left = context.time_remaining()
        # A caller with little time gets its answer within that.
        patience = self._turn_seconds if left is None else min(self._turn_seconds, left / 2)
        taken = False
        while not taken and context.is_active() and (rest := began + patience - time.monotonic()) >= 0:
            taken = self._turns.acquire(timeout=min(rest, _LOOK_SECONDS))
        if not context.is_active():
            if taken:
                self._turns.release()
            return _LEFT
        if taken:
            return None
        return HostError(
            "DRA-PREPARE-BUSY",
            f"{self._max_prepares} other prepare calls of this node are still being worked on; "
            f"this one had no turn within {patience:.0f} s",
            remedy="The kubelet tries again by itself; the errors of the other pods say what holds them up, "
            "most often an API server that does not answer this node.",
        )

    def _refuse(self, refs: Sequence[ClaimRef], error: DraError) -> dict[str, Any]:
        for ref in refs:
            if error is not _LEFT:
                self._on_failure("prepare", ref, error)
            log.warning(
                "prepare_not_begun", **{"claim": str(ref), "claim_uid": ref.uid, **error_fields(error)}
            )
        return {ref.uid: error for ref in refs}

    def _unprepare(self, method: Method, request: Any, _context: grpc.ServicerContext) -> Any:
        response: Any = method.response()
        refs = _refs(request)
        if not refs:
            return response
        with self._measure("unprepare") as errors:
            outcomes = self._outcomes("unprepare", refs, lambda: self._engine.unprepare(refs))
            errors += [outcome for outcome in outcomes.values() if outcome is not None]
        for uid, error in outcomes.items():
            entry = response.claims[uid]
            if error is not None:
                entry.error = _text(error)
        return response

    def _outcomes(self, verb: str, refs: Sequence[ClaimRef], ask: Callable[[], Any]) -> dict[str, Any]:
        """Ask the engine; gives what it answered for each of these claims, and nothing else."""
        with bound(rpc=verb, **_about(refs)):
            started = time.monotonic()
            answers = self._ask(ask, refs)
            outcomes = {ref.uid: answers.get(ref.uid, _MISSING) for ref in refs}
            failed = [(ref, error) for ref in refs if isinstance(error := outcomes[ref.uid], DraError)]
            for ref, error in failed:
                self._on_failure(verb, ref, error)
            # The engine tells of each claim; this is the whole call as the kubelet waited for it.
            log.debug(
                "call_answered",
                claims=len(refs),
                failed=len(failed),
                duration_ms=round((time.monotonic() - started) * 1000, 1),
            )
        return outcomes

    def _ask(self, call: Callable[[], Any], refs: Sequence[ClaimRef]) -> Mapping[str, Any]:
        # A marked border: whatever escapes the engine becomes the answer for each claim, never a dead call.
        try:
            outcomes: Mapping[str, Any] = call()
        except DraError as error:
            return {ref.uid: error for ref in refs}
        except Exception as error:
            log.exception("engine_failed", **error_fields(error))
            bug = BugError(
                "DRA-BUG",
                f"the driver failed unexpectedly: {type(error).__name__}: {error}",
                remedy="The traceback is in the driver's log; please report it.",
                retryable=True,
            )
            return {ref.uid: bug for ref in refs}
        return outcomes


_MISSING = BugError("DRA-BUG", "the engine gave no answer for this claim", retryable=True)
_LEFT = HostError("DRA-PREPARE-LEFT", "the kubelet gave this call up before it had its turn")


def _refs(request: Any) -> list[ClaimRef]:
    """Give the claims of a request, each UID once."""
    by_uid = {claim.uid: ClaimRef(claim.namespace, claim.name, claim.uid) for claim in request.claims}
    return list(by_uid.values())


def _about(refs: Sequence[ClaimRef]) -> dict[str, object]:
    if len(refs) == 1:
        return {"claim": str(refs[0]), "claim_uid": refs[0].uid}
    return {}


def _fill_prepared(
    response: Any, uid: str, outcome: Sequence[Prepared] | DraError, *, with_share_id: bool
) -> None:
    entry = response.claims[uid]  # touching it makes the entry, which a claim without devices needs
    if isinstance(outcome, DraError):
        entry.error = _text(outcome)
        return
    for device in outcome:
        made = entry.devices.add(
            request_names=device.request_names,
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=device.cdi_ids,
        )
        if with_share_id and device.share_id is not None:
            made.share_id = device.share_id


def _text(error: DraError) -> str:
    text = str(error)
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."
