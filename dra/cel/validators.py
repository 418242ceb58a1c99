"""Checks after the type check: literal durations, timestamps, patterns and formats; aggregates of one type.

Source: cel-go's AST validators as Kubernetes' base environment enables them.
"""

from __future__ import annotations

from dra.cel import types as t
from dra.cel.checker import every_node
from dra.cel.errors import Failure
from dra.cel.functions.format_strings import FormatProblem, check_format
from dra.cel.functions.registry import FUNCTIONS
from dra.cel.regex import RegexProblem, compile_pattern
from dra.cel.tree import Call, ListNode, Literal, MapNode, Node
from dra.cel.types import CelType, show

Problems = list[tuple[int, str]]


def validate(root: Node) -> Problems:
    """Give the problems of a tree whose types are right, as (offset, message)."""
    problems: Problems = []
    nodes = every_node(root)
    exempt = _inside_format(nodes)
    for node in nodes:
        match node:
            case Call():
                _literal_argument(node, problems)
                _format(node, problems)
            case ListNode() if id(node) not in exempt:
                _same_types(
                    [(element, index in node.optional) for index, element in enumerate(node.elements)],
                    problems,
                    once=True,
                )
            case MapNode() if id(node) not in exempt:
                _same_types([(key, False) for key, _, _ in node.entries], problems)
                _same_types([(value, optional) for _, value, optional in node.entries], problems)
    return problems


def _inside_format(nodes: list[Node]) -> set[int]:
    """Aggregates anywhere below a call of format() may mix types."""
    inside: set[int] = set()
    for node in nodes:
        if isinstance(node, Call) and node.name == "format" and node.target is not None:
            for arg in [node.target, *node.args]:
                inside.update(id(part) for part in every_node(arg))
    return inside


def _literal_argument(node: Call, problems: Problems) -> None:
    if node.name in {"duration", "timestamp"} and len(node.args) == 1:
        arg = node.args[0]
        if isinstance(arg, Literal):
            try:
                FUNCTIONS[node.name].call(arg.value)
            except Failure:
                problems.append((arg.at, f"invalid {node.name} argument"))
    elif node.name == "matches":
        # The first written argument: of the global form that is the text, and upstream checks just that.
        arg = node.args[0]
        if isinstance(arg, Literal) and isinstance(arg.value, str):
            try:
                compile_pattern(arg.value)
            except RegexProblem:
                problems.append((arg.at, "invalid matches argument"))


def _format(node: Call, problems: Problems) -> None:
    target = node.target
    if node.name != "format" or not isinstance(target, Literal) or not isinstance(target.value, str):
        return
    if len(node.args) != 1 or not isinstance(node.args[0], ListNode):
        return
    elements = node.args[0].elements
    try:
        used = check_format(target.value, elements)
    except FormatProblem as problem:
        problems.append((problem.at if problem.at is not None else node.at, str(problem)))
        return
    if len(elements) > used:
        text = f"too many arguments supplied to string.format (expected {used}, got {len(elements)})"
        problems.append((node.at, text))


def _same_types(parts: list[tuple[Node, bool]], problems: Problems, *, once: bool = False) -> None:
    expected: CelType | None = None
    for node, optional in parts:
        kind = node.kind or t.DYN
        if optional and t.is_optional(kind):
            kind = kind.params[0]
        if expected is None:
            expected = kind
        elif kind != expected:
            problems.append((node.at, f"expected type '{show(expected)}' but found '{show(kind)}'"))
            if once:
                return
