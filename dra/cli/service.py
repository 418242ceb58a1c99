"""What the commands that serve until a signal comes have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Protocol


class Service(Protocol):
    """What is started, and stopped when a signal comes; also when it started only half."""

    def start(self) -> object:
        """Begin; returns at once. Raises DraError."""

    def stop(self) -> object:
        """End."""


def configure_log(args: argparse.Namespace) -> None:
    """Set up the log as `add_log_arguments` lets people say."""
    from dra.telemetry.log import configure

    configure(level=args.log_level, console=args.logging_format == "text")


def serve(make: Callable[[], Service]) -> int:
    """Run a service until a signal asks the process to stop; give the exit code."""
    from dra.plugin.signals import STOP_SIGNALS, SignalQueue

    # First of all: a signal that comes while the service is made must be heard.
    signals = SignalQueue()
    service = make()
    try:
        service.start()
        while signals.wait() not in STOP_SIGNALS:
            pass
    finally:
        service.stop()
    return 0
