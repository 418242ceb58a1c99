"""Run-time values, their types, equality and order.

| CEL | Python |
|---|---|
| int, double, bool, string, bytes, null | int, float, bool, str, bytes, None |
| uint | `Uint` |
| list | list |
| map | dict from `encode_key(key)` |
| duration, timestamp | `Duration`, `Timestamp` (nanoseconds) |
| optional_type | `Optional` |
| type | `CelType` |
| kubernetes.Quantity, kubernetes.Semver | `CelQuantity`, `CelSemver` |

Values are never changed once made. Source: cel-go's common/types; equality of numbers crosses types, ordering too.
"""

from __future__ import annotations

from typing import Any

from dra.cel import types as t
from dra.cel.errors import Failure, no_overload
from dra.cel.types import CelType

MIN_INT, MAX_INT, MAX_UINT = -(1 << 63), (1 << 63) - 1, (1 << 64) - 1


class Uint(int):
    """An unsigned integer; compares equal to the int of the same value."""

    __slots__ = ()


class Duration(int):
    """Nanoseconds."""

    __slots__ = ()


class Timestamp(int):
    """Nanoseconds since 1970 UTC."""

    __slots__ = ()


class Optional:
    """A value that may be absent; `value` means something only where `present`."""

    __slots__ = ("present", "value")

    def __init__(self, *, present: bool, value: object = None) -> None:
        self.present = present
        self.value = value


NONE = Optional(present=False)


def some(value: object) -> Optional:
    """Give an optional that holds `value`."""
    return Optional(present=True, value=value)


class Opaque:
    """Base of values whose `==` fails on another type instead of giving false."""

    __slots__ = ()
    cel_type: CelType

    def same(self, other: Any) -> bool:
        """Whether two values of this type are equal."""
        raise NotImplementedError


_TYPES: dict[type, CelType] = {
    bool: t.BOOL, int: t.INT, Uint: t.UINT, float: t.DOUBLE, str: t.STRING, bytes: t.BYTES, type(None): t.NULL,
    list: t.LIST, dict: t.MAP, Duration: t.DURATION, Timestamp: t.TIMESTAMP, Optional: t.OPTIONAL, CelType: t.TYPE,
}  # fmt: skip


def type_of(value: object) -> CelType:
    """Give the run-time type of a value, parameters erased."""
    found = _TYPES.get(type(value))
    if found is not None:
        return found
    if isinstance(value, Opaque):
        return value.cel_type
    return t.MAP if isinstance(value, dict) else t.DEVICE


def no_overload_for(name: str, *args: object) -> Failure:
    """Give the failure of a function that has no form for the types of its arguments."""
    return no_overload(f"{name}({', '.join(str(type_of(arg)) for arg in args)})")


def truth(value: object) -> bool:
    """Give a condition's value.

    Raises:
        Failure: it is not a bool.
    """
    if value is True or value is False:
        return bool(value)
    raise no_overload()


# -- map keys


def encode_key(key: object) -> Any:
    """Give the dict key of a map key: kinds that Python would merge (1, True, 1.0, 1u) stay apart."""
    kind = type(key)
    if kind is str or kind is int or key is None:
        return key
    if kind is bool:
        return ("bool", key)
    if kind is Uint:
        return ("uint", int(key))  # type: ignore[call-overload]
    if kind is float:
        return ("double", key)
    if kind in {Duration, Timestamp}:
        return (kind.__name__, int(key))  # type: ignore[call-overload]
    if kind is CelType:
        return ("type", key.name)  # type: ignore[attr-defined]
    raise Failure("internal", f"internal error: hash of unhashable type {type_of(key)}")


def decode_key(key: Any) -> Any:
    """Give the map key of a dict key."""
    if type(key) is not tuple:
        return key
    kind, value = key
    match kind:
        case "uint":
            return Uint(value)
        case "Duration":
            return Duration(value)
        case "Timestamp":
            return Timestamp(value)
        case "type":
            return t.TYPE_IDENTS.get(value, CelType("type", value))
    return value


def keys_of(mapping: dict[Any, Any]) -> list[Any]:
    """Give the keys of a map, in its order."""
    return [decode_key(key) for key in mapping]


_MISSING = object()


def find(mapping: dict[Any, Any], key: object) -> Any:
    """Give the value under `key`, numbers matching across types, or `MISSING`."""
    kind = type(key)
    try:
        if kind is str:
            return mapping[key]
        encoded = encode_key(key)
    except KeyError:
        return _MISSING
    try:
        return mapping[encoded]
    except KeyError:
        pass
    for other in _other_keys(kind, key):
        if other in mapping:
            return mapping[other]
    return _MISSING


def _other_keys(kind: type, key: Any) -> tuple[Any, ...]:
    if kind is int:
        return (("uint", key),) if key >= 0 else ()
    if kind is Uint:
        return (int(key),)
    if kind is float and key.is_integer() and abs(key) < 2.0**64:
        return (int(key), ("uint", int(key)))
    return ()


MISSING = _MISSING


# -- equality and order

_EXACT = frozenset({str, int, bool, bytes, Uint, Duration, Timestamp, float})


def equal(left: Any, right: Any) -> bool:
    """`==`: numbers across types, other kinds only with their own; null equals null alone.

    Raises:
        Failure: no such overload, where the left side is a Quantity, Semver, IP, … and the right is not.
    """
    kind, other = type(left), type(right)
    if kind is other and kind in _EXACT:
        return bool(left == right)
    if left is None or right is None:
        return left is right
    if kind in _NUMBERS:
        return other in _NUMBERS and _compare_numbers(left, right, equality=True) == 0
    if kind is list:
        return other is list and _lists_equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and _maps_equal(left, right)
    if kind is Optional:
        if other is not Optional or left.present != right.present:
            return False
        return not left.present or equal(left.value, right.value)
    if kind is CelType:
        return other is CelType and left.name == right.name
    if isinstance(left, Opaque):
        if kind is not other:
            raise no_overload()
        return left.same(right)
    return False


def not_equal(left: Any, right: Any) -> bool:
    """`!=`: true also where `==` fails."""
    try:
        return not equal(left, right)
    except Failure:
        return True


def _not_false(left: Any, right: Any) -> bool:
    # Inside lists and maps only a plain "no" counts; a failure is not one.
    try:
        return equal(left, right)
    except Failure:
        return True


def _lists_equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(_not_false, left, right))


def _maps_equal(left: dict[Any, Any], right: dict[Any, Any]) -> bool:
    if len(left) != len(right):
        return False
    for key, value in left.items():
        other = find(right, decode_key(key))
        if other is _MISSING or not _not_false(value, other):
            return False
    return True


_NUMBERS = frozenset({int, Uint, float})
_ORDERED = frozenset({str, bytes, bool, Duration, Timestamp})


def compare(left: Any, right: Any) -> int:
    """Give -1, 0 or 1.

    Raises:
        Failure: the values have no order, or one is NaN.
    """
    kind, other = type(left), type(right)
    if kind is other and kind in _ORDERED:
        return int(left > right) - int(left < right)
    if kind in _NUMBERS and other in _NUMBERS:
        return _compare_numbers(left, right)
    raise no_overload()


def _compare_numbers(left: Any, right: Any, *, equality: bool = False) -> int:
    # An int against a double is compared as doubles: 9223372036854775807 equals 9223372036854775808.0.
    if type(left) is float or type(right) is float:
        left, right = float(left), float(right)
        if left != left or right != right:  # noqa: PLR0124 - the test for NaN
            if equality:
                return 1
            raise Failure("nan_order", "NaN values cannot be ordered")
    return int(left > right) - int(left < right)


def contains(element: Any, container: Any) -> bool:
    """`in` for lists and maps.

    Raises:
        Failure: the container is neither.
    """
    if isinstance(container, dict):
        kind = type(element)
        if kind is str:
            return element in container
        return find(container, element) is not _MISSING
    if type(container) is not list:
        raise no_overload()
    return any(_found(element, item) for item in container)


def _found(element: Any, item: Any) -> bool:
    # An element that cannot be compared is not the one looked for.
    try:
        return equal(element, item)
    except Failure:
        return False


def check_int(value: int) -> int:
    """Give `value` if it fits 64 bits signed.

    Raises:
        Failure: integer overflow.
    """
    if MIN_INT <= value <= MAX_INT:
        return value
    raise Failure("overflow", "integer overflow")


def check_uint(value: int) -> Uint:
    """Give `value` if it fits 64 bits unsigned.

    Raises:
        Failure: unsigned integer overflow.
    """
    if 0 <= value <= MAX_UINT:
        return Uint(value)
    raise Failure("overflow", "unsigned integer overflow")
