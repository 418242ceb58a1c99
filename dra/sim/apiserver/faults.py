"""Faults that tests and `dra sim fault` switch on: what the server does instead of answering properly.

A fault has a pattern (method, path as a regular expression, watch or not), a number of requests it hits, and what
to do. The first fault that fits and has hits left is taken.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["delay", "error", "drop", "freeze", "stall", "close", "gone"]


@dataclass(slots=True)
class Fault:
    """One switched-on fault.

    kind:
        delay: wait `seconds`, then answer properly.
        error: answer `code` with `reason`; `retry_after` seconds become the header, `causes` the details.
        close: close the connection without an answer.
        drop: answer, but break the connection after `after_bytes` of the body.
        freeze: never answer, until the fault is cleared or the server stops.
        stall: watches only: open the stream and stay silent.
        gone: watches only: open the stream and send an ERROR event with 410.

    `body` is a regular expression: only requests whose body it finds are hit.
    """

    kind: Kind
    method: str = "*"
    path: str = ".*"
    times: int | None = None
    code: int = 500
    reason: str = "InternalError"
    message: str = ""
    retry_after: int | None = None
    seconds: float = 0.0
    after_bytes: int = 20
    watch: bool | None = None
    body: str = ""
    causes: tuple[dict[str, str], ...] = ()
    hits: int = 0
    cleared: threading.Event = field(default_factory=threading.Event)

    def fits(self, method: str, target: str, *, watch: bool, body: bytes = b"") -> bool:
        """Whether the fault is meant for this request."""
        wanted = self.watch if self.watch is not None else (True if self.kind in {"stall", "gone"} else None)
        if wanted is not None and wanted != watch:
            return False
        if self.body and re.search(self.body.encode(), body) is None:
            return False
        return self.method in {"*", method} and re.search(self.path, target) is not None


class Faults:
    """The faults that are on. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._refusing = threading.Event()

    def set(self, kind: Kind, **settings: object) -> Fault:
        """Switch a fault on and give it (see `Fault` for the settings).

        Example: `faults.set("error", method="PATCH", path="/resourceslices", code=429, retry_after=1, times=3)`.
        """
        fault = Fault(kind, **settings)  # type: ignore[arg-type]
        if fault.kind == "error" and "reason" not in settings:
            fault.reason = _REASONS.get(fault.code, "InternalError")
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self, fault: Fault | None = None) -> None:
        """Switch one fault off, or all; frozen requests are let go (their connections close)."""
        with self._lock:
            gone = [f for f in self._faults if fault is None or f is fault]
            self._faults = [f for f in self._faults if f not in gone]
            if fault is None:
                self._refusing.clear()
        for one in gone:
            one.cleared.set()

    def refuse(self, *, on: bool = True) -> None:
        """Close every new connection at once, as a server that is down would; `clear` ends it."""
        if on:
            self._refusing.set()
        else:
            self._refusing.clear()

    @property
    def refusing(self) -> bool:
        """Whether new connections are closed at once."""
        return self._refusing.is_set()

    def on(self) -> list[Fault]:
        """Give the faults that may still hit."""
        with self._lock:
            return [fault for fault in self._faults if fault.times is None or fault.hits < fault.times]

    def take(self, method: str, target: str, *, watch: bool, body: bytes = b"") -> Fault | None:
        """Give the fault that this request meets, and count the hit."""
        with self._lock:
            for fault in self._faults:
                if fault.fits(method, target, watch=watch, body=body) and (
                    fault.times is None or fault.hits < fault.times
                ):
                    fault.hits += 1
                    return fault
        return None


_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired",
    422: "Invalid", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Logged:
    """One request in the log. `status` is 0 where no answer went out; `at` comes from the server's clock."""

    method: str
    path: str
    target: str
    status: int
    user_agent: str
    body: bytes
    at: float
    watch: bool = False


class RequestLog:
    """Every request since the start or the last `clear`, for tests that count calls. Safe for threads."""

    def __init__(self, *, keep: int = 50_000) -> None:
        self._lock = threading.Lock()
        self._entries: list[Logged] = []
        self._keep = keep

    def add(self, entry: Logged) -> None:
        """Note a request."""
        with self._lock:
            self._entries.append(entry)
            if len(self._entries) > self._keep:
                del self._entries[: self._keep // 10]

    def all(self) -> list[Logged]:
        """Give the requests, oldest first."""
        with self._lock:
            return list(self._entries)

    def count(self, method: str = "*", path: str = ".*", *, watch: bool | None = None) -> int:
        """Give how many requests had this method and a target that the expression finds."""
        return len(self.find(method, path, watch=watch))

    def find(self, method: str = "*", path: str = ".*", *, watch: bool | None = None) -> list[Logged]:
        """Give the requests with this method and a target that the expression finds."""
        pattern = re.compile(path)
        return [
            entry
            for entry in self.all()
            if method in {"*", entry.method}
            and pattern.search(entry.target)
            and (watch is None or entry.watch == watch)
        ]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()
