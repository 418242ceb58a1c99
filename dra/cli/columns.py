"""Text in columns, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], *, gap: int = 3) -> Iterator[str]:
    """Give a line for each row, its cells below each other, `gap` blanks between the widest; all rows have as many."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield (" " * gap).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
