"""The prepare and unprepare calls, in both versions, over one engine.

Each claim of a request gets an entry in the answer and no other claim does; one claim's failure is its own entry.
A gRPC status is never used for a claim. Source: kubelet DRA manager, NodePrepareResources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from dra.api.claim import ClaimRef
from dra.errors import BugError, DraError
from dra.pb.services import PREPARE_V1, PREPARE_V1BETA1, UNPREPARE_V1, UNPREPARE_V1BETA1, Method
from dra.plugin.server import Behaviour
from dra.telemetry.log import bound, error_fields, get_logger

log = get_logger()

# The kubelet shows an entry's error in an Event, which holds 1024 bytes with its own words in front.
MAX_ERROR_CHARACTERS = 800


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

    def prepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, Sequence[Prepared] | DraError]:
        """Give devices or an error for each UID."""

    def unprepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, DraError | None]:
        """Give None or an error for each UID."""


OnFailure = Callable[[str, ClaimRef, DraError], None]


class PrepareService:
    """The prepare methods of both versions; messages differ only in their classes and in `share_id`.

    `on_failure` is told of each claim's failure: the verb, the claim, the error. It must not wait.
    """

    def __init__(self, engine: Engine, *, on_failure: OnFailure = lambda _verb, _ref, _error: None) -> None:
        self._engine = engine
        self._on_failure = on_failure

    def methods(self) -> tuple[tuple[Method, Behaviour], ...]:
        """Give the methods for a server."""
        return (
            (PREPARE_V1, lambda request, context: self._prepare(PREPARE_V1, request, context)),
            (PREPARE_V1BETA1, lambda request, context: self._prepare(PREPARE_V1BETA1, request, context)),
            (UNPREPARE_V1, lambda request, context: self._unprepare(UNPREPARE_V1, request, context)),
            (
                UNPREPARE_V1BETA1,
                lambda request, context: self._unprepare(UNPREPARE_V1BETA1, request, context),
            ),
        )

    def _prepare(self, method: Method, request: Any, _context: grpc.ServicerContext) -> Any:
        response: Any = method.response()
        outcomes = self._outcomes("prepare", request)
        for uid, outcome in outcomes.items():
            _fill_prepared(response, uid, outcome, with_share_id=method is PREPARE_V1)
        return response

    def _unprepare(self, method: Method, request: Any, _context: grpc.ServicerContext) -> Any:
        response: Any = method.response()
        for uid, error in self._outcomes("unprepare", request).items():
            entry = response.claims[uid]
            if error is not None:
                entry.error = _text(error)
        return response

    def _outcomes(self, verb: str, request: Any) -> dict[str, Any]:
        """Ask the engine; gives what it answered for each claim of the request, and nothing else."""
        refs = _refs(request)
        if not refs:
            return {}  # a probe
        with bound(rpc=verb, **_about(refs)):
            started = time.monotonic()
            answers = self._ask(self._engine.prepare if verb == "prepare" else self._engine.unprepare, refs)
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

    def _ask(self, call: Any, refs: Sequence[ClaimRef]) -> Mapping[str, Any]:
        # A marked border: whatever escapes the engine becomes the answer for each claim, never a dead call.
        try:
            outcomes: Mapping[str, Any] = call(refs)
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


def new_pool(threads: int = 64) -> ThreadPoolExecutor:
    """Give the pool of the service server: threads are made when needed. Pods are prepared in parallel.

    A call that waits for the lock of its GPU has a thread too: 16 GPUs with four claims each.
    """
    return ThreadPoolExecutor(threads, thread_name_prefix="service")
