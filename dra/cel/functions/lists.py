"""Lists and sets: Kubernetes' own, ext.Lists v3 and ext.Sets.

Source: k8s.io/apiserver cel/library lists; cel-go ext.Lists and ext.Sets.
"""

from __future__ import annotations

from functools import cmp_to_key
from itertools import pairwise
from typing import Any

from dra.cel.errors import CostExceeded, Failure, no_overload
from dra.cel.functions.registry import declare, implement
from dra.cel.functions.standard import add
from dra.cel.values import Duration, Timestamp, Uint, compare, equal, no_overload_for

COMPARABLE = ("int", "uint", "double", "bool", "duration", "timestamp", "string", "bytes")
SUMMABLE = ("int", "uint", "double", "duration")
_COMPARABLE_TYPES = frozenset({int, Uint, float, bool, Duration, Timestamp, str, bytes})
# A list longer than this cannot come out of an evaluation within the cost limit.
MAX_RANGE = 1_000_000
MAX_INCLUDES = 48

for _kind in COMPARABLE:
    declare(
        f"""
        list_{_kind}_is_sorted_bool: list({_kind})~isSorted() -> bool
        list_{_kind}_max_{_kind}: list({_kind})~max() -> {_kind}
        list_{_kind}_min_{_kind}: list({_kind})~min() -> {_kind}
        list_{_kind}_sort: list({_kind})~sort() -> list({_kind})
        list_{_kind}_sortByAssociatedKeys: list(T)~@sortByAssociatedKeys(list({_kind})) -> list(T)
        """
    )
for _kind in SUMMABLE:
    declare(f"list_{_kind}_sum_{_kind}: list({_kind})~sum() -> {_kind}")
declare(
    """
    list_a_index_of_int: list(A)~indexOf(A) -> int
    list_a_last_index_of_int: list(A)~lastIndexOf(A) -> int
    list_includes_dyn_dyn: dyn~includes(dyn) -> bool
    list_slice: list(T)~slice(int, int) -> list(T)
    list_flatten: list(list(T))~flatten() -> list(T)
    list_flatten_int: list(dyn)~flatten(int) -> list(dyn)
    lists_range: lists.range(int) -> list(int)
    list_reverse: list(T)~reverse() -> list(T)
    list_distinct: list(T)~distinct() -> list(T)
    list_sets_contains_list: sets.contains(list(T), list(T)) -> bool
    list_sets_equivalent_list: sets.equivalent(list(T), list(T)) -> bool
    list_sets_intersects_list: sets.intersects(list(T), list(T)) -> bool
    """
)


def _check_first(name: str, items: list[Any]) -> None:
    if items and type(items[0]) not in _COMPARABLE_TYPES:
        raise no_overload_for(name, items)


@implement("isSorted", list)
def _is_sorted(items: list[Any]) -> bool:
    _check_first("isSorted", items)
    return all(_ordered(left, right) for left, right in pairwise(items))


def _ordered(left: Any, right: Any) -> bool:
    if type(right) not in _COMPARABLE_TYPES:
        raise no_overload()
    try:
        return compare(left, right) <= 0
    except Failure:
        return True


@implement("sum", list)
def _sum(items: list[Any]) -> Any:
    if not items:
        return 0
    first = type(items[0])
    if first not in {int, Uint, float, Duration}:
        raise no_overload_for("sum", items)
    total = first(0)
    for item in items:
        total = add(total, item)
    return total


def _extreme(name: str, items: list[Any], sign: int) -> Any:
    _check_first(name, items)
    if not items:
        raise Failure("list_argument", f"{name} called on empty list")
    best = items[0]
    for item in items[1:]:
        if type(item) not in _COMPARABLE_TYPES:
            raise no_overload()
        try:
            if compare(best, item) == sign:
                best = item
        except Failure:
            continue
    return best


@implement("min", list)
def _min(items: list[Any]) -> Any:
    return _extreme("min", items, 1)


@implement("max", list)
def _max(items: list[Any]) -> Any:
    return _extreme("max", items, -1)


def found(element: Any, item: Any) -> bool:
    """Whether two elements are equal; elements that cannot be compared are not."""
    try:
        return equal(element, item)
    except Failure:
        return False


@implement("indexOf", list, object)
def _index_of(items: list[Any], element: Any) -> int:
    return next((index for index, item in enumerate(items) if found(item, element)), -1)


@implement("lastIndexOf", list, object)
def _last_index_of(items: list[Any], element: Any) -> int:
    return next((index for index in range(len(items) - 1, -1, -1) if found(items[index], element)), -1)


@implement("includes", object, object)
def _includes(target: Any, element: Any) -> bool:
    if type(target) is not list:
        return found(target, element)
    if len(target) > MAX_INCLUDES:
        raise Failure(
            "includes_limit",
            f"'includes' function cannot be applied to lists longer than {MAX_INCLUDES} values",
        )
    return any(found(item, element) for item in target)


@implement("slice", list, int, int)
def _slice(items: list[Any], start: int, end: int) -> list[Any]:
    what = f"cannot slice({start}, {end}),"
    if start < 0 or end < 0:
        raise Failure("list_argument", f"{what} negative indexes not supported")
    if start > end:
        raise Failure("list_argument", f"{what} start index must be less than or equal to end index")
    if len(items) < end:
        raise Failure("list_argument", f"{what} list is length {len(items)}")
    return items[start:end]


@implement("flatten", list)
def _flatten_one(items: list[Any]) -> list[Any]:
    return _flatten(items, 1)


@implement("flatten", list, int)
def _flatten(items: list[Any], depth: int) -> list[Any]:
    if depth < 0:
        raise Failure("list_argument", "level must be non-negative")
    flat: list[Any] = []
    for item in items:
        if type(item) is list and depth:
            flat.extend(_flatten(item, depth - 1))
        else:
            flat.append(item)
    return flat


@implement("lists.range", int)
def _range(count: int) -> list[Any]:
    if count > MAX_RANGE:
        raise CostExceeded
    return list(range(count))


@implement("reverse", list)
def _reverse(items: list[Any]) -> list[Any]:
    return items[::-1]


@implement("distinct", list)
def _distinct(items: list[Any]) -> list[Any]:
    unique: list[Any] = []
    for item in items:
        if not any(found(item, other) for other in unique):
            unique.append(item)
    return unique


@implement("sort", list)
def _sort(items: list[Any]) -> list[Any]:
    return _sort_by(items, items)


@implement("@sortByAssociatedKeys", list, list)
def _sort_by(items: list[Any], keys: list[Any]) -> list[Any]:
    if not keys:
        return items
    kind = type(keys[0])
    if kind not in _COMPARABLE_TYPES:
        raise Failure("list_argument", "list elements must be comparable")
    if any(type(key) is not kind for key in keys) and len(keys) > 1:
        raise Failure("list_argument", "list elements must have the same type")

    def order(left: int, right: int) -> int:
        try:
            return compare(keys[left], keys[right])
        except Failure:
            return 0

    return [items[index] for index in sorted(range(len(keys)), key=cmp_to_key(order))]


@implement("sets.contains", list, list)
def sets_contain(items: list[Any], wanted: list[Any]) -> bool:
    """Whether every element of `wanted` is in `items`."""
    return all(any(found(element, item) for item in items) for element in wanted)


@implement("sets.equivalent", list, list)
def _sets_equivalent(left: list[Any], right: list[Any]) -> bool:
    return sets_contain(left, right) and sets_contain(right, left)


@implement("sets.intersects", list, list)
def _sets_intersect(left: list[Any], right: list[Any]) -> bool:
    return any(found(element, item) for element in left for item in right)
