"""Plain words of YAML as kubectl reads them: which are numbers, which mean yes or no, and which are texts.

PyYAML and the reader of kubectl disagree on some: `y` and `n` are true and false there, `1e2`, `-.5` and `08` are numbers.
What kubectl sends for `1.0` is `1`, which the API server takes as a whole number.

Source: sigs.k8s.io/yaml, the reader of kubectl, Helm and Argo CD; compared with kubectl 1.36.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

_TRUE = frozenset({"y", "yes", "true", "on"})
_TAG = "tag:yaml.org,2002:"
_BOOL = re.compile(
    r"y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", re.ASCII
)
_ENDLESS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII)
_BASED = re.compile(
    r"(?P<sign>[-+]?)0([xX](?P<x>[0-9a-fA-F]+)|[bB](?P<b>[01]+)|[oO]?(?P<o>[0-7]+))", re.ASCII
)
_WHOLE = re.compile(r"[-+]?[0-9]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_BASES = {"x": 16, "b": 2, "o": 8}


def number(text: str) -> int | float | None:
    """Give the number that a plain word is; None for a text.

    A whole number is an `int`, however it is written (`1.0`, `1e2`), and exact beyond 64 bits too.

    Raises:
        ValueError: it has more digits than Python reads.
    """
    plain = text if text.startswith((".", "_")) else text.replace("_", "")
    if based := _BASED.fullmatch(plain):
        found = next(int(based["sign"] + based[key], base) for key, base in _BASES.items() if based[key])
        if -(2**63) <= found < 2**64:
            return found
    if not _FLOAT.fullmatch(plain):
        return None
    if _WHOLE.fullmatch(plain):
        return int(plain)
    value = float(plain)
    return None if math.isinf(value) else whole(value)


def whole(value: float) -> int | float:
    """Give a number that is whole and fits in 64 bits as an `int`: that is how it is sent.

    Raises:
        ValueError: JSON has no such number.
    """
    if not math.isfinite(value):
        raise ValueError("a number is too large, or is none")
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def json_float(text: str) -> int | float:
    """Read a number of JSON with a point or an exponent (the `parse_float` of Python's reader).

    Raises:
        ValueError: it is too large.
    """
    return whole(float(text))


def is_true(text: str) -> bool:
    """Tell what a word for yes or no means."""
    return text.lower() in _TRUE


def scalar_number(text: str) -> int | float:
    """Give the number that is written as such.

    Raises:
        ValueError: JSON has no such number (`.inf`), or it is none.
    """
    value = number(text)
    if value is None:
        raise ValueError(f"{text} is no number of JSON")
    return value


class _Number:
    """Stands where PyYAML has a regular expression."""

    def match(self, text: str) -> bool:
        try:
            return number(text) is not None or _ENDLESS.fullmatch(text) is not None
        except ValueError:
            # What reads the value says what is wrong with it, and in which line.
            return True


class _Word:
    def match(self, text: str) -> bool:
        return _BOOL.fullmatch(text) is not None


@functools.cache
def kubectl_loader() -> Any:
    """Give the class of PyYAML's loaders that reads as kubectl does; times stay text, as in JSON."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    kept = {f"{_TAG}null", f"{_TAG}merge"}
    resolvers = {
        letter: [pair for pair in pairs if pair[0] in kept]
        for letter, pairs in base.yaml_implicit_resolvers.items()
    }

    class Loader(base):  # type: ignore[misc]
        """Knows other words than YAML 1.1."""

        yaml_implicit_resolvers = resolvers

    Loader.add_implicit_resolver(f"{_TAG}float", _Number(), list("-+.0123456789"))
    Loader.add_implicit_resolver(f"{_TAG}bool", _Word(), list("yYnNtTfFoO"))
    for kind in ("int", "float"):
        Loader.add_constructor(f"{_TAG}{kind}", lambda _, node: scalar_number(node.value))
    Loader.add_constructor(f"{_TAG}bool", lambda _, node: is_true(node.value))
    return Loader
