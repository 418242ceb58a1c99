"""`"…".format([…])`: clauses, and the check of literal formats at compile time.

Source: cel-go ext formatting as version 2 of the strings library has it: the locale is English, `%e` prints a
multiplication sign and a raised exponent and takes its precision for a width, infinity is `∞`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from dra.cel import types as t
from dra.cel.errors import Failure
from dra.cel.functions.convert import format_double
from dra.cel.functions.registry import implement
from dra.cel.functions.times import format_duration, format_timestamp
from dra.cel.tree import ListNode, Literal, MapNode, Node
from dra.cel.types import CelType
from dra.cel.values import Duration, Timestamp, Uint, decode_key, type_of

DEFAULT_PRECISION = 6
MAX_PRECISION = 100
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_CLAUSE = re.compile(r"(?:\.(?P<precision>[0-9]*))?(?P<clause>.)", re.DOTALL)

_ONLY = {
    "s": "string clause can only be used on strings, bools, bytes, ints, doubles, maps, lists, types, durations, "
    "and timestamps",
    "d": "decimal clause can only be used on integers",
    "f": "fixed-point clause can only be used on doubles",
    "e": "scientific clause can only be used on doubles",
    "b": "only integers and bools can be formatted as binary",
    "x": "only integers, byte buffers, and strings can be formatted as hex",
    "o": "octal clause can only be used on integers",
}


class FormatProblem(Exception):  # noqa: N818
    """The format or an argument is wrong; `at` is the offset of the argument at fault."""

    def __init__(self, text: str, at: int | None = None) -> None:
        super().__init__(text)
        self.at = at


def _refused(clause: str, kind: CelType, at: int | None = None) -> FormatProblem:
    what = _ONLY[clause.lower()]
    return FormatProblem(f"error during formatting: {what}, was given {kind}", at)


def _walk(text: str, argument: Callable[[int, str, int], str], count: int) -> tuple[str, int]:
    """Split a format: `argument(index, clause, precision)` gives the text of each clause."""
    out: list[str] = []
    used = at = 0
    while at < len(text):
        percent = text.find("%", at)
        if percent < 0:
            out.append(text[at:])
            break
        out.append(text[at:percent])
        at = percent + 1
        if at >= len(text):
            raise FormatProblem("unexpected end of string")
        if text[at] == "%":
            out.append("%")
            at += 1
            continue
        if used >= count:
            raise FormatProblem(f"index {used} out of range")
        match = _CLAUSE.match(text, at)
        if match is None:
            raise FormatProblem("could not parse formatting clause: unexpected end of string")
        clause, precision = match["clause"], match["precision"]
        if clause not in "sdfebxXo":
            raise FormatProblem(
                f'could not parse formatting clause: unrecognized formatting clause "{clause}"'
            )
        if precision == "":
            raise FormatProblem("could not parse formatting clause: error while parsing precision: empty")
        digits = int((precision or str(DEFAULT_PRECISION))[:6])
        if digits > MAX_PRECISION:
            raise FormatProblem(
                "could not parse formatting clause: error while parsing precision: "
                f"precision ({digits}) cannot be larger than {MAX_PRECISION}"
            )
        out.append(argument(used, clause, digits if precision is not None else -1))
        used += 1
        at = match.end()
    return "".join(out), used


@implement("format", str, list)
def _format(text: str, args: list[Any]) -> str:
    def argument(index: int, clause: str, precision: int) -> str:
        return _clause(clause, args[index], precision)

    try:
        out, used = _walk(text, argument, len(args))
    except FormatProblem as problem:
        raise Failure("format", str(problem)) from None
    if used < len(args):
        raise Failure(
            "format",
            f"too many arguments supplied to string.format (expected {used}, got {len(args)})",
        )
    return out


def _clause(clause: str, value: Any, precision: int) -> str:
    kind = type(value)
    match clause:
        case "s":
            return _text(value)
        case "d" if kind in {int, Uint}:
            return str(int(value))
        case "f" if kind is float or value in {"NaN", "Infinity", "-Infinity"}:
            return _fixed(float(value), precision)
        case "e" if kind is float or value in {"NaN", "Infinity", "-Infinity"}:
            return _scientific(float(value), precision)
        case "b" if kind is bool:
            return "1" if value else "0"
        case "b" if kind in {int, Uint}:
            return f"{int(value):b}"
        case "o" if kind in {int, Uint}:
            return f"{int(value):o}"
        case "x" | "X" if kind in {int, Uint, str, bytes}:
            out = _hexadecimal(value)
            return out.upper() if clause == "X" else out
    raise _refused(clause, type_of(value))


def _hexadecimal(value: Any) -> str:
    if type(value) is str:
        return value.encode("utf-8", "surrogatepass").hex()
    return value.hex() if type(value) is bytes else f"{int(value):x}"


def _special(value: float) -> str | None:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return None


def _fixed(value: float, precision: int) -> str:
    # English puts commas between thousands.
    return _special(value) or f"{value:,.{DEFAULT_PRECISION if precision < 0 else precision}f}"


def _scientific(value: float, precision: int) -> str:
    special = _special(value)
    if special is not None:
        return special
    # Upstream passes the precision as a width, so that six digits are always printed.
    mantissa, _, exponent = f"{value:.{DEFAULT_PRECISION}e}".partition("e")
    sign = "-" if exponent[0] == "-" else ""
    raised = (sign + exponent[1:].rjust(2, "0")).translate(_RAISED)
    return f"{mantissa}\u00d710{raised}".rjust(max(precision, 0))


def _text(value: Any) -> str:
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case Duration():
            return format_duration(int(value))
        case Timestamp():
            return format_timestamp(int(value))
        case int():
            return str(int(value))
        case float():
            return format_double(value)
        case bytes():
            return value.decode("utf-8", "replace")
        case list():
            return f"[{', '.join([_quoted(item) for item in value])}]"
        case dict():
            pairs = [(_key(key), _quoted(item)) for key, item in value.items()]
            return "{" + ", ".join([f"{key}:{item}" for key, item in sorted(pairs)]) + "}"
        case CelType():
            return value.name
    raise _refused("s", type_of(value))


def _key(encoded: Any) -> str:
    key = decode_key(encoded)
    if type(key) in {str, bool, int, Uint}:
        return _quoted(key)
    raise FormatProblem(f"error during formatting: no formatting function for map key of type {type_of(key)}")


def _quoted(value: Any) -> str:
    """Write a value inside a list or map, as a literal of the language."""
    match value:
        case str():
            return _go_quote(value)
        case bytes():
            return f"b{_go_quote(value.decode('utf-8', 'replace'))}"
        case Duration():
            return f'duration("{format_duration(int(value))}")'
        case Timestamp():
            return f'timestamp("{format_timestamp(int(value))}")'
        case float():
            if math.isnan(value):
                return '"NaN"'
            if math.isinf(value):
                return '"+Inf"' if value > 0 else '"-Inf"'
            return f"{value:.{DEFAULT_PRECISION}f}"
        case list() | dict() | bool() | int() | None | CelType():
            return _text(value)
    raise FormatProblem(f"error during formatting: no formatting function for {type_of(value)}")


_GO_ESCAPES = {
    '"': '\\"', "\\": "\\\\", "\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v",
}  # fmt: skip


def _go_quote(text: str) -> str:
    out = []
    for char in text:
        if char in _GO_ESCAPES:
            out.append(_GO_ESCAPES[char])
        elif char.isprintable():
            out.append(char)
        else:
            code = ord(char)
            out.append(
                f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
            )
    return '"' + "".join(out) + '"'


# -- the check of literal formats

_CLAUSE_KINDS = {
    "d": {"int", "uint"},
    "f": {"double"},
    "e": {"double"},
    "b": {"int", "uint", "bool"},
    "o": {"int", "uint"},
    "x": {"int", "uint", "string", "bytes"},
    "X": {"int", "uint", "string", "bytes"},
}
_TEXT_KINDS = frozenset(
    {
        "int",
        "uint",
        "double",
        "bool",
        "string",
        "timestamp",
        "bytes",
        "duration",
        "type",
        "null",
        "error",
        "param",
    }
)


def check_format(text: str, args: list[Node]) -> int:
    """Check a literal format against the types of its arguments and give how many it uses.

    Raises:
        FormatProblem: with the offset of the argument, where one is at fault.
    """

    def argument(index: int, clause: str, _precision: int) -> str:
        node = args[index]
        kind = node.kind or t.DYN
        if clause == "s":
            bad = _bad_text(node)
            if bad is not None:
                raise _refused(clause, bad.kind or t.DYN, bad.at)
        elif kind.kind != "dyn" and kind.kind not in _CLAUSE_KINDS[clause]:
            named = (
                clause in "fe"
                and isinstance(node, Literal)
                and node.value in {"NaN", "Infinity", "-Infinity"}
            )
            if not named:
                raise _refused(clause, kind, node.at)
        return ""

    return _walk(text, argument, len(args))[1]


def _bad_text(node: Node) -> Node | None:
    """Give the part of an argument of `%s` that has no text form."""
    kind = node.kind or t.DYN
    if kind.kind == "list" and isinstance(node, ListNode):
        return next((bad for element in node.elements if (bad := _bad_text(element)) is not None), None)
    if kind.kind == "map" and isinstance(node, MapNode):
        for key, value, _ in node.entries:
            key_kind = (key.kind or t.DYN).kind
            if key_kind not in {"string", "bool", "int", "uint", "dyn"}:
                return key
            bad = _bad_text(value)
            if bad is not None:
                return bad
        return None
    good = _kind_has_text(kind)
    return None if good else node


def _kind_has_text(kind: CelType) -> bool:
    if kind.kind in {"list", "map"}:
        return all(_kind_has_text(param) for param in kind.params)
    return kind.kind == "dyn" or kind.kind in _TEXT_KINDS
