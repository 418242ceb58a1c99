"""A pattern matched in linear time: all possibilities are followed at once, by preference.

Source: Pike's virtual machine, the way RE2 and Go's regexp find the leftmost match with Perl's preferences.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from dra.cel.regex_nodes import Choice, Look, One, Piece, Repeat, Sequence

MAX_PROGRAM = 50_000
Op = Literal["one", "look", "split", "jump", "match"]


class Instruction(NamedTuple):
    """`one` and `look` test at the place; `split` goes on at `first`, then at `second`."""

    op: Op
    test: Callable[[str, int], object] | None = None
    first: int = 0
    second: int = 0


class TooLargeError(Exception):
    """The pattern, counts written out, is too large."""


class Automaton:
    """A compiled pattern."""

    def __init__(self, piece: Piece) -> None:
        self.program: list[Instruction] = []
        self.tests: dict[str, Callable[[str, int], object]] = {}
        self._emit(piece)
        self.program.append(Instruction("match"))

    def _add(self, instruction: Instruction) -> int:
        if len(self.program) >= MAX_PROGRAM:
            raise TooLargeError
        self.program.append(instruction)
        return len(self.program) - 1

    def _test(self, text: str) -> Callable[[str, int], object]:
        if text not in self.tests:
            self.tests[text] = re.compile(text).match
        return self.tests[text]

    def _emit(self, piece: Piece) -> None:
        match piece:
            case One():
                self._add(Instruction("one", self._test(piece.text)))
            case Look():
                self._add(Instruction("look", self._test(piece.text)))
            case Sequence():
                for part in piece.parts:
                    self._emit(part)
            case Choice():
                self._choice(piece)
            case Repeat():
                self._repeat(piece)

    def _choice(self, piece: Choice) -> None:
        jumps: list[int] = []
        for branch in piece.branches[:-1]:
            split = self._add(Instruction("split"))
            self._emit(branch)
            jumps.append(self._add(Instruction("jump")))
            self.program[split] = Instruction("split", None, split + 1, len(self.program))
        self._emit(piece.branches[-1])
        for jump in jumps:
            self.program[jump] = Instruction("jump", None, len(self.program))

    def _repeat(self, piece: Repeat) -> None:
        for _ in range(piece.low):
            self._emit(piece.part)
        if piece.high < 0:
            split = self._add(Instruction("split"))
            self._emit(piece.part)
            self._add(Instruction("jump", None, split))
            self._set_split(split, len(self.program), lazy=piece.lazy)
            return
        splits: list[int] = []
        for _ in range(piece.high - piece.low):
            splits.append(self._add(Instruction("split")))
            self._emit(piece.part)
        for split in splits:
            self._set_split(split, len(self.program), lazy=piece.lazy)

    def _set_split(self, split: int, out: int, *, lazy: bool) -> None:
        first, second = (out, split + 1) if lazy else (split + 1, out)
        self.program[split] = Instruction("split", None, first, second)

    def search(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Give begin and end of the leftmost match at or after `start`."""
        found: tuple[int, int] | None = None
        threads: list[tuple[int, int]] = []
        for at in range(start, len(text) + 1):
            if found is None:
                threads.append((0, at))
            elif not threads:
                break
            following: list[tuple[int, int]] = []
            seen: set[int] = set()
            for pc, begin in threads:
                done = self._advance(pc, begin, text, at, seen, following)
                if done:
                    # Preferred over every thread behind it.
                    found = (begin, at)
                    break
            threads = following
        return found

    def _advance(
        self, pc: int, begin: int, text: str, at: int, seen: set[int], following: list[tuple[int, int]]
    ) -> bool:
        """Follow a thread to where it needs a character; true where it matches here."""
        waiting = [pc]
        while waiting:
            pc = waiting.pop()
            if pc in seen:
                continue
            seen.add(pc)
            instruction = self.program[pc]
            match instruction.op:
                case "match":
                    return True
                case "jump":
                    waiting.append(instruction.first)
                case "split":
                    waiting.append(instruction.second)
                    waiting.append(instruction.first)
                case "look":
                    assert instruction.test is not None
                    if instruction.test(text, at):
                        waiting.append(pc + 1)
                case "one":
                    assert instruction.test is not None
                    if at < len(text) and instruction.test(text, at):
                        following.append((pc + 1, begin))
        return False
