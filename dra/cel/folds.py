"""Comprehensions as closures: each macro has a loop of its own; unknown shapes run the general one.

Source: cel-go's evalFold; `all` and `exists` stop at the deciding element and absorb failures before and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dra.cel.access import items_of, pairs_of
from dra.cel.errors import Failure, no_overload
from dra.cel.steps import UNSET, Frame, Planning, Scope, Step
from dra.cel.tree import Call, Fold, ListNode, Node
from dra.cel.values import truth


def plan_fold(plan: Planning, node: Fold) -> Step:
    """Give the closure of a comprehension."""
    if node.macro == "bind":
        return _bind(plan, node)
    container = plan.step(node.range)
    init = plan.step(node.init)
    accu = plan.slot()
    first = plan.slot()
    second = plan.slot() if node.var2 else 0
    plan.scopes.append({node.accu: (accu, None)})
    loop: Scope = {node.var: (first, None)}
    if second:
        loop[node.var2] = (second, None)
    plan.scopes.append(loop)
    try:
        condition, step = plan.step(node.condition), plan.step(node.step)
        parts = _parts(node)
        steps = [plan.step(part) for part in parts or ()]
    finally:
        plan.scopes.pop()
    result = plan.step(node.result)
    plan.scopes.pop()
    match node.macro:
        case "all" | "exists":
            return _quantifier(container, first, second, steps[0], decides=node.macro == "exists")
        case "exists_one":
            return _exists_one(container, first, second, steps[0])
        case "map" | "filter" | "transformList" if parts is not None:
            return _collect(container, first, second, steps)
    return _general(container, (first, second, accu), init, condition, step, result)


def _parts(node: Fold) -> list[Node] | None:
    """Give what the macro was written with: [predicate], [transform] or [predicate, transform]."""
    step = node.step
    assert isinstance(step, Call)
    match node.macro:
        case "all" | "exists":
            return [step.args[1]]
        case "exists_one":
            return [step.args[0]]
        case "map" | "filter" | "transformList":
            if step.name == "_?_:_":
                append = step.args[1]
                assert isinstance(append, Call)
                return [step.args[0], _appended(append)]
            return [_appended(step)]
    return None


def _appended(append: Call) -> Node:
    element = append.args[1]
    assert isinstance(element, ListNode)
    return element.elements[0]


def _bind(plan: Planning, node: Fold) -> Step:
    init = plan.step(node.init)
    slot = plan.slot()
    plan.scopes.append({node.accu: (slot, init)})
    body = plan.step(node.result)
    plan.scopes.pop()

    def run(frame: Frame) -> Any:
        frame[slot] = UNSET
        return body(frame)

    return run


def _walker(first: int, second: int) -> Callable[[Frame, Any], Any]:
    """Give a generator that sets the loop variables and yields once an element."""
    if not second:

        def single(frame: Frame, container: Any) -> Any:
            for item in items_of(container):
                frame[first] = item
                yield

        return single

    def double(frame: Frame, container: Any) -> Any:
        for frame[first], frame[second] in pairs_of(container):
            yield

    return double


def _quantifier(container: Step, first: int, second: int, predicate: Step, *, decides: bool) -> Step:
    walk = _walker(first, second)
    other = not decides

    def run(frame: Frame) -> bool:
        error: Failure | None = None
        for _ in walk(frame, container(frame)):
            try:
                value = predicate(frame)
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


def _exists_one(container: Step, first: int, second: int, predicate: Step) -> Step:
    walk = _walker(first, second)

    def run(frame: Frame) -> bool:
        count = 0
        for _ in walk(frame, container(frame)):
            count += truth(predicate(frame))
        return count == 1

    return run


def _collect(container: Step, first: int, second: int, steps: list[Step]) -> Step:
    walk = _walker(first, second)
    transform = steps[-1]
    predicate = steps[0] if len(steps) == 2 else None

    def run(frame: Frame) -> list[Any]:
        return [
            transform(frame)
            for _ in walk(frame, container(frame))
            if predicate is None or truth(predicate(frame))
        ]

    return run


def _general(
    container: Step, slots: tuple[int, int, int], init: Step, condition: Step, step: Step, result: Step
) -> Step:
    walk = _walker(slots[0], slots[1])
    accu = slots[2]

    def run(frame: Frame) -> Any:
        frame[accu] = init(frame)
        for _ in walk(frame, container(frame)):
            if not truth(condition(frame)):
                break
            frame[accu] = step(frame)
        return result(frame)

    return run
