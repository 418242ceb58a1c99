"""Strings, version 2: characters, positions, split, join, quote. Positions count code points.

Source: cel-go ext.Strings v2.
"""

from __future__ import annotations

from typing import Any

from dra.cel.errors import Failure
from dra.cel.functions.registry import declare, implement
from dra.cel.values import no_overload_for

declare(
    """
    string_char_at_int: string~charAt(int) -> string
    string_index_of_string: string~indexOf(string) -> int
    string_index_of_string_int: string~indexOf(string, int) -> int
    string_last_index_of_string: string~lastIndexOf(string) -> int
    string_last_index_of_string_int: string~lastIndexOf(string, int) -> int
    string_lower_ascii: string~lowerAscii() -> string
    string_replace_string_string: string~replace(string, string) -> string
    string_replace_string_string_int: string~replace(string, string, int) -> string
    string_split_string: string~split(string) -> list(string)
    string_split_string_int: string~split(string, int) -> list(string)
    string_substring_int: string~substring(int) -> string
    string_substring_int_int: string~substring(int, int) -> string
    string_trim: string~trim() -> string
    string_upper_ascii: string~upperAscii() -> string
    string_format: string~format(list(dyn)) -> string
    strings_quote: strings.quote(string) -> string
    list_join: list(string)~join() -> string
    list_join_string: list(string)~join(string) -> string
    """
)

_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_UPPER = {code: code - 32 for code in range(ord("a"), ord("z") + 1)}
# Unicode's White_Space, as Go's unicode.IsSpace has it.
_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
_QUOTED = {
    "\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v",
    "\\": "\\\\", '"': '\\"',
}  # fmt: skip


def _out_of_range(index: int) -> Failure:
    return Failure("out_of_range", f"index out of range: {index}")


@implement("charAt", str, int)
def _char_at(text: str, index: int) -> str:
    if not 0 <= index <= len(text):
        raise _out_of_range(index)
    return text[index : index + 1]


@implement("indexOf", str, str)
def _index_of(text: str, part: str) -> int:
    return text.find(part)


@implement("indexOf", str, str, int)
def _index_of_from(text: str, part: str, start: int) -> int:
    if start < 0:
        raise _out_of_range(start)
    if not part:
        return start
    return text.find(part, start)


@implement("lastIndexOf", str, str)
def _last_index_of(text: str, part: str) -> int:
    return text.rfind(part)


@implement("lastIndexOf", str, str, int)
def _last_index_of_from(text: str, part: str, start: int) -> int:
    if start < 0:
        raise _out_of_range(start)
    if not part:
        return start
    if start >= len(text):
        return -1
    return text.rfind(part, 0, start + len(part))


@implement("lowerAscii", str)
def _lower(text: str) -> str:
    return text.translate(_LOWER)


@implement("upperAscii", str)
def _upper(text: str) -> str:
    return text.translate(_UPPER)


@implement("replace", str, str, str)
def _replace(text: str, old: str, new: str) -> str:
    return _bounded(text.replace(old, new))


@implement("replace", str, str, str, int)
def _replace_some(text: str, old: str, new: str, count: int) -> str:
    return _bounded(text.replace(old, new, -1 if count < 0 else count))


def _bounded(text: str) -> str:
    # Chains of replace can double a text at each step; nothing a selector needs is this long.
    if len(text) > 10_000_000:
        raise Failure("cost_limit", "operation cancelled: actual cost limit exceeded")
    return text


@implement("split", str, str)
def _split(text: str, separator: str) -> list[Any]:
    return list(text) if not separator else text.split(separator)


@implement("split", str, str, int)
def _split_some(text: str, separator: str, count: int) -> list[Any]:
    if count == 0:
        return []
    if count == 1:
        return [text]
    if count < 0:
        return _split(text, separator)
    if not separator:
        return [*text[: count - 1], text[count - 1 :]] if len(text) >= count else list(text)
    return text.split(separator, count - 1)


@implement("substring", str, int)
def _substring(text: str, start: int) -> str:
    if not 0 <= start <= len(text):
        raise _out_of_range(start)
    return text[start:]


@implement("substring", str, int, int)
def _substring_to(text: str, start: int, end: int) -> str:
    if start > end:
        raise Failure("out_of_range", f"invalid substring range. start: {start}, end: {end}")
    if not 0 <= start <= len(text):
        raise _out_of_range(start)
    if not 0 <= end <= len(text):
        raise _out_of_range(end)
    return text[start:end]


@implement("trim", str)
def _trim(text: str) -> str:
    return text.strip(_SPACE)


@implement("strings.quote", str)
def _quote(text: str) -> str:
    return '"' + "".join([_QUOTED.get(char, char) for char in text]) + '"'


@implement("join", list)
def _join(items: list[Any]) -> str:
    return _join_with(items, "")


@implement("join", list, str)
def _join_with(items: list[Any], separator: str) -> str:
    for item in items:
        if type(item) is not str:
            raise no_overload_for("join", items, separator)
    return separator.join(items)
