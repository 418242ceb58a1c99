"""The syntax tree. Every node knows its place in the text; the checker writes its type into it.

Macros are expanded by the parser into comprehensions, as cel-go does, so that checking and cost follow the same
shape; a comprehension also remembers which macro it was, for the evaluator's fast path and for `explain`.
"""

from __future__ import annotations

from dra.cel.types import CelType


class Node:
    """A node.

    `at` is the place of problems, `start` to `end` the text, in code points. `depth` counts nested operators, selections and
    member calls. `kind` is the static type once checked.
    """

    __slots__ = ("at", "depth", "end", "kind", "start")

    def __init__(self, at: int) -> None:
        self.at = at
        self.start = at
        self.end = at
        self.depth = 0
        self.kind: CelType | None = None


class Literal(Node):
    """A constant of the text."""

    __slots__ = ("value",)

    def __init__(self, at: int, value: object) -> None:
        super().__init__(at)
        self.value = value


class Ident(Node):
    """A name; a leading dot means the outermost scope."""

    __slots__ = ("name",)

    def __init__(self, at: int, name: str) -> None:
        super().__init__(at)
        self.name = name


class Select(Node):
    """`operand.field`, or `has(operand.field)` when `test` is set."""

    __slots__ = ("field", "operand", "qualified", "test")

    def __init__(self, at: int, operand: Node, field: str, *, test: bool = False) -> None:
        super().__init__(at)
        self.operand = operand
        self.field = field
        self.test = test
        # Set by the checker when the whole chain names a type (`net.IP`).
        self.qualified: str = ""


class Call(Node):
    """A function or operator call; `target` is the receiver. The checker writes name and overloads."""

    __slots__ = ("args", "name", "overloads", "target")

    def __init__(self, at: int, name: str, args: list[Node], target: Node | None = None) -> None:
        super().__init__(at)
        self.name = name
        self.args = args
        self.target = target
        self.overloads: tuple[str, ...] = ()


class ListNode(Node):
    """`[a, ?b]`; `optional` holds the indexes written with a question mark."""

    __slots__ = ("elements", "optional")

    def __init__(self, at: int, elements: list[Node], optional: frozenset[int] = frozenset()) -> None:
        super().__init__(at)
        self.elements = elements
        self.optional = optional


class MapNode(Node):
    """`{k: v, ?k: v}` as (key, value, optional)."""

    __slots__ = ("entries",)

    def __init__(self, at: int, entries: list[tuple[Node, Node, bool]]) -> None:
        super().__init__(at)
        self.entries = entries


class StructNode(Node):
    """`google.protobuf.Int64Value{value: 1}` as (offset of the field, name, value, optional)."""

    __slots__ = ("fields", "name")

    def __init__(self, at: int, name: str, fields: list[tuple[int, str, Node, bool]]) -> None:
        super().__init__(at)
        self.name = name
        self.fields = fields


class Fold(Node):
    """A comprehension: walk `range`, keep an accumulator, stop when `condition` is false."""

    __slots__ = ("accu", "condition", "init", "macro", "range", "result", "step", "var", "var2")

    def __init__(
        self, at: int, *, range_: Node, var: str, var2: str, accu: str, init: Node, condition: Node, step: Node,
        result: Node, macro: str,
    ) -> None:  # fmt: skip
        super().__init__(at)
        self.range = range_
        self.var = var
        self.var2 = var2
        self.accu = accu
        self.init = init
        self.condition = condition
        self.step = step
        self.result = result
        self.macro = macro


def children(node: Node) -> list[Node]:
    """Give the direct parts of a node, in the order of evaluation."""
    match node:
        case Select():
            return [node.operand]
        case Call():
            return [*([node.target] if node.target else []), *node.args]
        case ListNode():
            return node.elements
        case MapNode():
            return [part for key, value, _ in node.entries for part in (key, value)]
        case StructNode():
            return [value for _, _, value, _ in node.fields]
        case Fold():
            return [node.range, node.init, node.condition, node.step, node.result]
    return []
