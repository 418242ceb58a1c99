"""The standard library: operators, conversions, strings, sizes.

Source: cel-spec's standard definitions as cel-go binds them: integers overflow as errors, division truncates.
"""

from __future__ import annotations

import math
from typing import Any

from dra.cel import types as t
from dra.cel.errors import Failure, no_overload
from dra.cel.functions.registry import declare, function, implement
from dra.cel.regex import search
from dra.cel.values import (
    MAX_INT,
    MAX_UINT,
    MIN_INT,
    Duration,
    Timestamp,
    Uint,
    check_int,
    check_uint,
    compare,
    contains,
    equal,
    not_equal,
    type_of,
)

declare(
    """
    conditional: _?_:_(bool, A, A) -> A
    logical_and: _&&_(bool, bool) -> bool
    logical_or: _||_(bool, bool) -> bool
    logical_not: !_(bool) -> bool
    not_strictly_false: @not_strictly_false(bool) -> bool
    equals: _==_(A, A) -> bool
    not_equals: _!=_(A, A) -> bool
    add_bytes: _+_(bytes, bytes) -> bytes
    add_double: _+_(double, double) -> double
    add_duration_duration: _+_(duration, duration) -> duration
    add_duration_timestamp: _+_(duration, timestamp) -> timestamp
    add_timestamp_duration: _+_(timestamp, duration) -> timestamp
    add_int64: _+_(int, int) -> int
    add_list: _+_(list(A), list(A)) -> list(A)
    add_string: _+_(string, string) -> string
    add_uint64: _+_(uint, uint) -> uint
    subtract_double: _-_(double, double) -> double
    subtract_duration_duration: _-_(duration, duration) -> duration
    subtract_int64: _-_(int, int) -> int
    subtract_timestamp_duration: _-_(timestamp, duration) -> timestamp
    subtract_timestamp_timestamp: _-_(timestamp, timestamp) -> duration
    subtract_uint64: _-_(uint, uint) -> uint
    multiply_double: _*_(double, double) -> double
    multiply_int64: _*_(int, int) -> int
    multiply_uint64: _*_(uint, uint) -> uint
    divide_double: _/_(double, double) -> double
    divide_int64: _/_(int, int) -> int
    divide_uint64: _/_(uint, uint) -> uint
    modulo_int64: _%_(int, int) -> int
    modulo_uint64: _%_(uint, uint) -> uint
    negate_double: -_(double) -> double
    negate_int64: -_(int) -> int
    index_list: _[_](list(A), int) -> A
    index_map: _[_](map(A, B), A) -> B
    in_list: @in(A, list(A)) -> bool
    in_map: @in(A, map(A, B)) -> bool
    size_bytes: size(bytes) -> int
    bytes_size: bytes~size() -> int
    size_list: size(list(A)) -> int
    list_size: list(A)~size() -> int
    size_map: size(map(A, B)) -> int
    map_size: map(A, B)~size() -> int
    size_string: size(string) -> int
    string_size: string~size() -> int
    type: type(A) -> type(A)
    to_dyn: dyn(A) -> dyn
    bool_to_bool: bool(bool) -> bool
    string_to_bool: bool(string) -> bool
    bytes_to_bytes: bytes(bytes) -> bytes
    string_to_bytes: bytes(string) -> bytes
    double_to_double: double(double) -> double
    int64_to_double: double(int) -> double
    string_to_double: double(string) -> double
    uint64_to_double: double(uint) -> double
    int64_to_int64: int(int) -> int
    double_to_int64: int(double) -> int
    duration_to_int64: int(duration) -> int
    string_to_int64: int(string) -> int
    timestamp_to_int64: int(timestamp) -> int
    uint64_to_int64: int(uint) -> int
    string_to_string: string(string) -> string
    bool_to_string: string(bool) -> string
    bytes_to_string: string(bytes) -> string
    double_to_string: string(double) -> string
    duration_to_string: string(duration) -> string
    int64_to_string: string(int) -> string
    timestamp_to_string: string(timestamp) -> string
    uint64_to_string: string(uint) -> string
    uint64_to_uint64: uint(uint) -> uint
    double_to_uint64: uint(double) -> uint
    int64_to_uint64: uint(int) -> uint
    string_to_uint64: uint(string) -> uint
    contains_string: string~contains(string) -> bool
    ends_with_string: string~endsWith(string) -> bool
    starts_with_string: string~startsWith(string) -> bool
    matches: matches(string, string) -> bool
    matches_string: string~matches(string) -> bool
    """
)

_ORDERED = ("bool", "int", "uint", "double", "string", "bytes", "timestamp", "duration")
_CROSS = (
    ("int", "double"), ("int", "uint"), ("uint", "double"), ("uint", "int"), ("double", "int"), ("double", "uint"),
)  # fmt: skip
_IDS = {"int": "int64", "uint": "uint64"}
for _sign, _word in (("<", "less"), ("<=", "less_equals"), (">", "greater"), (">=", "greater_equals")):
    for _kind in _ORDERED:
        declare(f"{_word}_{_IDS.get(_kind, _kind)}: _{_sign}_({_kind}, {_kind}) -> bool")
    for _left, _right in _CROSS:
        _id = f"{_word}_{_IDS.get(_left, _left)}_{_IDS.get(_right, _right)}"
        declare(f"{_id}: _{_sign}_({_left}, {_right}) -> bool")

function("_==_").bind((object, object), equal)
function("_!=_").bind((object, object), not_equal)
function("@in").bind((object, object), contains)


@implement("_<_", object, object)
def _less(left: Any, right: Any) -> bool:
    return compare(left, right) < 0


@implement("_<=_", object, object)
def _less_equals(left: Any, right: Any) -> bool:
    return compare(left, right) <= 0


@implement("_>_", object, object)
def _greater(left: Any, right: Any) -> bool:
    return compare(left, right) > 0


@implement("_>=_", object, object)
def _greater_equals(left: Any, right: Any) -> bool:
    return compare(left, right) >= 0


@implement("!_", bool)
def _not(value: bool) -> bool:
    return not value


@implement("_+_", object, object)
def add(left: Any, right: Any) -> Any:
    """`+`: numbers and times of one kind, text, bytes, lists."""
    kind, other = type(left), type(right)
    if kind is int and other is int:
        return check_int(left + right)
    if kind is other and kind in {str, bytes, list, float}:
        return left + right
    if kind is Uint and other is Uint:
        return check_uint(int(left) + int(right))
    if {kind, other} <= {Duration, Timestamp}:
        if kind is other is Duration:
            return Duration(check_int(int(left) + int(right)))
        if kind is not other:
            return check_timestamp(int(left) + int(right))
    # The left side has no `+` at all, or not with the right side's type.
    raise (
        no_overload()
        if kind in {int, Uint, float, str, bytes, list, Duration, Timestamp}
        else Failure("no_such_overload", "no such overload: _+_")
    )


@implement("_-_", object, object)
def subtract(left: Any, right: Any) -> Any:
    """`-`: numbers and times."""
    kind, other = type(left), type(right)
    if kind is int and other is int:
        return check_int(left - right)
    if kind is float and other is float:
        return left - right
    if kind is Uint and other is Uint:
        return check_uint(int(left) - int(right))
    if kind is other and kind in {Duration, Timestamp}:
        return Duration(check_int(int(left) - int(right)))
    if kind is Timestamp and other is Duration:
        return check_timestamp(int(left) - int(right))
    raise no_overload()


@implement("_*_", object, object)
def _multiply(left: Any, right: Any) -> Any:
    kind, other = type(left), type(right)
    if kind is int and other is int:
        return check_int(left * right)
    if kind is float and other is float:
        return left * right
    if kind is Uint and other is Uint:
        return check_uint(int(left) * int(right))
    raise no_overload()


@implement("_/_", object, object)
def _divide(left: Any, right: Any) -> Any:
    kind, other = type(left), type(right)
    if kind is float and other is float:
        return _divide_doubles(left, right)
    if kind is other and kind in {int, Uint}:
        if right == 0:
            raise Failure("division_by_zero", "division by zero")
        quotient = abs(int(left)) // abs(int(right))
        if kind is Uint:
            return Uint(quotient)
        return check_int(quotient if (left < 0) == (right < 0) else -quotient)
    raise no_overload()


def _divide_doubles(left: float, right: float) -> float:
    if right == 0:
        if left == 0 or math.isnan(left):
            return math.nan
        return math.copysign(math.inf, left) * math.copysign(1.0, right)
    return left / right


@implement("_%_", object, object)
def _modulo(left: Any, right: Any) -> Any:
    kind, other = type(left), type(right)
    if kind is not other or kind not in {int, Uint}:
        raise no_overload()
    if right == 0:
        raise Failure("modulus_by_zero", "modulus by zero")
    if kind is Uint:
        return Uint(int(left) % int(right))
    if left == MIN_INT and right == -1:
        raise Failure("overflow", "integer overflow")
    rest = abs(left) % abs(right)
    return -rest if left < 0 else rest


@implement("-_", int)
def _negate(value: int) -> int:
    return check_int(-value)


@implement("-_", Uint)
def _negate_uint(_value: Uint) -> int:
    raise no_overload()


@implement("-_", float)
def _negate_double(value: float) -> float:
    return -value


@implement("-_", Duration)
def _negate_duration(value: Duration) -> Duration:
    return Duration(check_int(-int(value)))


def size(value: Any) -> int:
    """Number of code points, bytes, elements or entries."""
    if type(value) in {str, bytes, list} or isinstance(value, dict):
        return len(value)
    raise Failure("no_such_overload", "no such overload: size")


function("size").bind((object,), size)
function("type").bind((object,), type_of)


@implement("dyn", object)
def _dyn(value: Any) -> Any:
    return value


def check_timestamp(nanos: int) -> Timestamp:
    """Give a timestamp inside the years 1 to 9999.

    Raises:
        Failure: timestamp overflow.
    """
    if -62135596800 * 10**9 <= nanos <= 253402300799 * 10**9 + 999999999:
        return Timestamp(nanos)
    raise Failure("overflow", "timestamp overflow")


def conversion(source: t.CelType, target: t.CelType) -> Failure:
    """Give the failure of a conversion."""
    return Failure("conversion", f"type conversion error from '{source}' to '{target}'")


@implement("contains", str, str)
def _contains(text: str, part: str) -> bool:
    return part in text


@implement("endsWith", str, str)
def _ends_with(text: str, part: str) -> bool:
    return text.endswith(part)


@implement("startsWith", str, str)
def _starts_with(text: str, part: str) -> bool:
    return text.startswith(part)


@implement("matches", str, str)
def _matches(text: str, pattern: str) -> bool:
    return search(pattern, text) is not None


def int_from_double(value: float) -> int:
    """Truncate a double.

    Raises:
        Failure: integer overflow; the bounds themselves do not convert.
    """
    if math.isnan(value) or not -(2.0**63) < value < 2.0**63:
        raise Failure("overflow", "integer overflow")
    return int(value)


def uint_from_double(value: float) -> Uint:
    """Truncate a double.

    Raises:
        Failure: unsigned integer overflow.
    """
    if math.isnan(value) or not 0 <= value < 2.0**64:
        raise Failure("overflow", "unsigned integer overflow")
    return Uint(int(value))


__all__ = ["MAX_INT", "MAX_UINT", "add", "check_timestamp", "conversion", "size", "subtract"]
