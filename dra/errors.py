"""The error tree.

Every error that can reach a user is a `DraError`: it has a stable code (`DRA-<SLUG>`), a message that names
the object and the reason, and a remedy that says what to do. The same text goes to the gRPC response, the
Event, the log and `doctor`. Adapters translate foreign exceptions here (`raise ... from`), so that nothing
above them catches `NVMLError`, `ApiException`, `RpcError` or `OSError`.
"""

from __future__ import annotations

from typing import ClassVar


class DraError(Exception):
    """Base of all errors that a user can meet.

    Args:
        code: stable slug, upper case, `DRA-` in front (`DRA-DEVICE-HELD`).
        message: one sentence without a newline: the object, then the reason. What users wrote may stand in it as it
            is: characters that do not print (controls, marks that turn the direction of text, lone surrogates) are
            shown as escapes.
        remedy: what the reader can do; empty only where nothing can be done.
        retryable: the same call may succeed later without anybody changing the request.
        fields: values for the log line (claim_uid, device, path, ...).
    """

    default_retryable: ClassVar[bool] = False

    def __init__(
        self, code: str, message: str, *, remedy: str = "", retryable: bool | None = None, **fields: object
    ) -> None:
        self.code = code
        self.message = printable(message)
        self.remedy = printable(remedy)
        super().__init__(self.message)
        self.retryable = self.default_retryable if retryable is None else retryable
        self.fields = fields

    def __str__(self) -> str:
        """Give the text a user reads: `DRA-CODE: message. Remedy.`"""
        text = f"{self.code}: {self.message.rstrip('.')}"
        return f"{text}. {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.remedy, self.retryable, self.fields))


def printable(text: str) -> str:
    """Give a text in one line, with an escape (as for U+202E) for each character that does not print.

    Letters of all scripts stay. A text that is given twice stays as it is.
    """
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in line
    )


def _rebuild(
    cls: type[DraError], code: str, message: str, remedy: str, retryable: bool, fields: dict[str, object]
) -> DraError:
    return cls(code, message, remedy=remedy, retryable=retryable, **fields)


class ValueFormatError(DraError, ValueError):
    """A quantity, version, name or address does not have the form its grammar asks for."""


class ConfigError(DraError):
    """What a user or an administrator wrote (opaque parameters, flags, policies) is invalid."""


class ClaimError(DraError):
    """A ResourceClaim cannot be used as it stands in the API."""


class DeviceError(DraError):
    """A device is unknown, held by another claim, lost or refuses what was asked of it."""


class StackError(DraError):
    """The NVIDIA stack of the node (library, kernel module, driver root) is missing or inconsistent."""

    default_retryable = True


class HostError(DraError):
    """The node's file system or operating system refused something."""

    default_retryable = True


class KubeError(DraError):
    """The API server refused, or could not be reached.

    `status` is the HTTP status, 0 if there was no answer; `reason` the Status object's reason.
    """

    default_retryable = True

    def __init__(
        self,
        code: str,
        message: str,
        *,
        remedy: str = "",
        retryable: bool | None = None,
        status: int = 0,
        reason: str = "",
        retry_after_seconds: float | None = None,
        **fields: object,
    ) -> None:
        super().__init__(code, message, remedy=remedy, retryable=retryable, **fields)
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _rebuild_kube,
            (self.code, self.message, self.remedy, self.retryable, self.status, self.reason,
             self.retry_after_seconds, self.fields),
        )  # fmt: skip


def _rebuild_kube(
    code: str,
    message: str,
    remedy: str,
    retryable: bool,
    status: int,
    reason: str,
    retry_after_seconds: float | None,
    fields: dict[str, object],
) -> KubeError:
    return KubeError(
        code, message, remedy=remedy, retryable=retryable, status=status, reason=reason,
        retry_after_seconds=retry_after_seconds, **fields,
    )  # fmt: skip


class RecordError(DraError):
    """A claim record on disk cannot be read or written."""


class BugError(DraError):
    """Something that cannot happen did; counted and logged with a traceback, the process stays up."""
