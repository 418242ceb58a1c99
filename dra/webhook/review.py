"""AdmissionReview, version v1: read, decided, answered. Pure, but for what the checks ask.

Every review gets an answer with its UID. What cannot be read is an error for the caller (HTTP 400), not a verdict.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.api.fraction_pods import rewrite
from dra.api.fractions import FractionRules
from dra.errors import DraError
from dra.webhook.check import Checked, check_object

Json = dict[str, Any]
# Source: admission.k8s.io/v1 AdmissionResponse.warnings: 120 characters each are shown well, 4096 in all are kept.
_WARNING_LENGTH, _WARNINGS_LENGTH = 256, 4096
_DENIED = 403


class ReviewError(Exception):
    """The body is no AdmissionReview that can be answered."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is answered. `patch`: a JSON patch for the object."""

    allowed: bool = True
    message: str = ""
    warnings: Sequence[str] = ()
    patch: Sequence[Json] = field(default=())


Decide = Callable[[Mapping[str, Any]], Verdict]


def answer(body: bytes, decide: Decide) -> bytes:
    """Give the AdmissionReview that answers one.

    Raises:
        ReviewError: it is none of admission.k8s.io/v1.
    """
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ReviewError(f"the body is not JSON: {error}") from error
    request = review.get("request") if isinstance(review, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise ReviewError("the body is no AdmissionReview with a request")
    if review.get("apiVersion") != "admission.k8s.io/v1" or review.get("kind") != "AdmissionReview":
        raise ReviewError(
            f"{review.get('apiVersion')} {review.get('kind')} is not admission.k8s.io/v1 AdmissionReview"
        )
    response = {"uid": request["uid"], **_response(decide(request))}
    return json.dumps(
        {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}
    ).encode()


def _response(verdict: Verdict) -> Json:
    response: Json = {"allowed": verdict.allowed}
    if not verdict.allowed:
        response["status"] = {"code": _DENIED, "reason": "Forbidden", "message": verdict.message}
    warnings = _fitting(verdict.warnings)
    if warnings:
        response["warnings"] = warnings
    if verdict.allowed and verdict.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(list(verdict.patch)).encode()).decode()
    return response


def _fitting(warnings: Sequence[str]) -> list[str]:
    found: list[str] = []
    left = _WARNINGS_LENGTH
    for warning in dict.fromkeys(warnings):
        text = " ".join(warning.split())
        text = text if len(text) <= _WARNING_LENGTH else text[: _WARNING_LENGTH - 1] + "…"
        left -= len(text.encode())
        if left < 0:
            break
        found.append(text)
    return found


def _is_ending(obj: Json) -> bool:
    metadata = obj.get("metadata")
    return isinstance(metadata, dict) and bool(metadata.get("deletionTimestamp"))


def validate(request: Mapping[str, Any]) -> Verdict:
    """Decide about a claim, a template or a class: refused is what prepare would refuse."""
    obj, old = request.get("object"), request.get("oldObject")
    if request.get("operation") not in ("CREATE", "UPDATE") or not isinstance(obj, dict):
        return Verdict()
    if _is_ending(obj):
        return Verdict()
    if isinstance(old, dict) and old.get("spec") == obj.get("spec"):
        # What is stored already must stay changeable: a finalizer, a label.
        return Verdict()
    checked: Checked = check_object(obj)
    if not checked.errors:
        return Verdict(warnings=checked.warnings)
    count = len(checked.errors)
    more = f"{count} configurations are wrong: " if count > 1 else ""
    return Verdict(False, f"{more}{'; '.join(checked.errors)}"[:4096], checked.warnings)


def mutate(request: Mapping[str, Any], rules: FractionRules) -> Verdict:
    """Decide about a pod or a workload: fractions of GPUs become claims."""
    obj = request.get("object")
    operation = request.get("operation")
    if operation not in ("CREATE", "UPDATE") or not isinstance(obj, dict) or request.get("subResource"):
        return Verdict()
    if obj.get("kind") == "Pod" and operation != "CREATE":
        return Verdict()
    if _is_ending(obj):
        return Verdict()
    try:
        return Verdict(patch=rewrite(obj, rules))
    except DraError as error:
        return Verdict(False, f"{error.code}: {error.message}. {error.remedy}")
