"""`dra explain` on selectors that cost much: what they may cost is bounded, and counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest

from dra.allocator.model import Features
from dra.allocator.pools import PoolIndex
from dra.cel import CelEvalError, Selector
from dra.cel.interpreter import Interpreter
from dra.diagnose.explain import nodes
from dra.diagnose.explain.render import as_json, text
from dra.diagnose.explain.selectors import Budget
from tests.unit.diagnose.explain_world import ask, cel, claim, device_class, gpus, node, pod, request

LOOPS = "lists.range({0}).all(a, lists.range({0}).all(b, a + b >= 0))"
# About 15,000 on each device.
COSTLY = LOOPS.format(50)


@pytest.fixture
def paid(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What all evaluations cost together that count their cost."""
    spent = [0]
    pay = Interpreter.pay

    def counted(self: Interpreter, amount: int) -> None:
        spent[0] += amount
        pay(self, amount)

    monkeypatch.setattr(Interpreter, "pay", counted)
    return spent


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The selectors that were evaluated, once for each time."""
    seen: list[str] = []
    evaluate = Selector.evaluate

    def counted(self: Selector, device: Any, **options: Any) -> bool:
        seen.append(self.expression)
        return evaluate(self, device, **options)

    monkeypatch.setattr(Selector, "evaluate", counted)
    return seen


def world(*expressions: str, count: int = 1, size: int = 8) -> list[Any]:
    found = [pod("train", "want"), claim("want", request(selectors=cel(*expressions), count=count))]
    for number in range(3):
        found += [node(f"n{number}"), gpus(f"n{number}", size)]
    return found


@pytest.mark.parametrize("where", ["request", "class"])
def test_what_the_api_server_refuses_for_its_cost_is_not_evaluated_at_all(paid, evaluated, where):
    expression = LOOPS.format(1000)
    objects = world(expression) if where == "request" else [*world(), device_class()]
    if where == "class":
        objects[-1]["spec"]["selectors"] = cel(expression)
    answer = ask(*objects)
    assert answer.reasons[0].code == "cel-cost"
    assert "the API server takes none that may cost more than 1000000" in answer.verdict
    owner = "class gpu.nvidia.com" if where == "class" else "request gpu of claim want"
    assert f"selector #0 of {owner} may cost" in answer.verdict
    assert "Simplify it" in answer.reasons[0].remedy
    assert expression not in evaluated
    assert paid[0] < 5000


def test_the_devices_that_a_budget_does_not_reach_are_not_judged_and_that_is_said(monkeypatch, paid):
    monkeypatch.setattr(nodes, "Budget", lambda: Budget(left=40_000))
    answer = ask(*world(f"!({COSTLY})"))
    assert answer.reasons[0].code == "too-costly"
    written = text(answer, wide=True)
    assert "devices were not looked at: the selectors cost too much" in written
    assert "to do: Simplify the selectors" in written
    counts = as_json(answer)["nodes"][2]["requests"][0]["counts"]
    assert counts == {"unjudged": 8}
    # One device may overrun it, and none is paid for twice.
    assert paid[0] < 80_000
    assert answer.exit_code == 1


def test_the_allocator_evaluates_nothing_that_the_budget_did_not_allow(monkeypatch, evaluated):
    monkeypatch.setattr(nodes, "Budget", lambda: Budget(left=20_000))
    objects = world()
    objects[1] = claim("want", request(selectors=cel(COSTLY), allocationMode="All"))
    answer = ask(*objects)
    assert [reason.code for reason in answer.reasons] == ["too-costly", "not-searched"]
    assert evaluated.count(COSTLY) == 1


def test_a_costly_selector_is_evaluated_once_a_device_also_for_the_allocator(evaluated):
    answer = ask(*world(COSTLY, count=2, size=2))
    assert answer.reasons[0].code == "fits-now"
    assert evaluated.count(COSTLY) == 6


def test_a_selector_that_reaches_the_schedulers_limit_ends_the_budget():
    class Endless:
        expression = "endless"

        def evaluate(self, device: Any, *, driver: str) -> bool:
            raise CelEvalError("operation cancelled: actual cost limit exceeded", error_class="cost_limit")

    (device,) = PoolIndex([gpus("n1", 1)]).for_node(node("n1"), Features())[0].devices
    budget = Budget()
    with pytest.raises(CelEvalError):
        budget.evaluate(Endless(), device)  # type: ignore[arg-type]
    assert budget.left <= 0


def test_an_error_of_a_selector_has_the_remedy_that_fits_it():
    answer = ask(*world("device.attributes['gpu.nvidia.com'].index > 1"))
    assert answer.reasons[0].code == "cel-runtime"
    assert "guard the attribute" in answer.reasons[0].remedy
    odd = world("device.attributes['gpu.nvidia.com'].type.matches('gpu')")
    odd[-1]["spec"]["devices"][0]["attributes"]["firmware"] = {"version": "not one"}
    answer = ask(*odd)
    assert answer.reasons[0].code == "cel-runtime"
    assert answer.reasons[0].remedy == "Correct the version in the driver's ResourceSlice."
