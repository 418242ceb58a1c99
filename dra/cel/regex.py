r"""RE2's regular expressions on top of Python's `re`.

A pattern is parsed by RE2's (Go's) rules, so that what Go refuses is refused here (look-around, back-references, possessive
and stacked repetitions, counts above 1000), and written again for `re`, so that it means the same: `$` is the very
end, `\d \w \s` are ASCII, `\s` lacks the vertical tab, `\z`, `\Q…\E`, POSIX classes.
`re` backtracks where RE2 does not: a pattern that could run away is matched by an automaton instead (`dra.cel.automaton`).
Source: Go's regexp/syntax.
"""

from __future__ import annotations

import re
from functools import lru_cache

from dra.cel.automaton import Automaton, TooLargeError
from dra.cel.errors import Failure
from dra.cel.regex_nodes import EMPTY, Choice, Look, One, Piece, Repeat, Sequence, backtracking, weight, write

MAX_REPEAT = 1000
# Steps that `re` may take in the worst case before the automaton is used instead.
_MAX_STEPS = 20_000_000


class RegexProblem(Exception):  # noqa: N818
    """The pattern is not valid; the text is Go's."""


class Pattern:
    """A compiled pattern; `span` gives the leftmost match."""

    __slots__ = ("_automaton", "_degree", "_search", "piece")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self._degree = backtracking(piece)
        self._search = re.compile(write(piece)).search
        self._automaton: Automaton | None = None

    def span(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Give begin and end of the leftmost match at or after `start`."""
        if self._degree == 0 or (self._degree < 8 and (len(text) + 1) ** (self._degree + 1) <= _MAX_STEPS):
            match = self._search(text, start)
            return match.span() if match else None
        if self._automaton is None:
            self._automaton = Automaton(self.piece)
        return self._automaton.search(text, start)


_PERL = {
    "d": "0-9", "w": "0-9A-Za-z_", "s": "\\t\\n\\f\\r ",
}  # fmt: skip
_PERL_NEGATED = {
    "D": "\\x00-/:-\\U0010ffff",
    "W": "\\x00-/:-@\\[-\\^`{-\\U0010ffff",
    "S": "\\x00-\\x08\\x0b\\x0e-\\x1f!-\\U0010ffff",
}
_POSIX = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": "\\x00-\\x7f", "blank": "\\t ", "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9", "graph": "!-~", "lower": "a-z", "print": " -~", "punct": "!-/:-@\\[-`{-~",
    "space": "\\t\\n\\v\\f\\r ", "upper": "A-Z", "word": "0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_ESCAPES = {"a": "\\x07", "f": "\\f", "n": "\\n", "r": "\\r", "t": "\\t", "v": "\\v"}
_REPEAT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}", re.ASCII)
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$-/#&~@%:;<=>!\"'`, _")


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> Pattern:
    """Compile a pattern.

    Raises:
        RegexProblem: RE2 would refuse it.
    """
    try:
        compiled = Pattern(_Translator(pattern).run())
        if compiled._degree:
            Automaton(compiled.piece)
    except (re.error, OverflowError, RecursionError, TooLargeError):
        raise RegexProblem(f"error parsing regexp: expression too large: `{pattern}`") from None
    return compiled


def search(pattern: str, text: str) -> tuple[int, int] | None:
    """Give begin and end of the leftmost match.

    Raises:
        Failure: the pattern is not valid.
    """
    try:
        return compile_pattern(pattern).span(text)
    except RegexProblem as problem:
        raise Failure("regex", str(problem)) from None


class _Translator:
    """One pass over the pattern: checks it and writes it for `re`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0
        self.flags = {"i": False, "m": False, "s": False, "U": False}
        self.names: set[str] = set()

    def fail(self, what: str, part: str | None = None) -> RegexProblem:
        return RegexProblem(f"error parsing regexp: {what}: `{self.pattern if part is None else part}`")

    def run(self) -> Piece:
        piece = self.alternatives()
        if self.at < len(self.pattern):
            raise self.fail("unexpected )")
        if weight(piece) > MAX_REPEAT:
            raise self.fail("invalid repeat count")
        return piece

    def alternatives(self) -> Piece:
        self.depth += 1
        if self.depth > 100:
            raise self.fail("expression nests too deeply")
        parts: list[Piece] = []
        branches: list[Piece] = []
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char == ")":
                break
            if char == "|":
                self.at += 1
                branches.append(Sequence(tuple(parts)))
                parts = []
                continue
            self.item(parts)
        branches.append(Sequence(tuple(parts)))
        self.depth -= 1
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def item(self, parts: list[Piece]) -> None:
        """One atom and what repeats it."""
        atoms = self.atom()
        last = ""
        while (found := self.repetition()) is not None:
            repeat, written = found
            if last:
                raise self.fail("invalid nested repetition operator", last + written)
            if not atoms and parts:
                atoms = [parts.pop()]  # `a(?i)*` repeats what stands before the flags
            if not atoms:
                raise self.fail("missing argument to repetition operator", written)
            last = written
            # After a quoted stretch the repetition applies to its last character.
            atoms[-1] = Repeat(atoms[-1], *repeat)
        parts.extend(atoms)

    def repetition(self) -> tuple[tuple[int, int, bool], str] | None:
        if self.at >= len(self.pattern):
            return None
        start = self.at
        char = self.pattern[start]
        if char in "*+?":
            self.at += 1
            low, high = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}[char]
        elif char == "{":
            match = _REPEAT.match(self.pattern, start)
            if match is None:
                return None
            low = int(match[1][:6])
            high = low if match[2] is None else (int(match[3][:6]) if match[3] else -1)
            if low > MAX_REPEAT or high > MAX_REPEAT or (0 <= high < low):
                raise self.fail("invalid repeat count", match[0])
            self.at = match.end()
        else:
            return None
        lazy = self.at < len(self.pattern) and self.pattern[self.at] == "?"
        if lazy:
            self.at += 1
        return (low, high, lazy != self.flags["U"]), self.pattern[start : self.at]

    def atom(self) -> list[Piece]:
        char = self.pattern[self.at]
        if char in "*+?" or (char == "{" and _REPEAT.match(self.pattern, self.at)):
            found = self.repetition()
            assert found is not None
            raise self.fail("missing argument to repetition operator", found[1])
        self.at += 1
        match char:
            case "(":
                return self.group()
            case "[":
                return [One(self.bracket())]
            case ".":
                return [One(r"(?s:.)" if self.flags["s"] else r"[^\n]")]
            case "^":
                return [Look(r"(?m:^)" if self.flags["m"] else r"\A")]
            case "$":
                return [Look(r"(?:(?=\n)|\Z)" if self.flags["m"] else r"\Z")]
            case "\\":
                return self.escape()
        return [self.literal(char)]

    def literal(self, char: str) -> One:
        text = re.escape(char)
        return One(f"(?i:{text})" if self.flags["i"] and char.isalpha() else text)

    def group(self) -> list[Piece]:
        pattern = self.pattern
        outer = dict(self.flags)
        if pattern.startswith("?", self.at):
            named = re.compile(r"\?P?<([^>]*)>").match(pattern, self.at)
            if named is not None and not pattern.startswith(("?<=", "?<!"), self.at):
                if not re.fullmatch(r"[A-Za-z0-9_]+", named[1], re.ASCII):
                    raise self.fail("invalid named capture", pattern[self.at - 1 : named.end()])
                if named[1] in self.names:
                    raise self.fail("duplicate capture group name", named[1])
                self.names.add(named[1])
                self.at = named.end()
            elif self.set_flags():
                return []
        piece = self.alternatives()
        if not pattern.startswith(")", self.at):
            raise self.fail("missing closing )")
        self.at += 1
        self.flags = outer
        return [piece if piece != EMPTY else Sequence((EMPTY,))]

    def set_flags(self) -> bool:
        """Read `?flags:` or `?flags)`; true for the second, which ends here."""
        match = re.compile(r"\?([imsU]*)(-[imsU]+)?([:)])").match(self.pattern, self.at)
        if match is None or match[0] == "?)":
            end = self.pattern.find(")", self.at)
            if end < 0 and re.compile(r"\?[imsU-]*$").match(self.pattern, self.at):
                raise self.fail("missing closing )")
            raise self.fail("invalid or unsupported Perl syntax", self.pattern[self.at - 1 : self.at + 2])
        for flag in match[1]:
            self.flags[flag] = True
        for flag in (match[2] or "-")[1:]:
            self.flags[flag] = False
        self.at = match.end()
        return match[3] == ")"

    def escape(self) -> list[Piece]:
        if self.at >= len(self.pattern):
            raise self.fail("trailing backslash at end of expression", "")
        char = self.pattern[self.at]
        self.at += 1
        match char:
            case "A":
                return [Look(r"\A")]
            case "z":
                return [Look(r"\Z")]
            case "b" | "B":
                return [Look(f"(?a:\\{char})")]
            case "Q":
                return self.quoted()
            case "d" | "w" | "s":
                return [One(f"[{_PERL[char]}]")]
            case "D" | "W" | "S":
                return [One(f"[^{_PERL[char.lower()]}]")]
            case "p" | "P":
                return [One(f"[{self.unicode_class(negated=char == 'P')}]")]
        return [self.literal(self.escaped_char(char))]

    def quoted(self) -> list[Piece]:
        end = self.pattern.find("\\E", self.at)
        body = self.pattern[self.at :] if end < 0 else self.pattern[self.at : end]
        self.at = len(self.pattern) if end < 0 else end + 2
        return [self.literal(char) for char in body]

    def escaped_char(self, char: str) -> str:
        pattern = self.pattern
        if char in _ESCAPES:
            return {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}[char]
        if char == "x":
            match = re.compile(r"[0-9a-fA-F]{2}|\{([0-9a-fA-F]+)\}").match(pattern, self.at)
            code = int((match[1] or match[0])[:9], 16) if match else 1 << 32
            if match is None or code > 0x10FFFF:
                raise self.fail("invalid escape sequence", pattern[self.at - 2 : self.at + 1])
            self.at = match.end()
            return chr(code)
        octal = re.compile(r"0[0-7]{0,2}|[1-7][0-7]{1,2}").match(pattern, self.at - 1)
        if octal is not None:
            self.at = octal.end()
            return chr(int(octal[0], 8))
        if char.isascii() and not char.isalnum():
            return char
        raise self.fail("invalid escape sequence", f"\\{char}")

    def unicode_class(self, negated: bool) -> str:
        from dra.cel.unicode_classes import ranges_of

        match = re.compile(r"\{(\^?)([^}]*)\}|(.)", re.DOTALL).match(self.pattern, self.at)
        if match is None:
            raise self.fail("invalid character class range", self.pattern[self.at - 2 :])
        name = match[3] or match[2] or ""
        self.at = match.end()
        ranges = ranges_of(name, negated=negated != bool(match[1]))
        if ranges is None:
            raise self.fail("invalid character class range", f"\\p{match[0]}")
        return ranges

    def bracket(self) -> str:
        """A class in brackets."""
        pattern = self.pattern
        start = self.at - 1
        negated = pattern.startswith("^", self.at)
        self.at += negated
        parts: list[str] = []
        first = True
        while first or not pattern.startswith("]", self.at):
            if self.at >= len(pattern):
                raise self.fail("missing closing ]", pattern[start:])
            first = False
            parts.append(self.class_item())
        self.at += 1
        text = f"[{'^' if negated else ''}{''.join(parts)}]"
        return f"(?i:{text})" if self.flags["i"] else text

    def class_item(self) -> str:
        pattern = self.pattern
        posix = re.compile(r"\[:(\^?)([a-z]*):\]").match(pattern, self.at)
        if posix is not None:
            if posix[2] not in _POSIX:
                raise self.fail("invalid character class range", posix[0])
            self.at = posix.end()
            return _negate(_POSIX[posix[2]]) if posix[1] else _POSIX[posix[2]]
        if pattern.startswith("\\", self.at) and self.at + 1 < len(pattern):
            char = pattern[self.at + 1]
            if char in _PERL:
                self.at += 2
                return _PERL[char]
            if char in _PERL_NEGATED:
                self.at += 2
                return _PERL_NEGATED[char]
            if char in "pP":
                self.at += 2
                return self.unicode_class(negated=char == "P")
        low = self.class_char()
        if pattern.startswith("-", self.at) and not pattern.startswith("-]", self.at):
            self.at += 1
            start = self.at
            if start >= len(pattern):
                raise self.fail("missing closing ]")
            high = self.class_char()
            if high < low:
                raise self.fail("invalid character class range", f"{low}-{high}")
            return f"{_class_escape(low)}-{_class_escape(high)}"
        return _class_escape(low)

    def class_char(self) -> str:
        if self.at >= len(self.pattern):
            raise self.fail("missing closing ]")
        char = self.pattern[self.at]
        self.at += 1
        if char != "\\":
            return char
        if self.at >= len(self.pattern):
            raise self.fail("trailing backslash at end of expression", "")
        char = self.pattern[self.at]
        self.at += 1
        return self.escaped_char(char)


def _class_escape(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[&~|" else char


def _negate(ranges: str) -> str:
    """Give the ranges of every character outside `ranges` (ASCII)."""
    inside = re.compile(f"[{ranges}]")
    out = [_class_escape(chr(code)) for code in range(128) if not inside.match(chr(code))]
    return "".join(out) + "\\x80-\\U0010ffff"
