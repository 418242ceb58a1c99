"""What went wrong between us and the API server, as `KubeError`.

Two translations: an HTTP answer that is not 2xx (or an ERROR event of a watch), and an exception of the
transport. Source: Kubernetes API conventions, "Response Status Kind"; the exception classes are urllib3's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra.errors import KubeError

# API messages can quote whole objects; more than this helps nobody.
MAX_MESSAGE = 600
_RBAC = re.compile(r'User "(?P<user>[^"]+)" cannot (?P<verb>\S+) (?:resource "(?P<resource>[^"]+)"|path)')


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked for: verb as RBAC writes it, and the object or collection."""

    verb: str
    resource: str
    group: str = ""
    name: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        """Give the sentence subject: `get resourceclaims.resource.k8s.io default/claim-1`."""
        full = f"{self.resource}.{self.group}" if self.group else self.resource
        place = f" {self.namespace}/{self.name}" if self.namespace and self.name else ""
        if not place:
            place = f" {self.name}" if self.name else (f" in {self.namespace}" if self.namespace else "")
        return f"{self.verb} {full}{place}"


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of a Status object's `details.causes`: the field path is in v1 terms."""

    field: str
    reason: str
    message: str


def failure_from_answer(call: Call, status: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    """Give the error for an HTTP answer that is not 2xx."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("kind") != "Status":
        text = body[:MAX_MESSAGE].decode("utf-8", "replace").strip()
        document = {"message": text, "reason": "", "code": status}
    return failure_from_status(call, document, status=status, retry_after=headers.get("Retry-After"))


def failure_from_status(
    call: Call, document: Mapping[str, Any], *, status: int = 0, retry_after: str | None = None
) -> KubeError:
    """Give the error that a Status object describes (the body of an answer, or an ERROR event of a watch)."""
    code = status or int(document.get("code") or 0)
    reason = str(document.get("reason") or "")
    details = document.get("details")
    details = details if isinstance(details, Mapping) else {}
    text = " ".join(str(document.get("message") or f"HTTP {code}").split())[:MAX_MESSAGE]
    seconds = _seconds(retry_after)
    if seconds is None:
        seconds = _seconds(details.get("retryAfterSeconds"))
    meaning = _meaning(call, code, reason, text=text, details=details)
    return KubeError(
        meaning.code,
        f"{call}: {text}" if text else f"{call}: HTTP {code}",
        remedy=meaning.remedy,
        retryable=meaning.retryable,
        status=code,
        reason=reason,
        retry_after_seconds=seconds,
        verb=call.verb,
        resource=call.resource,
        name=call.name,
        causes=_causes(details),
    )


def _causes(details: Mapping[str, Any]) -> tuple[Cause, ...]:
    causes = details.get("causes")
    if not isinstance(causes, list):
        return ()
    return tuple(
        Cause(str(c.get("field") or ""), str(c.get("reason") or ""), str(c.get("message") or ""))
        for c in causes
        if isinstance(c, Mapping)
    )


def _seconds(value: object) -> float | None:
    """Read a Retry-After of seconds; the date form is not used by Kubernetes and is ignored."""
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a status says to a user; `retryable`: whether trying again can help."""

    code: str
    remedy: str = ""
    retryable: bool = True


_MEANINGS = {
    401: _Meaning(
        "DRA-API-UNAUTHORIZED",
        remedy="Check that the service account token (or the kubeconfig's user) is valid; it is read again at each try.",
    ),
    409: _Meaning("DRA-API-CONFLICT"),
    410: _Meaning("DRA-API-GONE"),
    413: _Meaning(
        "DRA-API-TOO-LARGE",
        remedy="The object is larger than the API server accepts; publish fewer devices.",
        retryable=False,
    ),
    422: _Meaning(
        "DRA-API-INVALID", remedy="The fields named in the message break the API's rules.", retryable=False
    ),
    429: _Meaning(
        "DRA-API-THROTTLED", remedy="The API server asks for fewer requests; they are repeated after a pause."
    ),
    503: _Meaning("DRA-API-UNAVAILABLE", remedy="Look at the health of the API server and of its webhooks."),
    504: _Meaning("DRA-API-TIMEOUT", remedy="The API server was too slow; the request is repeated."),
}


def _meaning(call: Call, code: int, reason: str, *, text: str, details: Mapping[str, Any]) -> _Meaning:
    if code == 403:
        return _forbidden(call, text)
    if code == 404:
        return _missing(call, reason, details)
    known = _MEANINGS.get({"Expired": 410, "Timeout": 504}.get(reason, code))
    if known is not None:
        return known
    if code >= 500 or code == 0:
        return _Meaning("DRA-API-INTERNAL", remedy="Look at the API server's log.")
    return _Meaning("DRA-API-BAD-REQUEST", retryable=False)


def _missing(call: Call, reason: str, details: Mapping[str, Any]) -> _Meaning:
    """Tell an object that is gone from the 404 of a proxy, or of a server that does not serve the group.

    Much is released when an object is gone, so that only the whole Status object counts.
    Source: apimachinery's NewNotFound, which gives reason and name; NewGenericServerResponse gives no name.
    """
    named = str(details.get("name") or "") if reason == "NotFound" else ""
    kind = str(details.get("kind") or "")
    if not named:
        return _Meaning(
            "DRA-API-NOT-SERVED",
            remedy=f"Check that the API server serves {call.group or 'v1'} (kubectl api-versions), and that no proxy "
            "answers in its place. The driver tries again by itself.",
        )
    if named != call.name or kind not in ("", call.resource.partition("/")[0]):
        return _Meaning(
            "DRA-API-OTHER-NOT-FOUND",
            remedy=f"{kind or 'object'} {named} is missing. The driver tries again by itself.",
        )
    return _Meaning("DRA-API-NOT-FOUND", retryable=False)


def _forbidden(call: Call, text: str) -> _Meaning:
    match = _RBAC.search(text)
    if match is None:
        return _Meaning(
            "DRA-API-FORBIDDEN",
            remedy="An admission policy or a namespace that is being deleted refused this; the message says which.",
        )
    resource = match["resource"] or call.resource
    group = f'API group "{call.group}"' if call.group else "the core API group"
    return _Meaning(
        "DRA-API-FORBIDDEN",
        remedy=f'Give {match["user"]} the verb "{match["verb"]}" on "{resource}" in {group} (a rule of its ClusterRole).',
    )


def failure_from_exception(call: Call, error: BaseException, *, host: str) -> KubeError | None:
    """Give the error for an exception of the transport, or None if it is not one of those."""
    from urllib3 import exceptions as http

    def failure(code: str, text: str, remedy: str, *, refused: bool = False) -> KubeError:
        return KubeError(
            code,
            f"{call}: {text}",
            remedy=remedy,
            verb=call.verb,
            resource=call.resource,
            name=call.name,
            refused=refused,
        )

    cause: BaseException = error
    if isinstance(error, http.MaxRetryError) and error.reason is not None:
        cause = error.reason
    if isinstance(cause, (http.NewConnectionError, http.ConnectTimeoutError, http.ProxyError)):
        refused = "refused" in str(cause).lower()
        return failure(
            "DRA-API-UNREACHABLE",
            f"cannot connect to {host}: {_short(cause)}",
            "Check that the API server runs and that this node reaches it. The driver tries again by itself.",
            refused=refused,
        )
    if isinstance(cause, (http.ReadTimeoutError, TimeoutError)):
        return failure(
            "DRA-API-TIMEOUT",
            f"no answer from {host} in time",
            "Check the API server's load. The driver tries again by itself.",
        )
    if isinstance(cause, (http.SSLError,)) or type(cause).__name__ == "SSLError":
        return failure(
            "DRA-API-TLS",
            f"TLS with {host} failed: {_short(cause)}",
            "Check the cluster's CA certificate and this node's clock.",
        )
    if isinstance(cause, (http.HTTPError, ConnectionError)):
        return failure(
            "DRA-API-INTERRUPTED", f"the connection to {host} broke: {_short(cause)}", "It is tried again."
        )
    return None


def _short(error: BaseException) -> str:
    text = str(error)
    # urllib3 puts the repr of its connection object in front.
    text = re.sub(r"^.*?(?:object at 0x[0-9a-f]+>|\)): ", "", text)
    return " ".join(text.split())[:200] or type(error).__name__
