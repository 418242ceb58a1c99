"""Worst-case cost of an expression before it runs: what the API server compares with its limit.

Source: cel-go's cost estimator with Kubernetes' and the DRA size limits: maps of 32 entries, values of 64 characters, domains and
drivers of 63, names of 32. Costs saturate at 2^64-1, which means "unbounded".
"""

from __future__ import annotations

from dra.cel import types as t
from dra.cel.estimate_calls import CallEstimator
from dra.cel.known_sizes import MAX, ONE, ZERO, Entry, KnownSizes, Local, Path, Range, Sizes
from dra.cel.tree import Call, Fold, Ident, ListNode, Literal, MapNode, Node, Select, StructNode

_BASE_LIST, _BASE_MAP, _BASE_STRUCT = 10, 30, 40


def estimate_cost(root: Node, sizes: Sizes | None = None) -> int:
    """Give the worst-case cost of a checked tree; `sizes` gives the size of what a path from a variable leads to."""
    return Estimator(sizes or _device_size).cost(root).high


class Estimator(KnownSizes):
    """One walk over a tree."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.costs: dict[int, Range] = {}
        self.calls = CallEstimator(self)

    def cost(self, node: Node) -> Range:
        """Give the cost of a node; one that stands in two places costs the same in both."""
        known = self.costs.get(id(node))
        if known is not None and not isinstance(node, Ident):
            return known
        match node:
            case Ident():
                local = self.local(node.name)
                self.paths[id(node)] = local.path if local else (node.name,)
                cost = ONE
            case Select():
                cost = self._select(node)
            case Call():
                cost = self._call(node)
            case ListNode():
                cost = self._list(node)
            case MapNode():
                cost = self._map(node)
            case StructNode():
                cost = Range(_BASE_STRUCT, _BASE_STRUCT)
                for _, _, value, _ in node.fields:
                    cost = cost.plus(self.cost(value))
            case Fold():
                cost = self._bind(node) if node.macro == "bind" else self._fold(node)
            case _:
                cost = ZERO
        self.costs[id(node)] = cost
        return cost

    # -- nodes

    def _select(self, node: Select) -> Range:
        operand = self.cost(node.operand)
        if node.test:
            return operand  # has() itself is free
        self.paths[id(node)] = (*self.path(node.operand), node.field)
        kind = (node.operand.kind or t.DYN).kind
        return operand.plus(ONE) if kind in {"map", "struct", "param"} and not node.qualified else operand

    def _call(self, node: Call) -> Range:
        if node.name == "dyn":
            cost = self.cost(node.args[0]).plus(ONE)
            self._copy(node, node.args[0])
            return cost
        arguments = ZERO
        costs = []
        for arg in node.args:
            costs.append(self.cost(arg))
            arguments = arguments.plus(costs[-1])
        target = self.cost(node.target) if node.target is not None else ZERO
        worst = Range(MAX, 0)
        size: Range | None = None
        for overload in node.overloads:
            cost, result = self.calls.call(node, overload, costs, arguments)
            worst = worst.union(cost)
            if result is not None:
                size = size.union(result) if size else result
            if overload in {"index_list", "index_map"}:
                entry = self.entry(node.args[0])
                size = entry.value if entry else None
                step = "@items" if overload == "index_list" else "@values"
                self.paths[id(node)] = (*self.path(node.args[0]), step)
            if size is None:
                size = self.size(node)
        if size is not None:
            self.sizes[id(node)] = size
        return target.plus(worst) if node.overloads else ZERO

    def _list(self, node: ListNode) -> Range:
        cost, item = Range(_BASE_LIST, _BASE_LIST), Range(MAX if node.elements else 0, 0)
        for element in node.elements:
            cost = cost.plus(self.cost(element))
            item = item.union(self.size_or_unknown(element))
        self.set_entry(node, Entry("list", ONE, item))
        return cost

    def _map(self, node: MapNode) -> Range:
        cost = Range(_BASE_MAP, _BASE_MAP)
        key_size = value_size = Range(MAX if node.entries else 0, 0)
        for key, value, _ in node.entries:
            cost = cost.plus(self.cost(key)).plus(self.cost(value))
            key_size = key_size.union(self.size_or_unknown(key))
            value_size = value_size.union(self.size_or_unknown(value))
        self.set_entry(node, Entry("map", key_size, value_size))
        return cost

    def _push(self, name: str, local: Local) -> None:
        self.locals.setdefault(name, []).append(local)

    def _copy(self, node: Node, source: Node) -> None:
        size = self.size(source)
        if size is not None:
            self.sizes[id(node)] = size
        self.set_entry(node, self.entry(source))

    def _bind(self, node: Fold) -> Range:
        cost = self.cost(node.range).plus(self.cost(node.init))
        self._push(node.accu, Local(self.path(node.init), self.size(node.init), self.entry(node.init)))
        cost = cost.plus(self.cost(node.result))
        self.locals[node.accu].pop()
        self._copy(node, node.result)
        return cost

    def _fold(self, node: Fold) -> Range:
        cost = self.cost(node.range).plus(self.cost(node.init))
        self._push(node.accu, Local(self.path(node.init), self.size(node.init), self.entry(node.init)))
        entry, path = self.entry(node.range), self.path(node.range)
        container = entry.container if entry else (node.range.kind or t.DYN).kind
        is_list = container == "list"
        keys = Local((*path, "@indices" if is_list else "@keys"), entry.key if entry else None, None)
        values = Local((*path, "@items" if is_list else "@values"), entry.value if entry else None, None)
        if node.var2:
            self._push(node.var, keys)
            self._push(node.var2, values)
        else:
            self._push(node.var, values if is_list else keys)
        step = self.cost(node.condition).plus(self.cost(node.step))
        self.locals[node.var].pop()
        if node.var2:
            self.locals[node.var2].pop()
        cost = cost.plus(self.cost(node.result))
        self.locals[node.accu].pop()
        count = self.size_or_unknown(node.range)
        cost = cost.plus(count.times(step))
        if isinstance(node.init, Literal):
            self.sizes[id(node)] = ONE
        else:
            self.sizes[id(node)] = count
            self.set_entry(node, self.entry(node.step))
        return cost


def _device_size(path: Path) -> Range | None:
    """Give the API's limit for a value that comes straight from the device."""
    if not path or path[0].removeprefix(".") != "device":
        return None
    steps = path[1:]
    if not steps:
        return ZERO
    if steps[0] == "driver":
        return Range(0, 63) if len(steps) == 1 else None
    if steps[0] not in {"attributes", "capacity"} or len(steps) > 3:
        return None
    if steps[-1] == "@keys":
        if len(steps) == 2:
            return Range(0, 63)
        return Range(0, 32) if steps[0] == "attributes" else ZERO
    if len(steps) <= 2:
        return Range(0, 32)
    return Range(0, 64) if steps[0] == "attributes" else None
