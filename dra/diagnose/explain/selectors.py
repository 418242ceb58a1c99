"""What the selectors of one request say to devices, term by term; once for all devices that are alike to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.model import Device
from dra.cel import CelCompileError, CelEvalError, Selector, SubTerm, compile_selector
from dra.cel.interpreter import step_of
from dra.cel.selector import COST_LIMIT
from dra.cel.tree import Call, Fold, Ident, Literal, Node, Select, children
from dra.diagnose.explain.model import Miss, Trace

# Devices of which each is a case of its own are traced so far; the rest are only told apart by yes and no.
MAX_TRACES = 5000
_KINDS = ("int", "bool", "string")
_UNJUDGED = Trace("unjudged", error="the selectors cost too much to evaluate them on more devices")


@dataclass(frozen=True, slots=True)
class NamedSelector:
    """A selector and where it stands: `class NAME` or `request`, and its number there."""

    origin: str
    index: int
    selector: Selector


class TooCostly(Exception):  # noqa: N818 - no fault of the claim's
    """The selectors have cost so much on other devices that they are not evaluated on more."""


@dataclass(slots=True)
class Budget:
    """What the selectors of one explanation may cost on all devices together, and what they gave.

    The scheduler allows a selector COST_LIMIT on each device, which it evaluates in a moment. Here it takes seconds.
    """

    left: int = COST_LIMIT
    _known: dict[tuple[str, int], bool | CelEvalError] = field(default_factory=dict)

    def evaluate(self, selector: Selector, device: Device) -> bool:
        """Evaluate a selector and remember its verdict for the allocator.

        Raises:
            CelEvalError: it fails on this device.
        """
        key = (selector.expression, id(device.raw))
        try:
            verdict = selector.evaluate(device.raw, driver=device.id.driver)
        except CelEvalError as failure:
            self._known[key] = failure
            if failure.error_class == "cost_limit":
                self.left -= COST_LIMIT
            raise
        self._known[key] = verdict
        return verdict

    def compile(self, expression: str) -> BudgetedSelector:
        """Compile a selector for the allocator; raises CelCompileError as `compile_selector`."""
        selector = compile_selector(expression)
        return BudgetedSelector(selector, self, loops=not _reads(selector.root, set()))

    def known(self, selector: Selector, device: Mapping[str, Any]) -> bool | CelEvalError | None:
        """Give the verdict on a device of which it is known."""
        return self._known.get((selector.expression, id(device)))


@dataclass(frozen=True, slots=True)
class BudgetedSelector:
    """A selector as the allocator evaluates it: one that may cost much only gives the verdicts that are known."""

    selector: Selector
    budget: Budget
    loops: bool

    def evaluate(self, device: Mapping[str, Any], *, driver: str) -> bool:
        """Tell whether the device matches.

        Raises:
            CelEvalError: the expression fails on this device.
            TooCostly: it was not evaluated on this device.
        """
        known = self.budget.known(self.selector, device)
        if isinstance(known, CelEvalError):
            raise known
        if known is None and self.loops:
            raise TooCostly
        return self.selector.evaluate(device, driver=driver) if known is None else known


@dataclass(slots=True)
class RequestSelectors:
    """The selectors of a request, those of its class first; all must be true."""

    selectors: Sequence[NamedSelector]
    budget: Budget
    _names: frozenset[str] | None = None
    # The most that a device has cost.
    _cost: int = 0
    _known: dict[object, Trace] = field(default_factory=dict)
    _relevant: dict[str, bool] = field(default_factory=dict)
    # Values that each part of a device had, over all kinds of devices: to tell what there is instead.
    seen: dict[str, Counter[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names: set[str] = set()
        if all(_reads(item.selector.root, names) for item in self.selectors):
            self._names = frozenset(names)

    def trace(self, device: Device) -> Trace:
        """Say what the selectors make of a device."""
        key = self._likeness(device)
        known = self._known.get(key)
        if known is None:
            if self.budget.left <= 0:
                return _UNJUDGED
            before = self.budget.left
            full = len(self._known) < MAX_TRACES
            known = self._known[key] = self._trace(device, full=full)
            if full:
                self._cost = max(self._cost, before - self.budget.left)
            else:
                self.budget.left -= self._cost
        return known

    def drivers(self) -> frozenset[str]:
        """Give the drivers that the selectors name with `device.driver == "…"`; empty if they name none."""
        found: set[str] = set()
        for item in self.selectors:
            found.update(_drivers(item.selector.root))
        return frozenset(found)

    def _likeness(self, device: Device) -> object:
        if self._names is None:
            return device.id
        relevant, names = self._relevant, self._names
        parts: list[object] = [device.id.driver, device.multi]
        for group in ("attributes", "capacity"):
            for name, value in (device.raw.get(group) or {}).items():
                wanted = relevant.get(name)
                if wanted is None:
                    wanted = relevant[name] = name.rpartition("/")[2] in names
                # A value that no expression can read makes all of them fail.
                if wanted or (group == "attributes" and not any(kind in value for kind in _KINDS)):
                    parts.append((group, name, repr(value)))
        return tuple(parts)

    def _trace(self, device: Device, *, full: bool) -> Trace:
        stage = error = remedy = ""
        misses: list[Miss] = []
        passed = 0
        for item in self.selectors:
            look = full
            try:
                matched = self.budget.evaluate(item.selector, device)
            except CelEvalError as failure:
                matched = False
                # Once is enough of that.
                look = full and failure.error_class != "cost_limit"
                if not stage:
                    whose = "the request" if item.origin == "request" else item.origin
                    stage, error = "error", f"selector #{item.index} of {whose} fails ({failure.message})"
                    remedy = failure.remedy
            if not matched and not stage:
                stage = "class" if item.origin != "request" else "selector"
            if look:
                passed += self._look(item, device, misses, matched=matched)
        return Trace(stage, tuple(misses), error, passed, remedy)

    def _look(self, item: NamedSelector, device: Device, misses: list[Miss], *, matched: bool) -> int:
        """Add the false terms of a selector; give how many are true."""
        terms, cost = item.selector.explain_costed(device.raw, driver=device.id.driver)
        self.budget.left -= cost
        passed = 0
        for term in _leaves(terms):
            found = term
            if not term.reached:
                found, cost = _alone(term, device)
                self.budget.left -= cost
            if found.value is True:
                passed += 1
            elif (
                not matched and (found.value is False or found.failure) and (term.decided or not term.reached)
            ):
                misses.append(Miss(item.origin, item.index, term.text, found.saw, found.failure))
            if not found.failure:
                for path, value in found.saw:
                    self.seen.setdefault(path, Counter())[value] += 1
        return passed


def _leaves(terms: Sequence[SubTerm]) -> list[SubTerm]:
    """Leave out terms that have terms of their own: the next one stands deeper."""
    return [
        term
        for position, term in enumerate(terms)
        if position + 1 == len(terms) or terms[position + 1].depth <= term.depth
    ]


def _alone(term: SubTerm, device: Device) -> tuple[SubTerm, int]:
    """Evaluate a term that the whole did not come to, if it can stand alone; and what that cost."""
    try:
        selector = compile_selector(term.text)
    except CelCompileError:
        return term, 0
    found, cost = selector.explain_costed(device.raw, driver=device.id.driver)
    return (found[0] if len(found) == 1 else term), cost


def _reads(node: Node, names: set[str]) -> bool:
    """Collect the names that an expression may read; False where it may read any (a loop, a whole map)."""
    match node:
        case Select():
            names.add(node.field)
        case Literal():
            if isinstance(node.value, str):
                names.add(node.value)
                names.add(node.value.rpartition("/")[2])
        case Fold():
            if node.macro != "bind":
                return False
        case Call():
            step = step_of(node)
            if step is not None and not isinstance(step[1], Literal):
                return False
            if node.name == "@in":
                if not isinstance(node.args[0], Literal) and _takes_map(node.args[1]):
                    return False
            elif step is None and any(_takes_map(part) for part in children(node)):
                return False
    return all(_reads(part, names) for part in children(node))


def _takes_map(node: Node) -> bool:
    """Tell whether a node may be a whole map of the device: a short chain, or a bound name."""
    length = 0
    names: list[object] = []
    while (step := step_of(node)) is not None:
        node, length = step[0], length + 1
        names.append(step[1])
    if not isinstance(node, Ident):
        return False
    if node.name != "device":
        return length == 0
    return length < 3 and not (length == 1 and names[0] in {"driver", "allowMultipleAllocations"})


def _drivers(node: Node) -> Iterator[str]:
    if isinstance(node, Call) and node.name == "_==_":
        for one, other in (node.args, node.args[::-1]):
            if (
                isinstance(one, Select)
                and one.field == "driver"
                and isinstance(one.operand, Ident)
                and one.operand.name == "device"
                and isinstance(other, Literal)
                and isinstance(other.value, str)
            ):
                yield other.value
    if isinstance(node, Call) and node.name == "_&&_":
        for part in children(node):
            yield from _drivers(part)
