"""Tree to closures. Each closure takes the frame (a list of slots, the device's fields first) and gives a value.

An error value is a raised `Failure`; `&&`, `||`, `all` and `exists` absorb it. Constant lists, maps and conversions are
computed here, as cel-go does when it builds a program; where one fails, the selector does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dra.cel import types as t
from dra.cel.access import missing_key, present, qualify, qualify_optional
from dra.cel.errors import Failure, no_overload
from dra.cel.folds import plan_fold
from dra.cel.functions import FUNCTIONS, Function
from dra.cel.functions.standard import check_timestamp
from dra.cel.regex import RegexProblem, compile_pattern
from dra.cel.steps import UNSET, Frame, Scope, Step
from dra.cel.tree import Call, Fold, Ident, ListNode, Literal, MapNode, Node, Select, StructNode
from dra.cel.values import Duration, Optional, Uint, check_int, encode_key, equal, no_overload_for, truth

CONVERSIONS = frozenset(
    {"bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"}
)


class InstantiationError(Exception):
    """A constant part of the expression failed when it was computed ahead."""


class Plan:
    """The closures of one expression; `constants` holds the nodes whose value is known.

    Args:
        variables: the names that the frame begins with; a selector has one, whatever it is called.
    """

    def __init__(self, variables: Iterable[str] = ("device",)) -> None:
        self.variables = {name: slot for slot, name in enumerate(variables)}
        self.slots = max(1, len(self.variables))
        self.scopes: list[Scope] = []
        self.constants: dict[int, Any] = {}
        self.steps: dict[int, Step] = {}
        # Tests `x in [constants]`, by node: they are look-ups and cost nothing.
        self.members: dict[int, Callable[[Any], bool]] = {}

    def build(self, root: Node) -> Step:
        """Plan the whole.

        Raises:
            InstantiationError: a constant part fails.
        """
        return self.step(root)

    def slot(self) -> int:
        """Give a fresh slot; slots are never used twice."""
        self.slots += 1
        return self.slots - 1

    def constant(self, node: Node, value: Any) -> Step:
        """Note that a node's value is known."""
        self.constants[id(node)] = value
        return lambda _frame: value

    def step(self, node: Node) -> Step:
        """Give the closure of a node; a node that stands in two places is planned once."""
        found = self.steps.get(id(node))
        if found is None:
            found = self.steps[id(node)] = self._plan(node)
        return found

    def _plan(self, node: Node) -> Step:
        match node:
            case Literal():
                return self.constant(node, node.value)
            case Ident():
                return self._ident(node)
            case Select():
                return self._select(node)
            case Call():
                return self._call(node)
            case ListNode():
                return self._list(node)
            case MapNode():
                return self._map(node)
            case StructNode():
                return self._struct(node)
            case Fold():
                return plan_fold(self, node)
        raise AssertionError(node)

    # -- names and fields

    def _ident(self, node: Ident) -> Step:
        if not node.name.startswith("."):
            for scope in reversed(self.scopes):
                if node.name in scope:
                    return _variable(*scope[node.name])
        name = node.name.removeprefix(".")
        if name in t.TYPE_IDENTS:
            kind = t.TYPE_IDENTS[name]
            return lambda _frame: kind
        slot = self.variables.get(name, 0)
        return lambda frame: frame[slot]

    def _select(self, node: Select) -> Step:
        field = node.field
        if node.qualified:
            kind = t.TYPE_IDENTS[node.qualified]
            return lambda _frame: kind
        operand = self.step(node.operand)
        if node.test:
            return lambda frame: present(operand(frame), field)
        kind_of_operand = node.operand.kind or t.DYN
        if kind_of_operand.kind == "map" or kind_of_operand == t.DEVICE:
            return _field(operand, field)
        return lambda frame: qualify(operand(frame), field)

    # -- calls

    def _call(self, node: Call) -> Step:
        special = getattr(self, _SPECIAL.get(node.name, ""), None)
        if special is not None:
            step: Step = special(node)
            return step
        parts = [*([node.target] if node.target else []), *node.args]
        steps = [self.step(part) for part in parts]
        if node.name in CONVERSIONS and len(parts) == 1 and id(parts[0]) in self.constants:
            try:
                return self.constant(node, FUNCTIONS[node.name].call(self.constants[id(parts[0])]))
            except Failure as failure:
                raise InstantiationError(failure.text) from None
        if node.name in {"quantity", "semver"} and all(id(part) in self.constants for part in parts):
            return _known(FUNCTIONS[node.name], [self.constants[id(part)] for part in parts])
        if node.name in {"matches", "find", "findAll"}:
            self._check_pattern(parts)
        return _call(FUNCTIONS[node.name], steps)

    def _check_pattern(self, parts: list[Node]) -> None:
        pattern = self.constants.get(id(parts[1])) if len(parts) > 1 else None
        if isinstance(pattern, str):
            try:
                compile_pattern(pattern)
            except RegexProblem as problem:
                raise InstantiationError(str(problem)) from None

    def _terms(self, node: Call) -> tuple[Step, ...]:
        return tuple(self.step(arg) for arg in node.args)

    def _and(self, node: Call) -> Step:
        return _logical(self._terms(node), decides=False)

    def _or(self, node: Call) -> Step:
        return _logical(self._terms(node), decides=True)

    def _conditional(self, node: Call) -> Step:
        condition, then, otherwise = self._terms(node)

        def run(frame: Frame) -> Any:
            return then(frame) if truth(condition(frame)) else otherwise(frame)

        return run

    def _equals(self, node: Call) -> Step:
        left, right = self._terms(node)
        if id(node.args[1]) in self.constants:
            return _equals_constant(left, self.constants[id(node.args[1])])
        return lambda frame: equal(left(frame), right(frame))

    def _index(self, node: Call) -> Step:
        operand, key = self._terms(node)
        kind = node.args[0].kind or t.DYN
        if kind.kind == "map" and isinstance(self.constants.get(id(node.args[1])), str):
            return _field(operand, self.constants[id(node.args[1])])
        return lambda frame: qualify(operand(frame), key(frame))

    def _optional_index(self, node: Call) -> Step:
        operand, key = self._terms(node)
        return lambda frame: qualify_optional(operand(frame), key(frame))

    def _or_value(self, node: Call) -> Step:
        assert node.target is not None
        first, second = self.step(node.target), self.step(node.args[0])
        unwrap = node.name == "orValue"

        def run(frame: Frame) -> Any:
            value = first(frame)
            if type(value) is not Optional:
                raise no_overload()
            if value.present:
                return value.value if unwrap else value
            return second(frame)

        return run

    def _in(self, node: Call) -> Step:
        steps = self._terms(node)
        items = self.constants.get(id(node.args[1]))
        if type(items) is list and "in_list" in node.overloads and len(node.overloads) == 1:
            if not items:
                return self.constant(node, value=False)
            if all(type(item) is not bytes and type(item) in _HASHED for item in items):
                element, member = steps[0], _member(items)
                self.members[id(node)] = member
                return lambda frame: member(element(frame))
        return _call(FUNCTIONS["@in"], list(steps))

    # -- aggregates

    def _list(self, node: ListNode) -> Step:
        steps = [self.step(element) for element in node.elements]
        if not node.optional:
            if all(id(element) in self.constants for element in node.elements):
                return self.constant(node, [self.constants[id(element)] for element in node.elements])
            return lambda frame: [step(frame) for step in steps]
        optional = node.optional

        def run(frame: Frame) -> list[Any]:
            out: list[Any] = []
            for index, step in enumerate(steps):
                value = step(frame)
                if index not in optional:
                    out.append(value)
                elif _optional(value).present:
                    out.append(value.value)
            return out

        return run

    def _map(self, node: MapNode) -> Step:
        steps = [(self.step(key), self.step(value), optional) for key, value, optional in node.entries]

        def run(frame: Frame) -> dict[Any, Any]:
            out: dict[Any, Any] = {}
            for key, value, optional in steps:
                encoded = encode_key(key(frame))
                got = value(frame)
                if optional:
                    if not _optional(got).present:
                        continue
                    got = got.value
                out[encoded] = got
            return out

        parts = [part for key, value, _ in node.entries for part in (key, value)]
        if all(id(part) in self.constants for part in parts) and not any(entry[2] for entry in node.entries):
            try:
                return self.constant(node, run([]))
            except Failure:
                return run
        return run

    def _struct(self, node: StructNode) -> Step:
        name = node.name.removeprefix(".")
        steps = {field: self.step(value) for _, field, value, _ in node.fields}
        return lambda frame: struct_value(name, {field: step(frame) for field, step in steps.items()})


def struct_value(name: str, fields: dict[str, Any]) -> Any:
    """Give the value of a message literal.

    Raises:
        Failure: unknown_type, as for the device's own type.
    """
    if name == t.DURATION.name:
        return Duration(check_int(fields.get("seconds", 0) * 10**9 + fields.get("nanos", 0)))
    if name == t.TIMESTAMP.name:
        return check_timestamp(fields.get("seconds", 0) * 10**9 + fields.get("nanos", 0))
    if name not in t.WRAPPERS:
        raise Failure("unknown_type", f"unknown type '{name}'")
    default = {t.BOOL: False, t.BYTES: b"", t.DOUBLE: 0.0, t.STRING: "", t.UINT: Uint(0)}
    return fields.get("value", default.get(t.WRAPPERS[name].params[0], 0))


_SPECIAL = {
    "_&&_": "_and", "_||_": "_or", "_?_:_": "_conditional", "_==_": "_equals", "_[_]": "_index", "@in": "_in",
    "_[?_]": "_optional_index", "_?._": "_optional_index", "or": "_or_value", "orValue": "_or_value",
}  # fmt: skip
_HASHED = frozenset({str, int, bool, float, Uint})


def _optional(value: Any) -> Optional:
    if type(value) is not Optional:
        raise no_overload()
    return value


def _known(function: Function, args: list[Any]) -> Step:
    """A quantity or version written in the expression: read once; a bad one fails when it is reached."""
    try:
        value = function.call(*args)
    except Failure as failure:
        reason = failure

        def fail(_frame: Frame) -> Any:
            raise reason

        return fail
    return lambda _frame: value


def _variable(slot: int, init: Step | None) -> Step:
    if init is not None:
        return _lazy(slot, init)
    return lambda frame: frame[slot]


def _lazy(slot: int, init: Step) -> Step:
    """A variable of `cel.bind`: computed at its first use, once."""

    def run(frame: Frame) -> Any:
        value = frame[slot]
        if value is UNSET:
            try:
                value = init(frame)
            except Failure as failure:
                frame[slot] = failure
                raise
            frame[slot] = value
        elif type(value) is Failure:
            raise value
        return value

    return run


def _field(operand: Step, name: str) -> Step:
    def run(frame: Frame) -> Any:
        try:
            return operand(frame)[name]
        except KeyError:
            raise missing_key(name) from None

    return run


def _equals_constant(left: Step, constant: Any) -> Step:
    kind = type(constant)
    if kind in {str, bool}:

        def run(frame: Frame) -> bool:
            value = left(frame)
            return value == constant if type(value) is kind else equal(value, constant)

        return run
    return lambda frame: equal(left(frame), constant)


def _member(items: list[Any]) -> Callable[[Any], bool]:
    """`in` a constant list: a look-up, which cannot hash versions or bytes."""
    from dra.cel.functions.formats import CelFormat
    from dra.cel.functions.quantities import CelSemver
    from dra.cel.values import type_of

    unhashable = frozenset({CelSemver, CelFormat, bytes})
    texts = frozenset(item for item in items if type(item) is str)

    def run(value: Any) -> bool:
        kind = type(value)
        if kind is str:
            return value in texts
        if kind in unhashable:
            name = {"kubernetes.Semver": "cel.Semver", "bytes": "types.Bytes"}.get(
                type_of(value).name, "cel.Format"
            )
            raise Failure("internal", f"internal error: runtime error: hash of unhashable type {name}")
        return any(_same(value, item) for item in items)

    return run


def _same(value: Any, item: Any) -> bool:
    try:
        return equal(value, item)
    except Failure:
        return False


def _logical(terms: tuple[Step, ...], *, decides: bool) -> Step:
    """`||` (decides=True) and `&&` (decides=False): one deciding term is enough, whatever fails beside it."""
    other = not decides

    def run(frame: Frame) -> bool:
        error: Failure | None = None
        for term in terms:
            try:
                value = term(frame)
            except Failure as failure:
                error = error or failure
                continue
            if value is decides:
                return not other
            if value is not other:
                error = error or no_overload()
        if error is not None:
            raise error
        return other

    return run


def _call(function: Function, steps: list[Step]) -> Step:
    if len(steps) == 1:
        (only,) = steps

        def one(frame: Frame) -> Any:
            value = only(frame)
            body = function.body((type(value),))
            if body is None:
                raise no_overload_for(function.name, value)
            return body(value)

        return one
    if len(steps) == 2:
        first, second = steps

        def two(frame: Frame) -> Any:
            left, right = first(frame), second(frame)
            body = function.body((type(left), type(right)))
            if body is None:
                raise no_overload_for(function.name, left, right)
            return body(left, right)

        return two
    return lambda frame: function.call(*[step(frame) for step in steps])
