"""The claims of one call: each is on its own, and what one of them meets is its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from dra.api.claim import ClaimRef
from dra.errors import BugError, DraError, HostError
from dra.prepare.workers import WorkerPool
from dra.telemetry.log import error_fields, get_logger

T = TypeVar("T")

log = get_logger()


def for_each(refs: Sequence[ClaimRef], call: Callable[[ClaimRef], T], *, pool: WorkerPool) -> dict[str, T]:
    """Call for each claim at once; one after the other where the system gives no threads. Give the answers by UID.

    A claim that is named twice is called for once. The first one is this thread's own.
    """
    wanted = list({ref.uid: ref for ref in refs}.values())
    alone = wanted[:1]
    futures: dict[str, Future[T]] = {}
    for ref in wanted[1:]:
        try:
            futures[ref.uid] = pool.submit(lambda ref=ref: call(ref))  # type: ignore[misc]
        except HostError:
            alone.append(ref)
    outcomes = {ref.uid: call(ref) for ref in alone}
    return {**outcomes, **{uid: future.result() for uid, future in futures.items()}}


def as_dra_error(error: Exception, *, verb: str, ref: ClaimRef) -> DraError:
    """Give what a caller may be told of a claim that failed; what nobody foresaw is a bug (DRA-BUG), and logged."""
    if isinstance(error, DraError):
        return error
    log.error("claim_bug", claim=str(ref), claim_uid=ref.uid, exc_info=error)
    return BugError(
        "DRA-BUG",
        f"the {verb} of claim {ref} met a bug: {type(error).__name__}: {error}",
        remedy="Report it with the plugin's log.",
        retryable=True,
        claim_uid=ref.uid,
    )


def fields_of(error: DraError) -> dict[str, object]:
    """Give an error's fields for a log line that names the claim itself."""
    return {key: value for key, value in error_fields(error).items() if key not in ("claim", "claim_uid")}


def ms_since(began: float) -> float:
    """Give how many milliseconds ago `began` (by `time.monotonic`) was, for the log."""
    return round((time.monotonic() - began) * 1000, 2)


def claim_busy(ref: ClaimRef) -> HostError:
    """Make the error for a claim whose record changes whenever it is looked at."""
    return HostError(
        "DRA-CLAIM-BUSY",
        f"claim {ref} was prepared and unprepared by others again and again",
        remedy="The call is retried by itself.",
        claim_uid=ref.uid,
    )
