"""One request and one response, apart from sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

Json = dict[str, Any]


@dataclass(slots=True)
class Request:
    """A request as it came in; header names are lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""
    path: str = field(init=False)
    query: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.target)
        self.path = unquote(parts.path)
        self.query = {}
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            self.query.setdefault(key, value)

    def flag(self, name: str) -> bool:
        """Whether a query parameter is on: anything but absent, `0` and `false` (as the server converts booleans)."""
        return name in self.query and self.query[name].lower() not in {"0", "false"}


@dataclass(slots=True)
class Response:
    """An answer: a body, or a `stream` of chunks that ends the connection's current exchange when it is exhausted."""

    status: int
    body: bytes = b""
    content_type: str | None = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stream: Iterator[bytes] | None = None


def dump(obj: Any, *, pretty: bool = False) -> bytes:
    """Give JSON as the server writes it: compact, with a newline."""
    if pretty:
        return json.dumps(obj, indent=2, ensure_ascii=False).encode() + b"\n"
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def text(status: int, content: str) -> Response:
    """Give a plain text answer."""
    return Response(status, content.encode(), "text/plain; charset=utf-8")
