"""One watch request: its events, and an end that another thread can bring about."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dra.errors import KubeError
from dra.kube.answers import bad_answer, checked_bookmark
from dra.kube.connection import Connection, lines_of
from dra.kube.failures import Call, failure_from_status

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`type` is ADDED, MODIFIED, DELETED or BOOKMARK; of a bookmark only the resourceVersion counts."""

    type: str
    object: Json

    @property
    def resource_version(self) -> str:
        """The version from which a watch can be continued after this event."""
        return str((self.object.get("metadata") or {}).get("resourceVersion") or "")


class WatchStream:
    """The events of one watch request; iterate it once, in one thread.

    Raises (while iterating):
        KubeError: DRA-API-GONE when the server forgot our version, DRA-API-TIMEOUT when nothing came for
            the inactivity time, DRA-API-INTERRUPTED when the connection broke. A server that ends the
            watch in order ends the iteration.
    """

    def __init__(
        self,
        answer: Any,
        *,
        call: Call,
        connection: Connection,
        received: Callable[[Json], Json],
        inactivity_seconds: float,
    ) -> None:
        self._answer = answer
        self._call = call
        self._connection = connection
        self._received = received
        self._closed = threading.Event()
        # The connection came with the short limit for the headers; from here silence is normal for longer.
        sock = getattr(getattr(answer, "connection", None), "sock", None)
        if sock is not None:
            sock.settimeout(inactivity_seconds)

    def __iter__(self) -> Iterator[WatchEvent]:
        """Give the events as they come."""
        try:
            for line in lines_of(self._answer):
                if self._closed.is_set():
                    return
                yield self._event(line)
        except KubeError:
            raise
        except Exception as error:
            if self._closed.is_set():
                return
            raise self._connection.translate(self._call, error) from error
        finally:
            with suppress(Exception):
                self._answer.close()

    def close(self) -> None:
        """End the watch; a read that blocks in another thread returns at once."""
        self._closed.set()
        # close() alone would wait for the lock of the reader.
        with suppress(Exception):
            self._answer.shutdown()

    def _event(self, line: bytes) -> WatchEvent:
        try:
            document = json.loads(line)
            kind, obj = str(document["type"]), document["object"]
        except (ValueError, KeyError, TypeError) as error:
            shown = line[:80].decode("utf-8", "replace")
            raise bad_answer(self._call, f"{shown!r} is not a watch event") from error
        if kind == "ERROR":
            raise failure_from_status(self._call, obj if isinstance(obj, dict) else {})
        if kind == "BOOKMARK":
            return WatchEvent(kind, checked_bookmark(self._call, obj))
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            raise bad_answer(self._call, f"{kind[:80]!r} is no type of a watch event")
        return WatchEvent(kind, self._received(obj))
