"""`find` and `findAll`. Source: k8s.io/apiserver cel/library regex; Go's FindString and FindAllString."""

from __future__ import annotations

from typing import Any

from dra.cel.errors import Failure
from dra.cel.functions.registry import declare, implement
from dra.cel.regex import RegexProblem, compile_pattern, search

declare(
    """
    string_find_string: string~find(string) -> string
    string_find_all_string: string~findAll(string) -> list(string)
    string_find_all_string_int: string~findAll(string, int) -> list(string)
    """
)


@implement("find", str, str)
def _find(text: str, pattern: str) -> str:
    span = search(pattern, text)
    return text[span[0] : span[1]] if span else ""


@implement("findAll", str, str)
def _find_all(text: str, pattern: str) -> list[Any]:
    return _find_some(text, pattern, -1)


@implement("findAll", str, str, int)
def _find_some(text: str, pattern: str, limit: int) -> list[Any]:
    try:
        compiled = compile_pattern(pattern)
    except RegexProblem as problem:
        raise Failure("regex", f"Illegal regex: {problem}") from None
    found: list[Any] = []
    at, previous_end = 0, -1
    while at <= len(text) and (limit < 0 or len(found) < limit):
        span = compiled.span(text, at)
        if span is None:
            break
        begin, end = span
        # An empty match right after the match before it does not count.
        if end > begin or begin != previous_end:
            found.append(text[begin:end])
        previous_end = end
        at = end if end > begin else end + 1
    return found
