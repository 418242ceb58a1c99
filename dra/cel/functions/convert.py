"""Conversions: `int("1")`, `string(1.0)`, `bool("true")`, …

Source: cel-go's ConvertToType, which uses Go's strconv: `1e+20`, `+Inf`, no blanks, no underscores, no hexadecimal.
"""

from __future__ import annotations

import math
import re
from typing import Any

from dra.cel import types as t
from dra.cel.errors import Failure
from dra.cel.functions.registry import implement
from dra.cel.functions.standard import conversion, int_from_double, uint_from_double
from dra.cel.values import MAX_INT, MAX_UINT, MIN_INT, Duration, Timestamp, Uint, no_overload_for

_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_UNSIGNED = re.compile(r"[0-9]+", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_HEXADECIMAL = re.compile(
    r"[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+", re.ASCII
)
_NAMED = re.compile(r"(?P<sign>[+-]?)(?:(?P<inf>inf|infinity)|nan)", re.ASCII | re.IGNORECASE)


def _same(value: Any) -> Any:
    return value


for _name, _kind in (
    ("bool", bool), ("bytes", bytes), ("double", float), ("int", int), ("string", str), ("uint", Uint),
):  # fmt: skip
    implement(_name, _kind)(_same)


@implement("bool", str)
def _bool(text: str) -> bool:
    if text in {"1", "t", "T", "TRUE", "true", "True"}:
        return True
    if text in {"0", "f", "F", "FALSE", "false", "False"}:
        return False
    raise conversion(t.STRING, t.BOOL)


@implement("bytes", str)
def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@implement("double", int)
def _double_int(value: int) -> float:
    return float(value)


@implement("double", Uint)
def _double_uint(value: Uint) -> float:
    return float(value)


@implement("double", str)
def _double(text: str) -> float:
    value = _parse_double(text)
    if value is None:
        raise conversion(t.STRING, t.DOUBLE)
    return value


def _parse_double(text: str) -> float | None:
    named = _NAMED.fullmatch(text)
    if named is not None:
        if not named["inf"]:
            return None if named["sign"] else math.nan
        return -math.inf if named["sign"] == "-" else math.inf
    if _HEXADECIMAL.fullmatch(text):
        try:
            return float.fromhex(text)
        except OverflowError:
            return None
    if not _DECIMAL.fullmatch(text):
        return None
    value = float(text)
    return None if math.isinf(value) else value


@implement("int", float)
def _int_double(value: float) -> int:
    return int_from_double(value)


@implement("int", str)
def _int(text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise conversion(t.STRING, t.INT)
    value = small_int(text)
    if value is None or not MIN_INT <= value <= MAX_INT:
        raise conversion(t.STRING, t.INT)
    return value


def small_int(text: str) -> int | None:
    """Give a decimal number, or None if it has far more digits than 64 bits hold."""
    digits = text.lstrip("+-").lstrip("0")
    if len(digits) > 30:
        return None
    return int(text)


@implement("int", Uint)
def _int_uint(value: Uint) -> int:
    if value > MAX_INT:
        raise Failure("overflow", "integer overflow")
    return int(value)


@implement("int", Timestamp)
def _int_timestamp(value: Timestamp) -> int:
    return int(value) // 10**9


@implement("int", Duration)
def _int_duration(value: Duration) -> int:
    return int(value)


@implement("uint", float)
def _uint_double(value: float) -> Uint:
    return uint_from_double(value)


@implement("uint", int)
def _uint_int(value: int) -> Uint:
    if value < 0:
        raise Failure("overflow", "unsigned integer overflow")
    return Uint(value)


@implement("uint", str)
def _uint(text: str) -> Uint:
    if _UNSIGNED.fullmatch(text) is None:
        raise conversion(t.STRING, t.UINT)
    value = small_int(text)
    if value is None or value > MAX_UINT:
        raise conversion(t.STRING, t.UINT)
    return Uint(value)


@implement("string", int)
def _string_int(value: int) -> str:
    return str(int(value))


@implement("string", Uint)
def _string_uint(value: Uint) -> str:
    return str(int(value))


@implement("string", bool)
def _string_bool(value: bool) -> str:
    return "true" if value else "false"


@implement("string", bytes)
def _string_bytes(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise Failure("conversion", "invalid UTF-8 in bytes, cannot convert to string") from None


@implement("string", float)
def _string_double(value: float) -> str:
    return format_double(value)


def format_double(value: float) -> str:
    """Write a double as Go's `%g` with the shortest digits: `1`, `0.1`, `1e+20`, `+Inf`, `NaN`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == 0:
        return "-0" if math.copysign(1.0, value) < 0 else "0"
    sign = "-" if value < 0 else ""
    digits, exponent = shortest(abs(value))
    if exponent < -4 or exponent >= 6:
        mantissa = digits[0] + (f".{digits[1:]}" if len(digits) > 1 else "")
        return f"{sign}{mantissa}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    if len(digits) <= exponent + 1:
        return sign + digits.ljust(exponent + 1, "0")
    return f"{sign}{digits[: exponent + 1]}.{digits[exponent + 1 :]}"


def shortest(value: float) -> tuple[str, int]:
    """Give the shortest digits of a positive double and the decimal exponent of the first."""
    mantissa, _, exponent = f"{value!r}".partition("e")
    if not exponent:
        mantissa, _, exponent = f"{value:.17e}".partition("e")
        whole, _, fraction = repr(value).partition(".")
        digits = (whole + fraction).lstrip("0").rstrip("0")
        return digits or "0", int(exponent)
    digits = mantissa.replace(".", "").rstrip("0")
    return digits or "0", int(exponent)


@implement("string", type(None))
def _string_null(value: None) -> str:
    raise no_overload_for("string", value)
