"""Actual cost of one call, from its arguments and its result.

Source: cel-go's cost tracker, ext.Lists v3, ext.Sets, and k8s.io/apiserver cel/library cost. A failure counts as a value of size 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dra.cel.functions.formats import CelFormat
from dra.cel.functions.net import CelCIDR, CelIP
from dra.cel.functions.quantities import CelQuantity, CelSemver
from dra.cel.functions.urls import CelURL
from dra.cel.values import Optional

SCAN, PATTERN = 0.1, 0.25
_UNIT_EQUALITY = (CelQuantity, CelIP, CelCIDR, CelFormat, CelURL, CelSemver)
Args = Sequence[Any]


def actual_size(value: Any) -> int:
    """Give the size of a value: characters, bytes, elements; 1 for anything else."""
    if isinstance(value, (str, bytes, list, dict)):
        return len(value)
    if isinstance(value, (CelIP, CelCIDR, CelURL)):
        return value.size()
    if type(value) is Optional and value.present:
        return actual_size(value.value)
    return 1


def _scan(value: Any, factor: float = SCAN) -> int:
    return math.ceil(actual_size(value) * factor)


def _traversal(value: Any) -> int:
    if isinstance(value, str):
        return int(len(value.encode("utf-8", "surrogatepass")) * SCAN)
    if isinstance(value, bytes):
        return int(len(value) * SCAN)
    if isinstance(value, list):
        return sum(_traversal(item) for item in value)
    if isinstance(value, dict):
        return sum(_traversal(key) + _traversal(item) for key, item in value.items())
    return 1


def _regex(text: Any, pattern_size: float) -> int:
    return math.ceil((1.0 + actual_size(text)) * SCAN) * math.ceil(pattern_size * PATTERN)


def _contains_ip(overload: str, args: Args) -> int:
    cost = math.ceil(2 * actual_size(args[0]) * SCAN)
    return cost + (_scan(args[1]) if overload == "cidr_contains_ip_string" else 0)


def _contains_cidr(overload: str, args: Args) -> int:
    cost = math.ceil(2 * actual_size(args[0]) * SCAN) + _scan(args[0]) + 1
    return cost + (_scan(args[1]) if overload == "cidr_contains_cidr_string" else 0)


def _validate(_overload: str, args: Args) -> int:
    return _regex(args[1], args[0].size) if isinstance(args[0], CelFormat) else 1


def _of_first(factor: float) -> Callable[[str, Args], int]:
    return lambda _overload, args: _scan(args[0], factor)


_BY_NAME: dict[str, Callable[[str, Args], int]] = {
    "includes": lambda _overload, _args: 1,
    "find": lambda _overload, args: _regex(args[0], actual_size(args[1])),
    "findAll": lambda _overload, args: _regex(args[0], actual_size(args[1])),
    "ip": lambda overload, args: 1 if overload == "cidr_ip" else _scan(args[0]),
    "containsIP": _contains_ip,
    "containsCIDR": _contains_cidr,
    "validate": _validate,
}
for _name in ("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"):
    _BY_NAME[_name] = lambda _overload, args: _traversal(args[0])
for _name in (
    "url", "lowerAscii", "upperAscii", "substring", "trim", "cidr", "isIP", "isCIDR", "quantity", "isQuantity",
    "semver", "isSemver",
):  # fmt: skip
    _BY_NAME[_name] = _of_first(SCAN)
for _name in ("replace", "split", "ip.isCanonical"):
    _BY_NAME[_name] = _of_first(2 * SCAN)

_SCANS = frozenset(
    {
        "starts_with_string",
        "ends_with_string",
        "string_to_bytes",
        "bytes_to_string",
        "strings_quote",
        "string_format",
    }
)
_COMPARISONS = frozenset(
    {"equals", "not_equals"}
    | {
        f"{word}_{kind}"
        for word in ("less", "less_equals", "greater", "greater_equals")
        for kind in ("string", "bytes")
    }
)


def call_cost(name: str, overload: str, args: Args, result: Any) -> int:
    """Give the cost of a call; `overload` is empty where the checker left several open."""
    listed = _list_cost(overload, args, result)
    if listed is not None:
        return listed
    by_name = _BY_NAME.get(name)
    if by_name is not None:
        return by_name(overload, args)
    if name == "join":
        return _scan(result, 2 * SCAN)
    if name == "_==_" and isinstance(args[0], _UNIT_EQUALITY):
        return 1
    if overload in _SCANS:
        return _scan(args[0])
    if overload == "in_list":
        return actual_size(args[1])
    if overload in _COMPARISONS:
        return math.ceil(min(actual_size(args[0]), actual_size(args[1])) * SCAN)
    if overload in {"add_string", "add_bytes"}:
        return math.ceil((actual_size(args[0]) + actual_size(args[1])) * SCAN)
    if overload == "matches_string":
        return _regex(args[0], actual_size(args[1]))
    if overload == "contains_string":
        return _scan(args[0]) * _scan(args[1])
    return 1


def _list_cost(overload: str, args: Args, result: Any) -> int | None:
    if overload in {"list_slice", "lists_range", "list_reverse"}:
        return actual_size(result) + 11
    if overload in {"list_flatten", "list_flatten_int"}:
        depth = args[1] if len(args) == 2 and isinstance(args[1], int) else 1
        return int(actual_size(args[0]) * float(depth)) + 11
    if overload.startswith("list_sets_"):
        factor = 2 if overload == "list_sets_equivalent_list" else 1
        return 1 + actual_size(args[0]) * actual_size(args[1]) * factor
    if overload == "list_distinct" or overload.endswith("_sort"):
        return _self_compare(args[0])
    if overload.endswith("_sortByAssociatedKeys"):
        return _self_compare(args[1])
    return None


def _self_compare(items: Any) -> int:
    size = actual_size(items)
    factor = 2.0
    if isinstance(items, list) and items and isinstance(items[0], (str, bytes)):
        factor += SCAN
    return int(size * size * factor) + 11
