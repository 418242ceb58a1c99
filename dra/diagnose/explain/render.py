"""An explanation as text, short or wide, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra.diagnose.explain.devices import detail_of
from dra.diagnose.explain.model import STAGES, Explanation, NodeOutcome, Reason, RequestOutcome
from dra.values.words import counted

# Causes in the short form.
MAX_REASONS = 4
# Beside a cause that is nearer to success these need no more than their line.
_SIDE = {"no-match", "no-devices", "claim-elsewhere"}
_WORDS = {"Pod": "pod", "ResourceClaim": "claim"}
_STAGE_WORDS = {
    "pool": "in pools that are not whole", "class": "not of the class", "selector": "refused by a selector",
    "error": "with a failing selector", "unjudged": "not looked at", "capacity": "too small", "held": "held", "short": "short of shared counters",
    "taint": "tainted", "free": "free",
}  # fmt: skip


def text(answer: Explanation, *, wide: bool = False) -> str:
    """Write it for people: the verdict, then what to do; `wide` with every node and device."""
    return "\n".join(_lines(answer, wide=wide))


def _lines(answer: Explanation, *, wide: bool) -> Iterator[str]:
    who = f"{_WORDS[answer.kind]} {answer.namespace}/{answer.name}"
    joint = f" is {answer.state}: " if answer.state == "pending" else ": "
    yield f"{who}{joint}{answer.verdict}"
    reasons = answer.reasons if wide else answer.reasons[:MAX_REASONS]
    for number, reason in enumerate(reasons):
        first = number == 0 or answer.verdict.endswith(reason.message)
        if not answer.verdict.endswith(reason.message):
            yield f"also: {reason.message}"
        if first or wide or reason.code not in _SIDE:
            yield from _reason(reason)
    if len(answer.reasons) > len(reasons):
        yield f"… and {counted(len(answer.reasons) - len(reasons), 'more cause')} (-o wide)"
    if answer.scheduler_message and (wide or any(reason.code == "fits-now" for reason in answer.reasons)):
        yield f"scheduler: {answer.scheduler_message}"
    if wide:
        for node in answer.nodes:
            yield from _node(node)
    for warning in answer.warnings:
        yield f"warning: {warning}"
    for kind, why in answer.unread.items():
        yield f"not known: {kind}s {why}"


def _reason(reason: Reason) -> Iterator[str]:
    for line in reason.details:
        yield f"  {line}"
    if reason.remedy:
        yield f"  to do: {reason.remedy}"


def _node(node: NodeOutcome) -> Iterator[str]:
    fits = {True: "devices free", False: "devices not to be had", None: "not decided"}[node.fits]
    yield f"node {node.name}: {fits}"
    for obstacle in node.obstacles:
        yield f"  pod: {obstacle.text} ({obstacle.detail})"
    for reason in node.reasons:
        about = f"{reason.claim}/{reason.request}: " if reason.request else ""
        yield f"  {about}{reason.text}"
    for request in node.requests:
        yield from _request(request)


def _request(request: RequestOutcome) -> Iterator[str]:
    counts = ", ".join(
        f"{request.counts[stage]} {_STAGE_WORDS[stage]}" for stage in STAGES if request.counts[stage]
    )
    needed = "all" if request.mode == "All" else str(request.needed)
    yield f"  request {request.claim}/{request.request} needs {needed}: {counts or 'no devices'}"
    for item in request.devices:
        detail = item.detail or detail_of(item.trace)
        yield f"    {item.device.device}: {_STAGE_WORDS[item.stage]}{': ' + detail if detail else ''}"


def as_json(answer: Explanation) -> dict[str, Any]:
    """Give all of it as plain JSON. Keys stay; new ones may be added."""
    return {
        "kind": answer.kind,
        "namespace": answer.namespace,
        "name": answer.name,
        "state": answer.state,
        "verdict": answer.verdict,
        "reasons": [_reason_json(reason) for reason in answer.reasons],
        "claims": [dict(claim) for claim in answer.claims],
        "nodes": [_node_json(node) for node in answer.nodes],
        "schedulerMessage": answer.scheduler_message,
        "warnings": list(answer.warnings),
        "notKnown": dict(answer.unread),
    }


def _reason_json(reason: Reason) -> dict[str, Any]:
    return {
        "code": reason.code,
        "message": reason.message,
        "remedy": reason.remedy,
        "details": list(reason.details),
        "claim": reason.claim,
        "request": reason.request,
        "nodes": list(reason.nodes),
    }


def _node_json(node: NodeOutcome) -> dict[str, Any]:
    return {
        "name": node.name,
        "devicesFit": node.fits,
        "obstacles": [
            {"kind": item.kind, "text": item.text, "detail": item.detail} for item in node.obstacles
        ],
        "reasons": [
            {"code": item.code, "claim": item.claim, "request": item.request, "text": item.text}
            for item in node.reasons
        ],
        "requests": [_request_json(request) for request in node.requests],
    }


def _request_json(request: RequestOutcome) -> dict[str, Any]:
    return {
        "claim": request.claim,
        "request": request.request,
        "mode": request.mode,
        "needed": request.needed,
        "counts": {stage: request.counts[stage] for stage in STAGES if request.counts[stage]},
        "devices": [
            {
                "driver": item.device.driver,
                "pool": item.device.pool,
                "device": item.device.device,
                "stage": item.stage,
                "detail": item.detail or detail_of(item.trace),
            }
            for item in request.devices
        ],
    }
