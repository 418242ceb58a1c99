"""Any text either compiles or is refused with a place; any compiled selector gives a bool or a named failure; in bounded time."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra.cel import CelCompileError, CelEvalError, CelFeatures, check_selector, compile_selector, view_of
from dra.cel.automaton import Automaton
from dra.cel.errors import Failure
from dra.cel.regex import RegexProblem, compile_pattern
from dra.cel.regex_nodes import write

CASES = json.loads(gzip.decompress((Path(__file__).parents[1] / "data/cel/cases.json.gz").read_bytes()))[
    "cases"
]
EXPRESSIONS = [case["expression"] for case in CASES if len(case["expression"]) < 400]
FEATURES = CelFeatures(list_type_attributes=True)
DEVICE = {
    "attributes": {
        "name": {"string": "fish"}, "index": {"int": 3}, "ready": {"bool": True}, "ver": {"version": "1.2.3"},
        "ids": {"ints": [1, 2, 3]}, "model": {"string": "Acme H100 80GB"},
    },
    "capacity": {"memory": {"value": "80Gi"}, "cores": {"value": "132"}},
}  # fmt: skip
PIECES = st.sampled_from(
    [
        "device", ".attributes", '["dra.example.com"]', ".name", ".index", "==", "!=", "<", "&&", "||", "!", "in",
        "(", ")", "[", "]", "{", "}", ",", ":", "?", ".", "1", "1u", "1.5", '"a"', "b'x'", "true", "null", "has",
        "all", "exists", "map", "x", "cel.bind", "quantity", "semver", ".?name", "[?0]", "-", "+", "*", "/", "%", "'", '"',
        "\\", "\n", "//", "é", "😀", "optional.of", ".orValue", "size", "type", "int", ".matches", "lists.range", "as",
    ]
)  # fmt: skip


def decide(expression: str) -> object:
    try:
        selector = compile_selector(expression, features=FEATURES)
    except CelCompileError as error:
        assert error.message
        assert error.column >= 0
        return error
    try:
        value = selector.evaluate(DEVICE, driver="dra.example.com")
    except CelEvalError as error:
        assert error.error_class
        return error
    assert value is True or value is False
    return value


@given(
    st.text(max_size=60)
    | st.lists(PIECES, max_size=14).map("".join)
    | st.lists(PIECES, max_size=10).map(" ".join)
)
@settings(max_examples=400)
def test_any_text_is_decided(expression: str) -> None:
    decide(expression)
    assert check_selector(expression) is None or isinstance(check_selector(expression), str)


@given(st.sampled_from(EXPRESSIONS), st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_a_damaged_selector_is_decided(expression: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(expression)))
    end = data.draw(st.integers(start, min(start + 6, len(expression))))
    decide(
        expression[:start]
        + data.draw(st.sampled_from(["", "x", "(", "0", '"', ".", "[1]", " && "]))
        + expression[end:]
    )


@given(
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(EXPRESSIONS),
    st.sampled_from(["&&", "||", "==", "? true :", "+", "in"]),
)
@settings(max_examples=300)
def test_the_counting_evaluator_decides_as_the_fast_one(left: str, right: str, operator: str) -> None:
    expression = f"({left}) {operator} ({right})"
    fast = decide(expression)
    if isinstance(fast, CelCompileError):
        return
    selector = compile_selector(expression, features=FEATURES)
    view = view_of(DEVICE, driver="dra.example.com", features=FEATURES)
    slow, _ = selector.run_costed(view)
    if isinstance(fast, CelEvalError):
        assert not isinstance(slow, bool)
        assert not isinstance(slow, Failure) or slow.error_class == fast.error_class
    else:
        assert slow is fast


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 5000 + "true" + ")" * 5000,
        "[" * 5000,
        "!" * 9999 + "true",
        "1" + " + 1" * 3000 + " > 0",
        "true" + " && true" * 2000,
        "x" + ".y" * 3000,
        "optional.of(1)" + ".optMap(x, x)" * 150 + ".hasValue()",
        'quantity("1e2147483648").isInteger()',
        'quantity("1e99999999999").isInteger()',
        f'quantity("{"9" * 9000}").isInteger()',
        f'isSemver("{"9" * 9000}.0.0")',
        f"{'9' * 9000} > 0",
        f'int("{"9" * 9000}") > 0',
        "lists.range(9000000000000000000).size() > 0",
        "lists.range(1000).map(a, lists.range(1000).map(b, lists.range(1000))).size() > 0",
        '"' + "a" * 5000 + 'b".matches("(a+)+$")',
        '"' + "a" * 3000 + '".matches("(a*)*(a*)*(a*)*b")',
        'device.attributes["dra.example.com"].model.matches("(.*)*(.*)*(.*)*(.*)*x")',
        '"x".matches("((((a{10}){10}){10}){10}){10}")',
        'cel.bind(a, "xxxxxxxxxx", ' + "".join(f"cel.bind(a{i}, {p}.replace('x', 'xxxxxxxxxx'), " for i, p in enumerate(["a", *[f"a{n}" for n in range(20)]])) + "true" + ")" * 22,
        "'" * 9000,
        '"""' * 3000,
    ],
    ids=range(22),
)  # fmt: skip
def test_hostile_expressions_are_decided_in_bounded_time(expression: str) -> None:
    begin = time.process_time()
    decide(expression)
    assert time.process_time() - begin < 10


_PATTERN = st.lists(
    st.sampled_from(
        [
            "a",
            "b",
            "c",
            ".",
            "(",
            ")",
            "|",
            "*",
            "+",
            "?",
            "[ab]",
            "^",
            "$",
            "{2}",
            "\\d",
            "??",
            "*?",
            "\\b",
            "(?i)",
            "[^a]",
        ]
    ),
    max_size=8,
).map("".join)


@given(_PATTERN, st.text("abcA1 \n", max_size=9))
@settings(max_examples=400)
def test_the_automaton_finds_what_backtracking_finds(pattern: str, text: str) -> None:
    try:
        compiled = compile_pattern(pattern)
    except RegexProblem:
        return
    import re

    expected = re.compile(write(compiled.piece)).search(text)
    assert Automaton(compiled.piece).search(text) == (expected.span() if expected else None)
