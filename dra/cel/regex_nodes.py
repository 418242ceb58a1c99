"""Parsed patterns: how to write them for `re`, and how far `re` could backtrack on them."""

from __future__ import annotations

from dataclasses import dataclass

RUNAWAY = 1 << 20


@dataclass(frozen=True, slots=True)
class One:
    """One character, as a piece of `re` syntax: a literal or a class."""

    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """A test of the place: begin, end, word boundary."""

    text: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts one after the other; no parts match the empty text."""

    parts: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Branches, the earlier preferred."""

    branches: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` between `low` and `high` times (-1: no limit); `lazy` prefers fewer."""

    part: Piece
    low: int
    high: int
    lazy: bool


Piece = One | Look | Sequence | Choice | Repeat
EMPTY = Sequence(())


def write(piece: Piece) -> str:
    """Give the pattern in the syntax of `re`."""
    match piece:
        case One() | Look():
            return piece.text
        case Sequence():
            return "".join([write(part) for part in piece.parts])
        case Choice():
            return f"(?:{'|'.join([write(branch) for branch in piece.branches])})"
    high = "" if piece.high < 0 else piece.high
    return f"(?:{write(piece.part)}){{{piece.low},{high}}}{'?' if piece.lazy else ''}"


def backtracking(piece: Piece) -> int:
    """Give the degree of the polynomial that bounds backtracking; RUNAWAY where nothing bounds it."""
    match piece:
        case Sequence():
            return sum(backtracking(part) for part in piece.parts)
        case Choice():
            return sum(backtracking(branch) for branch in piece.branches)
        case Repeat():
            if piece.high in {0, 1}:
                return backtracking(piece.part)
            return 1 if _fixed(piece.part) else RUNAWAY
    return 0


def _fixed(piece: Piece) -> bool:
    """Whether a piece matches in one way at most: it may be repeated without trouble."""
    match piece:
        case One():
            return True
        case Sequence():
            return bool(piece.parts) and all(map(_fixed, piece.parts))
        case Choice():
            # Branches that start with different letters exclude each other.
            starts = [_first_letter(branch) for branch in piece.branches]
            return None not in starts and len(set(starts)) == len(starts) and all(map(_fixed, piece.branches))
    return False


def _first_letter(piece: Piece) -> str | None:
    if isinstance(piece, Sequence) and piece.parts:
        return _first_letter(piece.parts[0])
    return piece.text if isinstance(piece, One) and len(piece.text) == 1 else None


def weight(piece: Piece) -> int:
    """Give how many times the innermost part may be written out when counts are expanded."""
    match piece:
        case Sequence():
            return max([weight(part) for part in piece.parts], default=1)
        case Choice():
            return max(weight(branch) for branch in piece.branches)
        case Repeat():
            return max(piece.high, piece.low, 1) * weight(piece.part)
    return 1
