"""Static types: which expressions compile, and as which type.

Source: cel-go's checker: overload resolution by unification, `any` and `dyn` match everything, an aggregate of mixed
types is `dyn` here and refused afterwards by the validators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dra.cel import types as t
from dra.cel.functions.registry import FUNCTIONS, Overload
from dra.cel.tree import Call, Fold, Ident, ListNode, Literal, MapNode, Node, Select, StructNode, children
from dra.cel.types import CelType, show
from dra.cel.values import type_of

Bindings = dict[str, CelType]


@dataclass(slots=True)
class Environment:
    """What an expression may name: variables, the device's fields, functions left out, the fields of other structs."""

    variables: dict[str, CelType]
    fields: dict[str, CelType]
    hidden_functions: frozenset[str] = frozenset()
    structs: Mapping[str, Mapping[str, CelType]] = field(default_factory=dict)

    def fields_of(self, kind: CelType) -> Mapping[str, CelType]:
        """Give the fields of a struct."""
        return self.fields if kind == t.DEVICE else self.structs.get(kind.name, {})


@dataclass(slots=True)
class Checked:
    """The outcome: the type of the whole, and the problems as (offset, message)."""

    kind: CelType
    problems: list[tuple[int, str]] = field(default_factory=list)


def check(root: Node, environment: Environment) -> Checked:
    """Write types and overloads into the tree and give the type of the whole."""
    checker = _Checker(environment)
    kind = checker.check(root)
    for node in checker.seen:
        if node.kind is not None:
            node.kind = checker.substitute(node.kind, to_dyn=True)
    return Checked(checker.substitute(kind, to_dyn=True), checker.problems)


class _Checker:
    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.scopes: list[dict[str, CelType]] = []
        self.problems: list[tuple[int, str]] = []
        self.bindings: Bindings = {}
        self.seen: list[Node] = []
        self.variables = 0

    def report(self, at: int, message: str) -> None:
        if (at, message) not in self.problems:
            self.problems.append((at, message))

    def check(self, node: Node) -> CelType:
        """Give the type of a node; a node that stands in two places is checked once."""
        if node.kind is not None:
            return node.kind
        match node:
            case Literal():
                kind = type_of(node.value)
            case Ident():
                kind = self.ident(node)
            case Select():
                kind = self.select(node)
            case Call():
                kind = self.call(node)
            case ListNode():
                kind = self.list_(node)
            case MapNode():
                kind = self.map_(node)
            case StructNode():
                kind = self.struct(node)
            case Fold():
                kind = self.fold(node)
            case _:
                raise AssertionError(node)
        node.kind = kind
        self.seen.append(node)
        return kind

    # -- names

    def lookup(self, name: str) -> CelType | None:
        if not name.startswith("."):
            for scope in reversed(self.scopes):
                if name in scope:
                    return scope[name]
        name = name.removeprefix(".")
        if name in self.environment.variables:
            return self.environment.variables[name]
        if name in t.TYPE_IDENTS:
            return t.type_of_type(t.TYPE_IDENTS[name])
        return None

    def undeclared(self, at: int, name: str) -> CelType:
        self.report(at, f"undeclared reference to '{name}' (in container '')")
        return t.ERROR

    def ident(self, node: Ident) -> CelType:
        return self.lookup(node.name) or self.undeclared(node.at, node.name)

    def qualified(self, node: Node) -> str | None:
        """The dotted name a chain of selections spells, unless its head is a variable of a macro."""
        parts: list[str] = []
        while isinstance(node, Select) and not node.test:
            parts.append(node.field)
            node = node.operand
        if not isinstance(node, Ident) or any(node.name in scope for scope in self.scopes):
            return None
        return ".".join([node.name.removeprefix("."), *reversed(parts)])

    def select(self, node: Select) -> CelType:
        if not node.test:
            name = self.qualified(node)
            if name is not None and name in t.TYPE_IDENTS:
                node.qualified = name
                return t.type_of_type(t.TYPE_IDENTS[name])
        kind = self.field(node, node.operand, node.field, optional=False)
        return t.BOOL if node.test else self.substitute(kind)

    def field(self, node: Node, operand: Node, name: str, *, optional: bool) -> CelType:
        kind = self.substitute(self.check(operand))
        target = kind.params[0] if t.is_optional(kind) else kind
        result = t.ERROR
        match target.kind:
            case "map":
                result = target.params[1]
            case "struct":
                found = self.environment.fields_of(target).get(name)
                if found is None:
                    self.report(node.at, f"undefined field '{name}'")
                else:
                    result = found
            case "param":
                self.assignable(t.DYN, target)
                result = t.DYN
            case "dyn" | "any" | "error":
                result = t.DYN
            case _:
                self.report(node.at, f"type '{show(target)}' does not support field selection")
                result = t.DYN
        return t.optional_of(result) if optional or t.is_optional(kind) else result

    # -- calls

    def call(self, node: Call) -> CelType:
        if node.name == "_?._" and node.target is None:
            name = node.args[1]
            assert isinstance(name, Literal)
            kind = self.field(node, node.args[0], str(name.value), optional=True)
            self.check(name)
            node.overloads = ("select_optional_field",)
            return self.substitute(kind)
        for arg in node.args:
            self.check(arg)
        if node.target is None:
            name_ = node.name.removeprefix(".")
            overloads = self.overloads(name_)
            if overloads is None:
                return self.undeclared(node.at, node.name)
            node.name = name_
            return self.resolve(node, overloads, [])
        prefix = self.qualified(node.target)
        if prefix is not None:
            overloads = self.overloads(f"{prefix}.{node.name}")
            if overloads is not None:
                node.name = f"{prefix}.{node.name}"
                node.target = None
                return self.resolve(node, overloads, [])
        target = self.check(node.target)
        overloads = self.overloads(node.name)
        if overloads is None:
            return self.undeclared(node.at, node.name)
        return self.resolve(node, overloads, [target])

    def overloads(self, name: str) -> list[Overload] | None:
        function = FUNCTIONS.get(name)
        if function is None or name in self.environment.hidden_functions:
            return None
        return function.overloads

    def resolve(self, node: Call, overloads: list[Overload], receiver: list[CelType]) -> CelType:
        kinds = receiver + [arg.kind or t.ERROR for arg in node.args]
        if node.name in {"_&&_", "_||_"}:
            return self.logical(node)
        result: CelType | None = None
        ids: list[str] = []
        for overload in overloads:
            if overload.member != bool(receiver) or len(overload.params) != len(kinds):
                continue
            fresh = {name: self.variable() for name in overload.type_params}
            wanted = [_instantiate(param, fresh) for param in overload.params]
            if not self.assignable_all(kinds, wanted):
                continue
            ids.append(overload.id)
            found = self.substitute(_instantiate(overload.result, fresh))
            if result is None:
                result = found
            elif not _is_dyn(result) and found != result:
                result = t.DYN
        node.overloads = tuple(ids)
        if result is not None:
            return result
        shown = [show(self.substitute(kind, to_dyn=True)) for kind in kinds]
        what = f"{shown[0]}.({', '.join(shown[1:])})" if receiver else f"({', '.join(shown)})"
        self.report(node.at, f"found no matching overload for '{node.name}' applied to '{what}'")
        return t.ERROR

    def logical(self, node: Call) -> CelType:
        node.overloads = ("logical_and" if node.name == "_&&_" else "logical_or",)
        good = True
        for arg in node.args:
            if not self.assignable(arg.kind or t.ERROR, t.BOOL):
                self.mismatch(arg, t.BOOL, arg.kind or t.ERROR)
                good = False
        return t.BOOL if good else t.ERROR

    def mismatch(self, node: Node, wanted: CelType, got: CelType) -> None:
        wanted, got = self.substitute(wanted), self.substitute(got)
        self.report(node.at, f"expected type '{show(wanted)}' but found '{show(got)}'")

    # -- aggregates

    def join(self, previous: CelType | None, current: CelType) -> CelType:
        if previous is None:
            return current
        if self.assignable(previous, current):
            return _most_general(previous, current)
        return t.DYN

    def unwrapped(self, node: Node, kind: CelType, *, optional: bool) -> CelType:
        if not optional:
            return kind
        if t.is_optional(kind):
            return kind.params[0]
        if not _is_dyn(kind):
            self.mismatch(node, t.optional_of(kind), kind)
        return kind

    def list_(self, node: ListNode) -> CelType:
        joined: CelType | None = None
        for index, element in enumerate(node.elements):
            kind = self.unwrapped(element, self.check(element), optional=index in node.optional)
            joined = self.join(joined, kind)
        return t.list_of(joined or self.variable())

    def map_(self, node: MapNode) -> CelType:
        key_kind: CelType | None = None
        value_kind: CelType | None = None
        for key, value, optional in node.entries:
            key_kind = self.join(key_kind, self.check(key))
            kind = self.unwrapped(value, self.check(value), optional=optional)
            value_kind = self.join(value_kind, kind)
        return t.map_of(key_kind or self.variable(), value_kind or self.variable())

    def struct(self, node: StructNode) -> CelType:
        name = node.name.removeprefix(".")
        fields: dict[str, CelType]
        if name in t.WRAPPERS:
            kind, fields = t.WRAPPERS[name], {"value": t.WRAPPERS[name].params[0]}
        elif name in {t.DURATION.name, t.TIMESTAMP.name}:
            kind = t.DURATION if name == t.DURATION.name else t.TIMESTAMP
            fields = {"seconds": t.INT, "nanos": t.INT}
        elif name == t.DEVICE.name:
            kind, fields = t.DEVICE, self.environment.fields
        else:
            return self.undeclared(node.at, node.name)
        for at, field_name, value, optional in node.fields:
            got = self.unwrapped(value, self.check(value), optional=optional)
            if field_name not in fields:
                self.report(at, f"undefined field '{field_name}'")
            elif not self.assignable(fields[field_name], got):
                self.report(
                    at,
                    f"expected type of field '{field_name}' is '{show(fields[field_name])}' "
                    f"but provided type is '{show(got)}'",
                )
        return kind

    # -- comprehensions

    def fold(self, node: Fold) -> CelType:
        self.check(node.range)
        accu = self.check(node.init)
        kind = self.substitute(self.check(node.range))
        first, second = self.loop_types(node, kind)
        self.scopes.append({node.accu: accu})
        loop = {node.var: first}
        if node.var2:
            loop[node.var2] = second
        self.scopes.append(loop)
        self.expect(node.condition, t.BOOL)
        self.expect(node.step, accu)
        self.scopes.pop()
        result = self.check(node.result)
        self.scopes.pop()
        return self.substitute(result)

    def loop_types(self, node: Fold, kind: CelType) -> tuple[CelType, CelType]:
        match kind.kind:
            case "list":
                return (t.INT, kind.params[0]) if node.var2 else (kind.params[0], t.DYN)
            case "map":
                return kind.params[0], kind.params[1]
            case "dyn" | "error" | "param":
                self.assignable(t.DYN, kind)
                return t.DYN, t.DYN
        self.report(
            node.range.at,
            f"expression of type '{show(kind)}' cannot be range of a comprehension "
            "(must be list, map, or dynamic)",
        )
        return t.ERROR, t.ERROR

    def expect(self, node: Node, wanted: CelType) -> None:
        got = self.check(node)
        if not self.assignable(wanted, got):
            self.mismatch(node, wanted, got)

    # -- unification

    def variable(self) -> CelType:
        self.variables += 1
        return CelType("param", f"_var{self.variables}")

    def assignable(self, left: CelType, right: CelType) -> bool:
        return self.assignable_all([left], [right])

    def assignable_all(self, left: list[CelType], right: list[CelType]) -> bool:
        """Whether each type fits; bindings are kept only where all do."""
        trial = dict(self.bindings)
        if not all(_fits(trial, first, second) for first, second in zip(left, right, strict=True)):
            return False
        self.bindings = trial
        return True

    def substitute(self, kind: CelType, *, to_dyn: bool = False) -> CelType:
        """Replace bound parameters; unbound ones become `dyn` where asked."""
        while kind.kind == "param":
            bound = self.bindings.get(kind.name)
            if bound is None:
                return t.DYN if to_dyn else kind
            kind = bound
        if not kind.params or kind.kind == "wrapper":
            return kind
        params = [self.substitute(param, to_dyn=to_dyn) for param in kind.params]
        if all(new is old for new, old in zip(params, kind.params, strict=True)):
            return kind
        return CelType(kind.kind, kind.name, tuple(params))


def _is_dyn(kind: CelType) -> bool:
    return kind.kind in {"dyn", "any"}


def _instantiate(kind: CelType, fresh: Bindings) -> CelType:
    if kind.kind == "param":
        return fresh[kind.name]
    if not kind.params:
        return kind
    return CelType(kind.kind, kind.name, tuple([_instantiate(param, fresh) for param in kind.params]))


_NULLABLE = frozenset({"opaque", "struct", "any", "duration", "timestamp", "wrapper", "null"})


def _fits(bindings: Bindings, left: CelType, right: CelType) -> bool:
    """Whether a value of type `left` can stand where `right` is wanted; binds parameters on either side."""
    if right.kind == "param":
        valid, bound = _binds(bindings, left, right)
        if valid:
            return True
        if bound:
            return False
    if left.kind == "param":
        return _binds(bindings, right, left)[0]
    if left.kind in {"dyn", "any", "error"} or right.kind in {"dyn", "any", "error"}:
        return True
    if left.kind == "null":
        return right.kind in _NULLABLE
    if right.kind == "null":
        return left.kind in _NULLABLE
    if left.kind == "wrapper" or right.kind == "wrapper":
        return left.name == right.name
    if left.kind == "type":
        return right.kind == "type"
    if left.kind != right.kind or left.name != right.name or len(left.params) != len(right.params):
        return False
    return all(
        _fits(bindings, first, second) for first, second in zip(left.params, right.params, strict=True)
    )


def _binds(bindings: Bindings, kind: CelType, variable: CelType) -> tuple[bool, bool]:
    """Try to give `variable` the type `kind`: (it fits, it was bound before)."""
    if kind == variable:
        return True, True
    bound = bindings.get(variable.name)
    if bound is not None:
        if kind == bound:
            return True, True
        if _fits(bindings, kind, bound):
            general = _most_general(kind, bound)
            if not _occurs(bindings, variable, general):
                bindings[variable.name] = general
            return True, True
        return False, True
    if not _occurs(bindings, variable, kind):
        bindings[variable.name] = kind
        return True, False
    return False, False


def _occurs(bindings: Bindings, variable: CelType, kind: CelType) -> bool:
    if kind == variable:
        return True
    if kind.kind == "param":
        bound = bindings.get(kind.name)
        return bound is not None and _occurs(bindings, variable, bound)
    return any(_occurs(bindings, variable, param) for param in kind.params)


def _most_general(left: CelType, right: CelType) -> CelType:
    return left if _less_specific(left, right) else right


def _less_specific(left: CelType, right: CelType) -> bool:
    if left.kind in {"dyn", "any", "param"}:
        return True
    if right.kind in {"dyn", "any", "param"} or left.kind != right.kind:
        return False
    if left.kind == "type":
        return True
    if left.name != right.name or len(left.params) != len(right.params):
        return False
    return all(map(_less_specific, left.params, right.params))


def every_node(root: Node) -> list[Node]:
    """Give each node once, parents before parts."""
    found: list[Node] = []
    known: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in known:
            continue
        known.add(id(node))
        found.append(node)
        waiting.extend(reversed(children(node)))
    return found
