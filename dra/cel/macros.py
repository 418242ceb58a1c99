"""Macros: `has`, `all`, `exists`, `exists_one`, `map`, `filter`, `cel.bind`, `optMap`, … as comprehensions.

Source: cel-go's standard macros, ext.Bindings, ext.TwoVarComprehensions and the optional library.
A macro that does not recognise its arguments' number leaves the call as an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable

from dra.cel.tree import Call, Fold, Ident, ListNode, Literal, MapNode, Node, Select

ACCU = "@result"
_UNUSED = "#unused"


class MacroError(Exception):
    """The arguments of a macro are not what it needs; `at` is the offset to report."""

    def __init__(self, at: int, message: str) -> None:
        super().__init__(message)
        self.at = at
        self.message = message


Expander = Callable[[int, Node, list[Node]], Node | None]


def expand(at: int, name: str, target: Node | None, args: list[Node]) -> Node | None:
    """Give what a call expands to, or None where it is no macro.

    Raises:
        MacroError: an argument that must be a name is none, and the like.
    """
    if target is None:
        return _has(at, args[0]) if name == "has" and len(args) == 1 else None
    expander = _MEMBERS.get((name, len(args)))
    return expander(at, target, args) if expander else None


def _has(at: int, arg: Node) -> Node:
    if isinstance(arg, Select) and not arg.test:
        return Select(at, arg.operand, arg.field, test=True)
    raise MacroError(arg.at, "invalid argument to has() macro")


def _name(arg: Node, message: str = "argument must be a simple name") -> str:
    if not isinstance(arg, Ident) or arg.name.startswith("."):
        raise MacroError(arg.at, message)
    if arg.name in {"__result__", ACCU}:
        raise MacroError(arg.at, "iteration variable overwrites accumulator variable")
    return arg.name


def _two_names(args: list[Node]) -> tuple[str, str]:
    first, second = _name(args[0]), _name(args[1])
    if first == second:
        raise MacroError(args[1].at, f"duplicate variable name: {first}")
    return first, second


def _call(at: int, name: str, *args: Node) -> Call:
    return Call(at, name, list(args))


def _names(args: list[Node]) -> tuple[str, str, Node]:
    """Split the arguments of a quantifier into its variables and its predicate."""
    if len(args) == 2:
        return _name(args[0]), "", args[1]
    first, second = _two_names(args)
    return first, second, args[2]


def _all(at: int, target: Node, args: list[Node]) -> Node:
    var, var2, predicate = _names(args)
    accu = Ident(at, ACCU)
    return Fold(
        at, range_=target, var=var, var2=var2, accu=ACCU, init=Literal(at, True),
        condition=_call(at, "@not_strictly_false", accu), step=_call(at, "_&&_", accu, predicate), result=accu,
        macro="all",
    )  # fmt: skip


def _exists(at: int, target: Node, args: list[Node]) -> Node:
    var, var2, predicate = _names(args)
    accu = Ident(at, ACCU)
    return Fold(
        at, range_=target, var=var, var2=var2, accu=ACCU, init=Literal(at, False),
        condition=_call(at, "@not_strictly_false", _call(at, "!_", accu)),
        step=_call(at, "_||_", accu, predicate), result=accu, macro="exists",
    )  # fmt: skip


def _exists_one(at: int, target: Node, args: list[Node]) -> Node:
    var, var2, predicate = _names(args)
    accu = Ident(at, ACCU)
    step = _call(at, "_?_:_", predicate, _call(at, "_+_", accu, Literal(at, 1)), accu)
    return Fold(
        at, range_=target, var=var, var2=var2, accu=ACCU, init=Literal(at, 0), condition=Literal(at, True),
        step=step, result=_call(at, "_==_", accu, Literal(at, 1)), macro="exists_one",
    )  # fmt: skip


def _append(at: int, value: Node) -> Node:
    return _call(at, "_+_", Ident(at, ACCU), ListNode(at, [value]))


def _map(at: int, target: Node, args: list[Node]) -> Node:
    var = _name(args[0], "argument is not an identifier")
    step = _append(at, args[-1])
    if len(args) == 3:
        step = _call(at, "_?_:_", args[1], step, Ident(at, ACCU))
    return _collect(at, target, (var, ""), step, macro="map")


def _filter(at: int, target: Node, args: list[Node]) -> Node:
    var = _name(args[0], "argument is not an identifier")
    step = _call(at, "_?_:_", args[1], _append(at, args[0]), Ident(at, ACCU))
    return _collect(at, target, (var, ""), step, macro="filter")


def _transform_list(at: int, target: Node, args: list[Node]) -> Node:
    names = _two_names(args)
    step = _append(at, args[-1])
    if len(args) == 4:
        step = _call(at, "_?_:_", args[2], step, Ident(at, ACCU))
    return _collect(at, target, names, step, macro="transformList")


def _collect(at: int, target: Node, names: tuple[str, str], step: Node, *, macro: str) -> Fold:
    return Fold(
        at, range_=target, var=names[0], var2=names[1], accu=ACCU, init=ListNode(at, []),
        condition=Literal(at, True), step=step, result=Ident(at, ACCU), macro=macro,
    )  # fmt: skip


def _transform_map(at: int, target: Node, args: list[Node]) -> Node:
    names = _two_names(args)
    step: Node = _call(at, "cel.@mapInsert", Ident(at, ACCU), Ident(at, names[0]), args[-1])
    return _collect_map(at, target, names, step, args)


def _transform_map_entry(at: int, target: Node, args: list[Node]) -> Node:
    names = _two_names(args)
    step: Node = _call(at, "cel.@mapInsert", Ident(at, ACCU), args[-1])
    return _collect_map(at, target, names, step, args)


def _collect_map(at: int, target: Node, names: tuple[str, str], step: Node, args: list[Node]) -> Fold:
    if len(args) == 4:
        step = _call(at, "_?_:_", args[2], step, Ident(at, ACCU))
    return Fold(
        at, range_=target, var=names[0], var2=names[1], accu=ACCU, init=MapNode(at, []),
        condition=Literal(at, True), step=step, result=Ident(at, ACCU), macro="transformMap",
    )  # fmt: skip


def _bind_fold(at: int, var: str, init: Node, body: Node) -> Fold:
    return Fold(
        at, range_=ListNode(at, []), var=_UNUSED, var2="", accu=var, init=init, condition=Literal(at, False),
        step=Ident(at, var), result=body, macro="bind",
    )  # fmt: skip


def _bind(at: int, target: Node, args: list[Node]) -> Node | None:
    if not isinstance(target, Ident) or target.name != "cel":
        return None
    if not isinstance(args[0], Ident) or args[0].name.startswith("."):
        raise MacroError(args[0].at, "cel.bind() variable names must be simple identifiers")
    return _bind_fold(at, args[0].name, args[1], args[2])


def _opt_map(at: int, target: Node, args: list[Node]) -> Node:
    return _opt(at, target, args, wrap=True)


def _opt_flat_map(at: int, target: Node, args: list[Node]) -> Node:
    return _opt(at, target, args, wrap=False)


def _opt(at: int, target: Node, args: list[Node], *, wrap: bool) -> Node:
    name = "optMap" if wrap else "optFlatMap"
    if not isinstance(args[0], Ident) or args[0].name.startswith("."):
        raise MacroError(args[0].at, f"{name}() variable name must be a simple identifier")
    # The target stands twice in the tree; both places share one node, so that chains do not grow without bound.
    body: Node = _bind_fold(at, args[0].name, Call(at, "value", [], target), args[1])
    if wrap:
        body = _call(at, "optional.of", body)
    return _call(at, "_?_:_", Call(at, "hasValue", [], target), body, _call(at, "optional.none"))


def _sort_by(at: int, target: Node, args: list[Node]) -> Node:
    if isinstance(target, (Literal, MapNode)):
        raise MacroError(
            target.at,
            "sortBy can only be applied to a list, identifier, comprehension, call or select expression",
        )
    name = "@__sortBy_input__"
    keys = _map(at, Ident(at, name), args)
    return _bind_fold(at, name, target, Call(at, "@sortByAssociatedKeys", [keys], Ident(at, name)))


_MEMBERS: dict[tuple[str, int], Expander] = {
    ("all", 2): _all,
    ("all", 3): _all,
    ("exists", 2): _exists,
    ("exists", 3): _exists,
    ("exists_one", 2): _exists_one,
    ("exists_one", 3): _exists_one,
    ("existsOne", 3): _exists_one,
    ("map", 2): _map,
    ("map", 3): _map,
    ("filter", 2): _filter,
    ("transformList", 3): _transform_list,
    ("transformList", 4): _transform_list,
    ("transformMap", 3): _transform_map,
    ("transformMap", 4): _transform_map,
    ("transformMapEntry", 3): _transform_map_entry,
    ("transformMapEntry", 4): _transform_map_entry,
    ("bind", 3): _bind,
    ("sortBy", 2): _sort_by,
    ("optMap", 2): _opt_map,
    ("optFlatMap", 2): _opt_flat_map,
}
