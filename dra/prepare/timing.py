"""How long the steps of a prepare take: told to whoever counts, in seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

# Hears a step's name and how long it took.
Timing = Callable[[str, float], None]

API = "api"
LOCK = "lock"
PLAN = "plan"
RENDER = "render"
APPLY = "apply"


def no_timing(_step: str, _seconds: float) -> None:
    """Tell nobody."""


@contextlib.contextmanager
def timed(timing: Timing, step: str) -> Iterator[None]:
    """Tell how long the block took, however it ends."""
    began = time.perf_counter()
    try:
        yield
    finally:
        timing(step, time.perf_counter() - began)
