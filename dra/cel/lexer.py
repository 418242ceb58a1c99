r"""Text to tokens.

Source: the CEL grammar as cel-go has it: ASCII identifiers, escapes `\a…\v \xHH \uHHHH \UHHHHHHHH \OOO`,
raw, byte and triple-quoted strings. Bad text is reported and skipped, so that a later problem is found too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ESCAPE = r"""\\(?:[abfnrtv"'\\?`]|[xX][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2})"""
_STRING = "|".join(
    (
        r'[rR]"""(?:.|\n)*?"""',
        r"[rR]'''(?:.|\n)*?'''",
        rf'"""(?:{_ESCAPE}|[^\\])*?"""',
        rf"'''(?:{_ESCAPE}|[^\\])*?'''",
        r'[rR]"[^"\n\r]*"',
        r"[rR]'[^'\n\r]*'",
        rf'"(?:{_ESCAPE}|[^\\"\n\r])*"',
        rf"'(?:{_ESCAPE}|[^\\'\n\r])*'",
    )
)
_FORM = re.compile(
    rf"""
    (?P<space>[\t\ \r\n\f]+|//[^\n]*)
  | (?P<bytes>[bB](?:{_STRING}))
  | (?P<string>{_STRING})
  | (?P<double>[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+|\.[0-9]+(?:[eE][+-]?[0-9]+)?)
  | (?P<uint>(?:0x[0-9a-fA-F]+|[0-9]+)[uU])
  | (?P<int>0x[0-9a-fA-F]+|[0-9]+)
  | (?P<ident>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<quoted>`[A-Za-z0-9_.\-/\ ]+`)
  | (?P<op>==|!=|<=|>=|&&|\|\||[\[\]{{}}().,\-!?:+*/%<>])
    """,
    re.VERBOSE | re.ASCII,
)
_KEYWORDS = frozenset({"true", "false", "null", "in"})
_SIMPLE = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    '"': '"', "'": "'", "\\": "\\", "?": "?", "`": "`",
}  # fmt: skip


class Token(NamedTuple):
    """`kind` is the text itself for operators and keywords; `at` counts code points from 0."""

    kind: str
    text: str
    at: int


def tokenize(source: str) -> tuple[list[Token], list[tuple[int, str]]]:
    """Give the tokens, an `eof` token last, and the problems as (offset, message)."""
    tokens: list[Token] = []
    problems: list[tuple[int, str]] = []
    at = 0
    while at < len(source):
        match = _FORM.match(source, at)
        if match is None:
            # The recogniser gives up one character after what could still have been an operator.
            end = at + 2 if source[at] in "=&|" else at + 1
            problems.append((at, f"Syntax error: token recognition error at: '{source[at:end]}'"))
            at += 1
            continue
        kind = match.lastgroup or ""
        text = match.group()
        if kind == "op" or (kind == "ident" and text in _KEYWORDS):
            kind = text
        if kind != "space":
            tokens.append(Token(kind, text, at))
        at = match.end()
    tokens.append(Token("eof", "<EOF>", len(source)))
    return tokens, problems


class BadLiteral(ValueError):  # noqa: N818
    """The text of a string or bytes literal cannot be unescaped."""


def unescape(text: str) -> str:
    """Give the value of a string literal."""
    body, raw = _strip(text)
    if raw or "\\" not in body:
        return body
    out: list[str] = []
    at = 0
    while at < len(body):
        if body[at] != "\\":
            out.append(body[at])
            at += 1
            continue
        value, at, _ = _escape(body, at)
        if isinstance(value, int):
            if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
                raise BadLiteral("invalid unicode code point")
            value = chr(value)
        out.append(value)
    return "".join(out)


def unescape_bytes(text: str) -> bytes:
    """Give the value of a bytes literal: escapes are bytes, other characters their UTF-8."""
    body, raw = _strip(text[1:])
    if raw:
        return body.encode()
    out = bytearray()
    at = 0
    while at < len(body):
        if body[at] != "\\":
            out += body[at].encode("utf-8", "surrogatepass")
            at += 1
            continue
        value, at, is_unicode = _escape(body, at)
        if is_unicode:
            raise BadLiteral("unable to unescape string")
        out += bytes([value]) if isinstance(value, int) else value.encode()
    return bytes(out)


def _strip(text: str) -> tuple[str, bool]:
    raw = text[0] in "rR"
    if raw:
        text = text[1:]
    width = 3 if len(text) >= 6 and text[:3] in {'"""', "'''"} else 1
    return text[width:-width], raw


def _escape(body: str, at: int) -> tuple[str | int, int, bool]:
    letter = body[at + 1]
    if letter in _SIMPLE:
        return _SIMPLE[letter], at + 2, False
    if letter in "xX":
        return int(body[at + 2 : at + 4], 16), at + 4, False
    if letter == "u":
        return int(body[at + 2 : at + 6], 16), at + 6, True
    if letter == "U":
        return int(body[at + 2 : at + 10], 16), at + 10, True
    return int(body[at + 1 : at + 4], 8), at + 4, False
