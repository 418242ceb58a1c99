"""Declarations and bodies of functions.

A declaration is a line `overload_id: receiver~name(types) -> type` (or `overload_id: name(types) -> type`); the checker
uses it. A body is bound to the run-time types of its arguments, `object` standing for any; the evaluator picks it by
the types it meets, as cel-go's dispatcher does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dra.cel.types import CelType, parse_type
from dra.cel.values import no_overload_for

Body = Callable[..., Any]
_Bound = TypeVar("_Bound", bound=Body)
_LINE = re.compile(r"(?P<id>[^\s:]+):\s*(?P<left>.*?)\s*->\s*(?P<result>\S.*)")


@dataclass(frozen=True, slots=True)
class Overload:
    """One form of a function: `params` has the receiver first where `member` is set."""

    id: str
    member: bool
    params: tuple[CelType, ...]
    result: CelType
    type_params: frozenset[str]


class Function:
    """A function: its declared overloads, and its bodies by run-time types."""

    __slots__ = ("_bodies", "_found", "name", "overloads")

    def __init__(self, name: str) -> None:
        self.name = name
        self.overloads: list[Overload] = []
        self._bodies: list[tuple[tuple[type, ...], Body]] = []
        self._found: dict[tuple[type, ...], Body | None] = {}

    def bind(self, types: tuple[type, ...], body: Body) -> None:
        """Bind a body to run-time types."""
        self._bodies.append((types, body))

    def body(self, types: tuple[type, ...]) -> Body | None:
        """Give the body for arguments of these types."""
        try:
            return self._found[types]
        except KeyError:
            self._found[types] = found = self._search(types)
            return found

    def _search(self, types: tuple[type, ...]) -> Body | None:
        for wanted, body in self._bodies:
            if len(wanted) == len(types) and all(map(_accepts, wanted, types)):
                return body
        return None

    def call(self, *args: Any) -> Any:
        """Call the body for these arguments.

        Raises:
            Failure: there is none, or it fails.
        """
        body = self.body(tuple(map(type, args)))
        if body is None:
            raise no_overload_for(self.name, *args)
        return body(*args)


def _accepts(wanted: type, got: type) -> bool:
    return wanted is object or wanted is got or (wanted is dict and issubclass(got, dict))


FUNCTIONS: dict[str, Function] = {}


def function(name: str) -> Function:
    """Give the function `name`, made at first use."""
    return FUNCTIONS.setdefault(name, Function(name))


def declare(text: str) -> None:
    """Add the declarations of a block of lines; see the module's text."""
    for line in text.strip().splitlines():
        match = _LINE.fullmatch(line.strip())
        assert match is not None, line
        head, _, rest = match["left"].partition("(")
        # The receiver's type ends at the last dot outside brackets; `list(A).name(…)` has brackets in front.
        depth, cut = 0, -1
        left = match["left"]
        for index, char in enumerate(left):
            depth += (char == "(") - (char == ")")
            if char == "~" and depth == 0:
                cut = index
        if cut >= 0:
            receiver, call = left[:cut], left[cut + 1 :]
            head, _, rest = call.partition("(")
            params = [receiver, *_split(rest[:-1])]
        else:
            params = _split(rest[:-1])
        types = tuple(parse_type(param) for param in params)
        result = parse_type(match["result"])
        names: set[str] = set()
        for kind in (*types, result):
            _collect(kind, names)
        function(head).overloads.append(Overload(match["id"], cut >= 0, types, result, frozenset(names)))


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if text.strip():
        parts.append(text[start:])
    return parts


def _collect(kind: CelType, names: set[str]) -> None:
    if kind.kind == "param":
        names.add(kind.name)
    for param in kind.params:
        _collect(param, names)


def implement(name: str, *types: type) -> Callable[[_Bound], _Bound]:
    """Bind the decorated body to `name` for arguments of these run-time types."""

    def decorate(body: _Bound) -> _Bound:
        function(name).bind(types, body)
        return body

    return decorate
