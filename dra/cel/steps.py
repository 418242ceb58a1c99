"""What a plan is made of: closures over a frame, and what a part of the planner needs of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dra.cel.tree import Node

Frame = list[Any]
Step = Callable[[Frame], Any]
# What a slot holds before its value was computed.
UNSET = object()
# Slot and, for a value that is computed when it is first read, how.
Scope = dict[str, tuple[int, Step | None]]


class Planning(Protocol):
    """The plan that is being made; `scopes` holds the variables of the macros around, the innermost last."""

    scopes: list[Scope]

    def slot(self) -> int:
        """Give a fresh slot of the frame."""
        ...

    def step(self, node: Node) -> Step:
        """Give the closure of a node."""
        ...
