"""The slow evaluator: walks the tree, counts the cost as the scheduler does, and can record every value.

Failures are values here (instances of `Failure`), as in cel-go, because a failing argument does not stop its neighbours from
being evaluated and paid for. It decides the same as the closures of `planner`; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dra.cel import types as t
from dra.cel.access import items_of, lookup, pairs_of, qualify
from dra.cel.costs import call_cost
from dra.cel.errors import CostExceeded, Failure, no_overload
from dra.cel.functions import FUNCTIONS
from dra.cel.planner import Plan, struct_value
from dra.cel.tree import Call, Fold, Ident, ListNode, Literal, MapNode, Node, Select, StructNode
from dra.cel.values import MISSING, NONE, Optional, encode_key, some

_REGEX = frozenset({"matches", "find", "findAll"})


class Interpreter:
    """One evaluation. `cost` is what it has cost so far; `values` holds each node's last value if recording.

    Args:
        device: the fields of the only variable; if `named`, the values of several variables by name.
    """

    def __init__(
        self, plan: Plan, device: Mapping[str, Any], *, limit: int, record: bool = False, named: bool = False
    ) -> None:
        self.plan = plan
        self.device = device
        self.named = named
        self.limit = limit
        self.cost = 0
        self.scopes: list[dict[str, Any]] = []
        self.values: dict[int, Any] | None = {} if record else None

    def evaluate(self, root: Node) -> Any:
        """Give the value of the whole, or the Failure it ends with.

        Raises:
            CostExceeded: the limit was reached.
        """
        return self.visit(root)

    def pay(self, amount: int) -> None:
        # 64 bits, unsigned: upstream's arithmetic wraps, which a negative depth of flatten() shows.
        self.cost = (self.cost + amount) % (1 << 64)
        if self.cost > self.limit:
            raise CostExceeded

    def visit(self, node: Node) -> Any:
        value = self._visit(node)
        if self.values is not None:
            self.values[id(node)] = value
        return value

    def _visit(self, node: Node) -> Any:
        constants = self.plan.constants
        if id(node) in constants:
            return constants[id(node)]
        return _VISITS[type(node)](self, node)

    def _literal(self, node: Literal) -> Any:
        return node.value

    def _ident(self, node: Ident) -> Any:
        if node.name not in t.TYPE_IDENTS:
            # The usual case, a variable that holds a plain value, without the detour over chains.
            for scope in reversed(self.scopes):
                if node.name in scope:
                    value = scope[node.name]
                    if type(value) is _Lazy:
                        break
                    self.pay(1)
                    return value
        return self._chain(node, head=1)

    def _select(self, node: Select) -> Any:
        return self._has(node) if node.test else self._chain(node, head=1)

    # -- names, fields, indexes

    def _chain(self, node: Node, *, head: int) -> Any:
        """An identifier or a value, and the steps into it; `head` is what the start costs."""
        value, optional = self._walk(node)
        self.pay(head if not _is_type(node) else 0)
        if isinstance(value, Failure):
            return value
        return some(value) if optional and value is not NONE else value

    def _walk(self, node: Node) -> tuple[Any, bool]:
        """Give what a chain leads to, and whether a step was optional."""
        step = step_of(node)
        if step is None:
            value = self._head(node)
            return (value.value, True) if type(value) is Optional and value.present else (value, False)
        operand, key_node, optional_step = step
        value, optional = self._walk(operand)
        if isinstance(value, Failure) or value is NONE:
            return value, optional
        key = key_node if isinstance(key_node, str) else self._key(key_node)
        if isinstance(key, Failure):
            return key, optional
        optional = optional or optional_step
        result = self._qualify(value, key, optional=optional)
        if result is not NONE:
            self.pay(1)
        if self.values is not None:
            self.values[id(node)] = result
        return result, optional

    def _qualify(self, value: Any, key: Any, *, optional: bool) -> Any:
        try:
            if not optional:
                return qualify(value, key)
            found = lookup(value, key)
        except Failure as failure:
            return failure
        return NONE if found is MISSING else found

    def _key(self, node: Node) -> Any:
        """An index: a chain inside brackets pays for its steps, not for its start."""
        if id(node) in self.plan.constants:
            return self.plan.constants[id(node)]
        if step_of(node) is not None or isinstance(node, Ident):
            value, optional = self._walk(node)
            return some(value) if optional else value
        return self.visit(node)

    def _head(self, node: Node) -> Any:
        if not isinstance(node, Ident):
            return self._qualified(node) if isinstance(node, Select) and node.qualified else self.visit(node)
        if not node.name.startswith("."):
            for scope in reversed(self.scopes):
                if node.name in scope:
                    value = scope[node.name]
                    return value.get() if isinstance(value, _Lazy) else value
        name = node.name.removeprefix(".")
        if self.named and name in self.device:
            return self.device[name]
        return t.TYPE_IDENTS.get(name, self.device)

    def _qualified(self, node: Select) -> Any:
        return t.TYPE_IDENTS[node.qualified]

    def _has(self, node: Select) -> Any:
        value, _ = self._walk(node.operand)
        self.pay(1)
        if isinstance(value, Failure):
            return value
        if value is NONE:
            return False
        try:
            found = lookup(value, node.field) if isinstance(value, dict) else MISSING
            return found if isinstance(found, Failure) else found is not MISSING
        except Failure as failure:
            return failure

    # -- calls

    def _call(self, node: Call) -> Any:
        match node.name:
            case "_&&_":
                return self._logical(node.args, decides=False)
            case "_||_":
                return self._logical(node.args, decides=True)
            case "_?_:_":
                return self._conditional(node)
            case "_[_]" | "_[?_]" | "_?._":
                return self._chain(node, head=1)
            case "or" | "orValue":
                return self._or_value(node)
            case "@not_strictly_false":
                value = self.visit(node.args[0])
                self.pay(1)
                return value is not False
        parts = [*([node.target] if node.target is not None else []), *node.args]
        member = self.plan.members.get(id(node))
        if member is None:
            return self._function(node, parts)
        element = self.visit(parts[0])
        if isinstance(element, Failure):
            return element
        try:
            return member(element)
        except Failure as failure:
            return failure

    def _function(self, node: Call, parts: list[Node]) -> Any:
        overload = node.overloads[0] if len(node.overloads) == 1 else ""
        stops = len(parts) > 2 or (node.name in _REGEX and id(parts[1]) in self.plan.constants)
        args: list[Any] = []
        failure: Failure | None = None
        for part in parts:
            value = self.visit(part)
            args.append(value)
            if isinstance(value, Failure):
                failure = failure or value
                if stops:
                    return failure
        if node.name == "lists.range" and failure is None and isinstance(args[0], int):
            # Paid before the list is made, so that the limit holds for memory too.
            self.pay(max(args[0], 0) + 11)
            return list(range(args[0]))
        result: Any = failure
        if failure is None:
            try:
                result = FUNCTIONS[node.name].call(*args)
            except CostExceeded:
                raise
            except Failure as error:
                result = error
        self.pay(call_cost(node.name, overload, args, result))
        return result

    def _logical(self, terms: list[Node], *, decides: bool) -> Any:
        failure: Failure | None = None
        for term in terms:
            value = self.visit(term)
            if value is decides:
                return decides
            if isinstance(value, Failure):
                failure = failure or value
            elif value is not (not decides):
                failure = failure or no_overload()
        return failure if failure is not None else not decides

    def _conditional(self, node: Call) -> Any:
        condition = self.visit(node.args[0])
        if isinstance(condition, Failure):
            return condition
        if condition is not True and condition is not False:
            return no_overload()
        branch = node.args[1 if condition else 2]
        if id(branch) not in self.plan.constants and (
            isinstance(branch, Ident) or step_of(branch) is not None
        ):
            value = self._chain(branch, head=0)
            if self.values is not None:
                self.values[id(branch)] = value
            return value
        return self.visit(branch)

    def _or_value(self, node: Call) -> Any:
        assert node.target is not None
        first = self.visit(node.target)
        if isinstance(first, Failure):
            return first
        if type(first) is not Optional:
            return no_overload()
        if first.present:
            return first.value if node.name == "orValue" else first
        return self.visit(node.args[0])

    # -- aggregates

    def _list(self, node: ListNode) -> Any:
        out: list[Any] = []
        result: Any = out
        for index, element in enumerate(node.elements):
            value = self.visit(element)
            if index in node.optional and not isinstance(value, Failure):
                value = _unwrap(value)
                if value is NONE:
                    continue
            if isinstance(value, Failure):
                result = value
                break
            out.append(value)
        self.pay(10)
        return result

    def _map(self, node: MapNode) -> Any:
        out: dict[Any, Any] = {}
        result: Any = out
        for key_node, value_node, optional in node.entries:
            key = self.visit(key_node)
            if isinstance(key, Failure):
                result = key
                break
            value = self.visit(value_node)
            if optional and not isinstance(value, Failure):
                value = _unwrap(value)
                if value is NONE:
                    continue
            if isinstance(value, Failure):
                result = value
                break
            try:
                out[encode_key(key)] = value
            except Failure as failure:
                result = failure
                break
        self.pay(30)
        return result

    def _struct(self, node: StructNode) -> Any:
        fields: dict[str, Any] = {}
        for _, name, value_node, _ in node.fields:
            fields[name] = self.visit(value_node)
            if isinstance(fields[name], Failure):
                self.pay(40)
                return fields[name]
        self.pay(40)
        try:
            return struct_value(node.name.removeprefix("."), fields)
        except Failure as failure:
            return failure

    # -- comprehensions

    def _comprehension(self, node: Fold) -> Any:
        return self._bind(node) if node.macro == "bind" else self._fold(node)

    def _bind(self, node: Fold) -> Any:
        self.scopes.append({node.accu: _Lazy(self, node.init, list(self.scopes))})
        result = self.visit(node.result)
        self.scopes.pop()
        return result

    def _fold(self, node: Fold) -> Any:
        container = self.visit(node.range)
        if isinstance(container, Failure):
            return container
        try:
            walk = pairs_of(container) if node.var2 else [(item, None) for item in items_of(container)]
        except Failure as failure:
            return failure
        accu = {node.accu: self.visit(node.init)}
        self.scopes.append(accu)
        for first, second in walk:
            loop = {node.var: first}
            if node.var2:
                loop[node.var2] = second
            self.scopes.append(loop)
            going = self.visit(node.condition)
            if going is False:
                self.scopes.pop()
                break
            value = self.visit(node.step)
            self.scopes.pop()
            accu[node.accu] = value
        result = self.visit(node.result)
        self.scopes.pop()
        return result


_VISITS: dict[type[Node], Callable[[Interpreter, Any], Any]] = {
    Literal: Interpreter._literal,
    Ident: Interpreter._ident,
    Select: Interpreter._select,
    Call: Interpreter._call,
    ListNode: Interpreter._list,
    MapNode: Interpreter._map,
    StructNode: Interpreter._struct,
    Fold: Interpreter._comprehension,
}


class _Lazy:
    """The value of a `cel.bind` variable, computed and paid at its first use."""

    def __init__(self, interpreter: Interpreter, init: Node, scopes: list[dict[str, Any]]) -> None:
        self.interpreter = interpreter
        self.init = init
        self.scopes = scopes
        self.value: Any = MISSING

    def get(self) -> Any:
        if self.value is MISSING:
            inner, self.interpreter.scopes = self.interpreter.scopes, self.scopes
            self.value = self.interpreter.visit(self.init)
            self.interpreter.scopes = inner
        return self.value


def step_of(node: Node) -> tuple[Node, str | Node, bool] | None:
    """Give (operand, key, optional) where a node is a step into a value."""
    if isinstance(node, Select) and not node.test and not node.qualified:
        return node.operand, node.field, False
    if isinstance(node, Call) and node.name in {"_[_]", "_[?_]", "_?._"}:
        return node.args[0], node.args[1], node.name != "_[_]"
    return None


def _is_type(node: Node) -> bool:
    if isinstance(node, Select):
        return bool(node.qualified)
    return isinstance(node, Ident) and node.name.removeprefix(".") in t.TYPE_IDENTS


def _unwrap(value: Any) -> Any:
    if type(value) is not Optional:
        return no_overload()
    return value.value if value.present else NONE
