"""Words for people."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """Give `1 node`, `2 nodes`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
