"""Optional values. `or` and `orValue` are evaluated lazily by the evaluator itself.

Source: cel-go's optional types library, all versions.
"""

from __future__ import annotations

import math
from typing import Any

from dra.cel.errors import Failure
from dra.cel.functions.registry import declare, function, implement
from dra.cel.values import NONE, Duration, Optional, Timestamp, Uint, encode_key, no_overload_for, some

declare(
    """
    optional_of: optional.of(V) -> optional_type(V)
    optional_ofNonZeroValue: optional.ofNonZeroValue(V) -> optional_type(V)
    optional_none: optional.none() -> optional_type(V)
    optional_value: optional_type(V)~value() -> V
    optional_hasValue: optional_type(V)~hasValue() -> bool
    optional_or_optional: optional_type(V)~or(optional_type(V)) -> optional_type(V)
    optional_orValue_value: optional_type(V)~orValue(V) -> V
    select_optional_field: _?._(dyn, string) -> optional_type(V)
    list_optindex_optional_int: _[?_](list(V), int) -> optional_type(V)
    optional_list_optindex_optional_int: _[?_](optional_type(list(V)), int) -> optional_type(V)
    map_optindex_optional_value: _[?_](map(K, V), K) -> optional_type(V)
    optional_map_optindex_optional_value: _[?_](optional_type(map(K, V)), K) -> optional_type(V)
    optional_list_index_int: _[_](optional_type(list(V)), int) -> optional_type(V)
    optional_map_index_value: _[_](optional_type(map(K, V)), K) -> optional_type(V)
    list_first: list(V)~first() -> optional_type(V)
    list_last: list(V)~last() -> optional_type(V)
    optional_unwrap: optional.unwrap(list(optional_type(V))) -> list(V)
    optional_unwrapOpt: list(optional_type(V))~unwrapOpt() -> list(V)
    map_insert_key_value: cel.@mapInsert(map(K, V), K, V) -> map(K, V)
    map_insert_map: cel.@mapInsert(map(K, V), map(K, V)) -> map(K, V)
    """
)

function("optional.of").bind((object,), some)


@implement("optional.ofNonZeroValue", object)
def _of_non_zero(value: Any) -> Optional:
    return NONE if _is_zero(value) else some(value)


def _is_zero(value: Any) -> bool:
    if value is None:
        return True
    kind = type(value)
    if kind is Timestamp:
        # Go's zero time is the year 1.
        return int(value) == -62135596800 * 10**9
    if kind is float:
        return value == 0 and not math.isnan(value)
    if kind in {int, Uint, bool, str, bytes, list, Duration} or isinstance(value, dict):
        return not value
    return kind is Optional and not (value.present and not _is_zero(value.value))


@implement("optional.none")
def _none() -> Optional:
    return NONE


@implement("value", Optional)
def _value(optional: Optional) -> Any:
    if not optional.present:
        raise Failure("optional_none", "optional.none() dereference")
    return optional.value


@implement("hasValue", Optional)
def _has_value(optional: Optional) -> bool:
    return optional.present


@implement("first", list)
def _first(items: list[Any]) -> Optional:
    return some(items[0]) if items else NONE


@implement("last", list)
def _last(items: list[Any]) -> Optional:
    return some(items[-1]) if items else NONE


@implement("optional.unwrap", list)
def _unwrap(items: list[Any]) -> list[Any]:
    for item in items:
        if type(item) is not Optional:
            raise no_overload_for("optional.unwrap", items)
    return [item.value for item in items if item.present]


implement("unwrapOpt", list)(_unwrap)


@implement("cel.@mapInsert", dict, object, object)
def map_insert(mapping: dict[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    """Give the map with one more entry.

    Raises:
        Failure: the key is there already.
    """
    encoded = encode_key(key)
    if encoded in mapping:
        raise Failure("duplicate_key", f"insert failed: key {key} already exists")
    return {**mapping, encoded: value}


@implement("cel.@mapInsert", dict, dict)
def map_merge(mapping: dict[Any, Any], more: dict[Any, Any]) -> dict[Any, Any]:
    """Give both maps in one.

    Raises:
        Failure: a key is in both.
    """
    for key in more:
        if key in mapping:
            raise Failure("duplicate_key", f"insert failed: key {key} already exists")
    return {**mapping, **more}
