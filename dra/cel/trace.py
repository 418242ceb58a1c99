"""Why a selector is true, false or fails on a device: its terms, their values, and what they saw.

`explain` shows this: the term that turned the selector false, and the value the device has there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dra.cel.errors import Failure
from dra.cel.functions.convert import format_double
from dra.cel.functions.quantities import CelQuantity
from dra.cel.functions.times import format_duration, format_timestamp
from dra.cel.interpreter import step_of
from dra.cel.tree import Call, Fold, Ident, Node, children
from dra.cel.values import Duration, Optional, Timestamp, Uint, decode_key
from dra.values import Quantity

_NOT_REACHED = object()
_LONG = 200


@dataclass(frozen=True, slots=True)
class SubTerm:
    """One term of a selector.

    Attributes:
        text: as written in the expression.
        value: true or false; None where the term failed, gave no bool, or was not reached.
        failure: why it failed; empty otherwise.
        decided: the whole has its value because of this term.
        reached: false where an earlier term had already decided.
        depth: nesting below the whole (terms of `&&` inside a term of `||`, and so on).
        saw: the device's parts that the term reads, with their values as literals of the language.
    """

    text: str
    value: bool | None
    failure: str
    decided: bool
    reached: bool
    depth: int
    saw: tuple[tuple[str, str], ...]


def explain_terms(source: str, root: Node, values: dict[int, Any]) -> list[SubTerm]:
    """Give the terms of a selector in the order they are written; terms with terms of their own come before them."""
    return list(_terms(source, root, values, depth=0, decided=True))


def _terms(
    source: str, node: Node, values: dict[int, Any], *, depth: int, decided: bool
) -> Iterator[SubTerm]:
    if isinstance(node, Fold) and node.macro == "bind" and _is_logical(node.result):
        node = node.result
    logical = _is_logical(node)
    if not logical or depth > 0:
        yield _term(source, node, values, depth=depth, decided=decided)
    if not logical:
        return
    assert isinstance(node, Call)
    whole = values.get(id(node), _NOT_REACHED)
    for arg in node.args:
        value = values.get(id(arg), _NOT_REACHED)
        yield from _terms(
            source, arg, values, depth=depth + 1, decided=decided and _decides(node.name, whole, value)
        )


def _is_logical(node: Node) -> bool:
    return isinstance(node, Call) and node.name in {"_&&_", "_||_"}


def _decides(name: str, whole: Any, value: Any) -> bool:
    if value is _NOT_REACHED:
        return False
    if isinstance(whole, Failure):
        return value is not True and value is not False
    deciding = name == "_||_"
    # One term is enough for the deciding value; the other value needs them all.
    return value is deciding if whole is deciding else True


def _term(source: str, node: Node, values: dict[int, Any], *, depth: int, decided: bool) -> SubTerm:
    value = values.get(id(node), _NOT_REACHED)
    failure = value.text if isinstance(value, Failure) else ""
    return SubTerm(
        text=source[node.start : node.end],
        value=value if isinstance(value, bool) else None,
        failure=failure,
        decided=decided and value is not _NOT_REACHED,
        reached=value is not _NOT_REACHED,
        depth=depth,
        saw=tuple(_saw(source, node, values)) if not _is_logical(node) else (),
    )


def _saw(source: str, node: Node, values: dict[int, Any]) -> Iterator[tuple[str, str]]:
    """Give the longest chains into the device below a node, each once."""
    known: set[str] = set()
    for chain in _chains(node):
        text = source[chain.start : chain.end]
        value = values.get(id(chain), _NOT_REACHED)
        if text not in known and value is not _NOT_REACHED:
            known.add(text)
            yield text, describe(value)


def _chains(node: Node) -> Iterator[Node]:
    if step_of(node) is not None:
        head: Node = node
        while (step := step_of(head)) is not None:
            if isinstance(step[1], Node):
                yield from _chains(step[1])
            head = step[0]
        if isinstance(head, Ident):
            yield node
        else:
            yield from _chains(head)
        return
    if isinstance(node, Fold) and node.macro != "bind":
        # Inside a loop only the last round's values are known; they would mislead.
        yield from _chains(node.range)
        return
    for part in children(node):
        yield from _chains(part)


def describe(value: Any) -> str:
    """Write a value as a literal of the language, shortened; a failure as its reason."""
    text = _describe(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"


def _describe(value: Any) -> str:
    match value:
        case Failure():
            return value.text
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case Duration():
            return f'duration("{format_duration(int(value))}")'
        case Timestamp():
            return f'timestamp("{format_timestamp(int(value))}")'
        case Uint():
            return f"{int(value)}u"
        case float():
            return format_double(value)
        case list():
            return f"[{', '.join([_describe(item) for item in value])}]"
        case dict():
            pairs = [f"{_describe(decode_key(key))}: {_describe(item)}" for key, item in value.items()]
            return f"{{{', '.join(pairs)}}}"
        case Optional():
            return f"optional.of({_describe(value.value)})" if value.present else "optional.none()"
        case CelQuantity():
            return f'quantity("{_quantity_text(value)}")'
    return f"{value}"


def _quantity_text(value: CelQuantity) -> str:
    if value.scale > 9 or abs(value.scale) > 40:
        return f"{value.unscaled}e{-value.scale}"
    return str(Quantity(value.unscaled * 10 ** (9 - value.scale), "binary"))
