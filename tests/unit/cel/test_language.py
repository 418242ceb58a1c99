"""Corners of the language beside the recorded cases: each line is an expression and what it gives."""

from __future__ import annotations

import pickle

import pytest

from dra.cel import CelCompileError, CelEvalError, CelFeatures, compile_selector
from dra.cel.regex import RegexProblem, compile_pattern

FEATURES = CelFeatures(list_type_attributes=True)


def value(expression: str) -> object:
    try:
        return compile_selector(expression, features=FEATURES).evaluate({}, driver="d")
    except CelEvalError as error:
        return error.error_class
    except CelCompileError as error:
        return f"compile: {error.message}"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        # a value bound but failing, used twice, fails with the same reason
        ("cel.bind(a, 1 / 0, cel.bind(b, a + a, b + b == 1)) || false", "division_by_zero"),
        # the second value of a chain is not computed where the first is there
        ("optional.of(1).orValue(1 / 0) == 1", True),
        ("optional.none().or(optional.of(2)).value() == 2", True),
        # shadowing: the loop's variable hides the device
        ("[1].all(device, device == 1)", True),
        ("[1].all(device, .device.driver == 'd')", True),
        ("[[1, 2], [3]].map(l, l.map(x, x * 10)) == [[10, 20], [30]]", True),
        ("[1, 2, 3].map(x, 1) == [1, 1, 1]", True),
        ('{"a": 1, "b": 2}.transformMap(k, v, v > 1, v * 2) == {"b": 4}', True),
        ('{"a": 1}.transformMapEntry(k, v, {"x": v}) == {"x": 1}', True),
        ('["a", "b"].transformMapEntry(i, v, {"same": i}) == {}', "duplicate_key"),
        ("{1: 'a', 2: 'b'}.exists_one(k, v, k == 2 && v == 'b')", True),
        ("{dyn(1): 1, dyn(1u): 2, dyn(true): 3, dyn('1'): 4}.size() == 4", True),
        ("{true: 'yes'}[dyn(1)] == 'yes'", "no_such_key"),
        ("[1, 2] in [[1, 2], [3]]", True),
        ("b'abc'.size() == 3 && b'a' < b'b'", True),
        ("google.protobuf.Duration{seconds: 1, nanos: 500000000} == duration('1500ms')", True),
        ("timestamp('2024-02-29T12:00:00+02:00').getHours() == 10", True),
        ("timestamp('2024-01-01T00:00:00Z').getHours('-03:30') == 20", True),
        ("timestamp('2024-01-01T00:00:00Z').getDayOfYear() == 0", True),
        ("timestamp('9999-12-31T23:59:59Z') + duration('1s') > timestamp(0)", "overflow"),
        ("string(timestamp(0)) == '1970-01-01T00:00:00Z'", True),
        ("string(1e6) == '1e+06' && string(123456.0) == '123456' && string(0.0001) == '0.0001'", True),
        ('"%.2f|%s|%d".format([1234.5, "x", 3]) == "1,234.50|x|3"', True),
        ('"%s".format([dyn(optional.of(1))]) == ""', "format"),
        ("quantity('1e3').compareTo(quantity('1k')) == 0", True),
        ("quantity('1e99999').isGreaterThan(quantity('9e99998'))", True),
        ("quantity('-1e99999').isLessThan(quantity('1n'))", True),
        ("semver('1.2.3-rc.99999999999999999999') == semver('1.2.3')", "semver_parse"),
        ("url('/path/only').getScheme() == '' && url('/path/only').getEscapedPath() == '/path/only'", True),
        ("cidr('10.0.0.0/8').containsCIDR('10.1.0.0/16')", True),
        ("ip('::1').isLoopback() && !ip('::1').isGlobalUnicast()", True),
        ("format.dns1123Label().validate('Bad_Name').hasValue()", True),
        ("format.named('uuid').value() == format.uuid()", True),
        ('"a,b".findAll("[a-z]?") == ["a", "b"]', True),
        ('"AbC".matches("(?i)^abc$") && !"AbC".matches("^abc$")', True),
        ('"\\u2028".matches("\\\\p{Zl}") && "x".matches("\\\\pL")', True),
        ('"a.c".matches("^\\\\Qa.c\\\\E$") && !"abc".matches("^\\\\Qa.c\\\\E$")', True),
    ],
)  # fmt: skip
def test_an_expression_gives_what_cel_says(expression: str, expected: object) -> None:
    assert value(expression) == expected


def test_compile_errors_stand_where_the_operator_or_the_argument_stands() -> None:
    assert value("true ? 1 : 2u") == (
        "compile: compilation failed: ERROR: <input>:1:6: found no matching overload for '_?_:_' applied to "
        "'(bool, int, uint)'"
    )
    assert value("[1].sortBy(x, x) == [1] && 'a'.sortBy(x, x) == []") == (
        "compile: compilation failed: ERROR: <input>:1:28: sortBy can only be applied to a list, identifier, "
        "comprehension, call or select expression"
    )


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[a", "a**", "a{2}{3}", "a{1001}", "(a{100}){100}", "(?=a)", "(?!a)", "(?<=a)", "(?P=x)", "\\1", "\\Z", "(?>a)",
     "a++", "*a", "[b-a]", "\\p{Nope}", "[[:nope:]]", "(?P<x>a)(?P<x>b)", "\\", "(?z)", "\\8"],
)  # fmt: skip
def test_what_re2_refuses_is_refused(pattern: str) -> None:
    with pytest.raises(RegexProblem, match="error parsing regexp"):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "text", "span"),
    [
        ("a{,2}", "a{,2}", (0, 5)),  # no count: taken as written
        ("a{2,1", "a{2,1", (0, 5)),
        ("$", "a\n", (2, 2)),  # the very end, not before a last newline
        ("(?m)$", "a\nb", (1, 1)),
        ("\\s", "\v", None),
        ("[\\d-x]", "-", (0, 1)),
        ("[^\\w]", "é", (0, 1)),
        ("(?U)a+", "aaa", (0, 1)),
        ("(?-i)a(?i)b", "aB", (0, 2)),
        ("x*", "aaa", (0, 0)),
        ("(a|ab)(c|bcd)", "abcd", (0, 4)),
        ("\\x41\\x{1F600}", "A😀", (0, 2)),
        ("[]a]", "]", (0, 1)),
        ("(?i)[^a]", "A", None),
        ("\\bé", "é", None),  # a word boundary knows ASCII only
    ],
)
def test_patterns_mean_what_re2_says(pattern: str, text: str, span: tuple[int, int] | None) -> None:
    assert compile_pattern(pattern).span(text) == span


def test_errors_survive_pickling() -> None:
    with pytest.raises(CelCompileError) as caught:
        compile_selector("x == 1")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line, again.column) == (str(caught.value), 1, 1)
    with pytest.raises(CelEvalError) as failed:
        compile_selector("1 / 0 == 1").evaluate({}, driver="d")
    assert pickle.loads(pickle.dumps(failed.value)).error_class == "division_by_zero"
