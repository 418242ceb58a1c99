"""What a walk over a tree knows of the sizes of values: ranges, and where each value comes from.

Source: cel-go's SizeEstimate and CostEstimate. Both saturate at 2^64-1, which means "unbounded".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dra.cel import types as t
from dra.cel.tree import Ident, ListNode, Literal, MapNode, Node
from dra.cel.types import CelType

MAX = (1 << 64) - 1
Path = tuple[str, ...]
_SCALARS = frozenset({"bool", "double", "duration", "int", "timestamp", "uint"})


class Range(NamedTuple):
    """Least and most: of a size, or of a cost."""

    low: int
    high: int

    def plus(self, other: Range) -> Range:
        """Add, saturating."""
        return Range(min(self.low + other.low, MAX), min(self.high + other.high, MAX))

    def times(self, other: Range) -> Range:
        """Multiply, saturating."""
        return Range(min(self.low * other.low, MAX), min(self.high * other.high, MAX))

    def scaled(self, factor: float) -> Range:
        """Multiply by a factor, rounding up, in doubles as upstream."""
        return Range(_scale(self.low, factor), _scale(self.high, factor))

    def union(self, other: Range) -> Range:
        """Give the range that covers both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


def _scale(value: int, factor: float) -> int:
    product = math.ceil(float(value) * factor)
    return min(MAX, product)


UNKNOWN = Range(0, MAX)
ONE = Range(1, 1)
ZERO = Range(0, 0)
Sizes = Callable[[Path], Range | None]


class Entry(NamedTuple):
    """Sizes of what a list or map literal holds."""

    container: str
    key: Range
    value: Range

    def union(self, other: Entry | None) -> Entry | None:
        """Give the entry that covers both."""
        return other and Entry(self.container, self.key.union(other.key), self.value.union(other.value))


class Local(NamedTuple):
    """A variable of a macro: where its values come from, and how large they are."""

    path: Path
    size: Range | None
    entry: Entry | None


class KnownSizes:
    """Sizes by node, and what is remembered on the way; `sizes_at` gives the size of what a path leads to."""

    def __init__(self, sizes_at: Sizes) -> None:
        self.sizes_at = sizes_at
        self.paths: dict[int, Path] = {}
        self.sizes: dict[int, Range] = {}
        self.entries: dict[int, Entry] = {}
        self.locals: dict[str, list[Local]] = {}

    def local(self, name: str) -> Local | None:
        """Give the innermost variable of that name."""
        stack = self.locals.get(name)
        return stack[-1] if stack else None

    def path(self, node: Node) -> Path:
        """Give where a value comes from, as steps from a variable."""
        if isinstance(node, Ident):
            local = self.local(node.name)
            if local is not None:
                return local.path
        return self.paths.get(id(node), ())

    def size(self, node: Node) -> Range | None:
        """Give the size of a value, or None where nothing is known."""
        if id(node) in self.sizes:
            return self.sizes[id(node)]
        written = _written_size(node)
        if written is not None:
            return written
        path = self.path(node)
        limit = self.sizes_at(path) if path else None
        if limit is not None:
            self.sizes[id(node)] = limit
            return limit
        if _is_scalar(node.kind or t.DYN):
            return ONE
        if isinstance(node, Ident):
            local = self.local(node.name)
            if local is not None:
                return local.size
        return None

    def size_or_unknown(self, node: Node) -> Range:
        """Give the size of a value, unbounded where nothing is known."""
        return self.size(node) or UNKNOWN

    def entry(self, node: Node) -> Entry | None:
        """Give the sizes of what a value holds."""
        if id(node) in self.entries:
            return self.entries[id(node)]
        if isinstance(node, Ident):
            local = self.local(node.name)
            if local is not None:
                return local.entry
        return None

    def set_entry(self, node: Node, entry: Entry | None) -> None:
        """Note the sizes of what a value holds."""
        if entry is not None:
            self.entries[id(node)] = entry


def _written_size(node: Node) -> Range | None:
    match node:
        case Literal():
            length = len(node.value) if isinstance(node.value, (str, bytes)) else 1
        case ListNode():
            length = len(node.elements)
        case MapNode():
            length = len(node.entries)
        case _:
            return None
    return Range(length, length)


def _is_scalar(kind: CelType) -> bool:
    return kind.kind in _SCALARS or (t.is_optional(kind) and _is_scalar(kind.params[0]))
