"""Whether a claim that this node has a record of is still wanted here. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dra.api.claim import ClaimView
from dra.prepare.record import Record

# The kubelet itself unprepares claims of vanished pods once a minute, and until then takes the claim for
# prepared: a pod that comes to share it in that minute must still find its CDI spec.
UNRESERVED_PATIENCE_SECONDS = 150.0


@dataclass(frozen=True, slots=True)
class Stale:
    """Why a record is no longer wanted. It is released once that has been so for `patience_seconds`."""

    reason: str
    patience_seconds: float = 0.0


def judge_record(record: Record, view: ClaimView | None) -> Stale | None:
    """Compare a record with its claim in the API (None: there is none); None if all is well.

    Source: life of a claim in KEP-4381; a node that was lost, a pod that was force-deleted or a reboot ends a
    claim without the kubelet's unprepare.
    """
    if view is None:
        return Stale("the claim was deleted")
    if view.ref.uid != record.ref.uid:
        return Stale("the claim was deleted and made anew")
    if not view.allocated:
        return Stale("the claim is no longer allocated")
    allocated = {(result.pool, result.device, result.share_id) for result in view.results}
    if not any((result.pool, result.device, result.share_id) in allocated for result in record.results):
        return Stale("the claim is allocated other devices now")
    if not view.reserved_for:
        return Stale("the claim is reserved for no pod", UNRESERVED_PATIENCE_SECONDS)
    return None
