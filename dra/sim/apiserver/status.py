"""Failures as the API server words them: Status objects with reason, details and causes.

Source: k8s.io/apimachinery/pkg/api/errors and meta/v1 Status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dra.api.rules.cause import Cause

Json = dict[str, Any]


class ApiFailure(Exception):  # noqa: N818 - the answer, not a bug
    """An answer that is a failed Status; `headers` go out with it."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: Json | None = None,
        metadata: Json | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.metadata = metadata or {}
        self.headers: dict[str, str] = {}
        self.warnings: list[str] = []

    def body(self) -> Json:
        """Give the Status object."""
        status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata,
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        status["code"] = self.code
        return status


def qualified(resource: str, group: str) -> str:
    """Give `resourceslices.resource.k8s.io`, or `pods` for the core group."""
    return f"{resource}.{group}" if group else resource


def _details(name: str, group: str, kind: str, **more: Any) -> Json:
    details: Json = {}
    if name:
        details["name"] = name
    if group:
        details["group"] = group
    if kind:
        details["kind"] = kind
    details.update(more)
    return details


def bad_request(message: str) -> ApiFailure:
    """400 BadRequest."""
    return ApiFailure(400, "BadRequest", message)


def unauthorized() -> ApiFailure:
    """401 Unauthorized."""
    return ApiFailure(401, "Unauthorized", "Unauthorized")


def forbidden(resource: str, group: str, name: str, why: str) -> ApiFailure:
    """403 Forbidden: `resource "name" is forbidden: why`."""
    quoted = f' "{name}"' if name else ""
    return ApiFailure(
        403,
        "Forbidden",
        f"{qualified(resource, group)}{quoted} is forbidden: {why}",
        details=_details(name, group, resource),
    )


def not_found(resource: str, group: str, name: str) -> ApiFailure:
    """404 for an object."""
    return ApiFailure(
        404,
        "NotFound",
        f'{qualified(resource, group)} "{name}" not found',
        details=_details(name, group, resource),
    )


def no_such_resource() -> ApiFailure:
    """404 for a path that no resource answers."""
    return ApiFailure(404, "NotFound", "the server could not find the requested resource", details={})


def method_not_allowed() -> ApiFailure:
    """405."""
    return ApiFailure(
        405, "MethodNotAllowed", "the server does not allow this method on the requested resource", details={}
    )


def already_exists(resource: str, group: str, name: str, *, prefix: str = "") -> ApiFailure:
    """409 AlreadyExists."""
    return ApiFailure(
        409,
        "AlreadyExists",
        f'{prefix}{qualified(resource, group)} "{name}" already exists',
        details=_details(name, group, resource),
    )


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(resource: str, group: str, name: str, why: str = MODIFIED) -> ApiFailure:
    """409 Conflict."""
    return ApiFailure(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {qualified(resource, group)} "{name}": {why}',
        details=_details(name, group, resource),
    )


def expired(message: str, *, continue_token: str = "") -> ApiFailure:
    """410 Expired."""
    return ApiFailure(
        410, "Expired", message, metadata={"continue": continue_token} if continue_token else None
    )


def invalid(kind: str, group: str, name: str, causes: Sequence[Cause]) -> ApiFailure:
    """422 Invalid; several findings are listed in brackets, each once in the message."""
    texts: list[str] = []
    for cause in causes:
        if str(cause) not in texts:
            texts.append(str(cause))
    listing = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    return ApiFailure(
        422,
        "Invalid",
        f'{qualified(kind, group)} "{name}" is invalid: {listing}',
        details=_details(name, group, kind, causes=[cause.to_json() for cause in causes]),
    )


def rejected_patch() -> ApiFailure:
    """422 for a JSON patch that does not fit the object."""
    return ApiFailure(
        422, "Invalid", "the server rejected our request due to an error in our request", details={}
    )


def too_large_version(wanted: int, current: int) -> ApiFailure:
    """504 for a resource version of the future."""
    failure = ApiFailure(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {wanted}, current: {current}",
        details={
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1,
        },
    )
    failure.headers["Retry-After"] = "1"
    return failure


def internal_error(text: str) -> ApiFailure:
    """500 InternalError, as NewInternalError words it."""
    return ApiFailure(
        500, "InternalError", f"Internal error occurred: {text}", details={"causes": [{"message": text}]}
    )


def internal(message: str) -> ApiFailure:
    """500 as the server words an error that it does not know: no reason, no details."""
    return ApiFailure(500, "", message)
