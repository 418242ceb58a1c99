"""Logging set-up: one event, one line of JSON on stderr.

Event names are `noun_verb-past` (`claim_prepared`); fixed keys are `node`, `pool`, `device`, `claim`,
`claim_uid`, `error_code`, `duration_ms`. Tokens, environment blocks and whole objects are never logged.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any, TextIO, cast

from dra.errors import DraError
from dra.lean import Later, standing_in

# structlog imports rich wherever it can (5 MiB, 50 ms), for a console renderer that a daemon never uses, and asyncio (2 MiB)
# for loggers that are awaited.
with standing_in({"rich": None, "asyncio": Later("asyncio")}):
    import structlog

Logger = structlog.typing.FilteringBoundLogger

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_logger(**fields: object) -> Logger:
    """Give a logger that adds `fields` to each of its events."""
    return cast("Logger", structlog.get_logger(**fields))


def bound(**fields: object) -> AbstractContextManager[None]:
    """Add `fields` to every event of this thread until the context ends."""
    return cast("AbstractContextManager[None]", structlog.contextvars.bound_contextvars(**fields))


def error_fields(error: BaseException) -> dict[str, object]:
    """Give the keys under which an error is logged: code, text, remedy and the error's own fields."""
    if isinstance(error, DraError):
        known: dict[str, object] = {"error_code": error.code, "error": error.message, "remedy": error.remedy}
        # The error's own fields stand apart: callers name their own beside them, and a clash would be a TypeError.
        return {**known, "error_fields": error.fields} if error.fields else known
    return {"error_code": "DRA-BUG", "error": f"{type(error).__name__}: {error}"}


def configure(*, level: str = "info", console: bool = False, stream: TextIO | None = None) -> None:
    """Set up logging for this process: JSON lines, or for people with `console`."""
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=False)
        if console
        else structlog.processors.JSONRenderer(default=str)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _exception_text,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_args: _Lines(stream),
        cache_logger_on_first_use=False,
    )


class _Lines:
    """Writes one line an event to the stream (by default what stderr is at that moment).

    Logging must never be what stops the driver: a stream that is closed or full loses the line and nothing else.
    """

    _lock = threading.Lock()

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Write a line."""
        stream = self._stream or sys.stderr
        with contextlib.suppress(OSError, ValueError), self._lock:
            stream.write(f"{line}\n")
            stream.flush()

    debug = info = warning = warn = error = exception = critical = fatal = log = msg


def _exception_text(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if event.get("exc_info"):
        return structlog.processors.format_exc_info(None, "", event)
    return event
