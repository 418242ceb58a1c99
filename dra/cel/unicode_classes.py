r"""Unicode categories and a few scripts for `\p{…}` in patterns.

Source: Python's unicodedata (its Unicode version may differ from Go's by some characters); scripts are
recognised by the characters' names.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_CATEGORIES = frozenset(
    {
        "C", "Cc", "Cf", "Co", "Cs", "L", "Ll", "Lm", "Lo", "Lt", "Lu", "M", "Mc", "Me", "Mn", "N", "Nd", "Nl", "No",
        "P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc", "Sk", "Sm", "So", "Z", "Zl", "Zp", "Zs",
    }
)  # fmt: skip
_SCRIPTS = frozenset(
    {
        "Arabic", "Armenian", "Bengali", "Cyrillic", "Devanagari", "Georgian", "Greek", "Gujarati", "Han", "Hangul",
        "Hebrew", "Hiragana", "Katakana", "Latin", "Tamil", "Telugu", "Thai", "Tibetan",
    }
)  # fmt: skip


@lru_cache(maxsize=64)
def ranges_of(name: str, *, negated: bool) -> str | None:
    """Give the inside of a character class for a category or script, or None if it is unknown."""
    if name == "Any":
        return "" if negated else "\\x00-\\U0010ffff"
    if name not in _CATEGORIES and name not in _SCRIPTS:
        return None
    parts: list[str] = []
    start: int | None = None
    for code in range(0x110001):
        inside = code <= 0x10FFFF and _has(code, name) != negated
        if inside and start is None:
            start = code
        elif not inside and start is not None:
            parts.append(f"\\U{start:08x}-\\U{code - 1:08x}")
            start = None
    return "".join(parts)


def _has(code: int, name: str) -> bool:
    char = chr(code)
    if name in _SCRIPTS:
        word = {"Han": "CJK UNIFIED"}.get(name, name.upper())
        return unicodedata.name(char, "").startswith(word)
    return unicodedata.category(char).startswith(name)
