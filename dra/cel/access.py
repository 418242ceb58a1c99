"""Reading into values: fields, keys, indexes, presence, iteration.

Source: cel-go's attribute resolution: a wrong key is "no such key", a wrong index "index out of bounds"; once a step
was optional, the rest of the chain is.
"""

from __future__ import annotations

from typing import Any

from dra.cel.errors import Failure
from dra.cel.values import MISSING, NONE, Duration, Optional, Timestamp, Uint, find, keys_of, some, type_of

_GO_NAMES: dict[type, str] = {
    str: "types.String", int: "types.Int", Uint: "types.Uint", float: "types.Double", bool: "types.Bool",
    bytes: "types.Bytes", type(None): "types.Null", Duration: "types.Duration", Timestamp: "types.Timestamp",
    Optional: "*types.Optional",
}  # fmt: skip


def missing_key(key: object) -> Failure:
    """Give the failure of a key that is not there."""
    return Failure("no_such_key", f"no such key: {show_key(key)}")


def show_key(key: object) -> str:
    """Write a key as messages do."""
    if isinstance(key, bool):
        return "true" if key else "false"
    return f"{key}"


def list_index(key: Any) -> int:
    """Give a list index.

    Raises:
        Failure: it is no whole number.
    """
    kind = type(key)
    if kind is int or kind is Uint:
        return int(key)
    if kind is float:
        if key.is_integer():
            return int(key)
        raise Failure("bad_index", f"unsupported index value {key} in list")
    raise Failure("bad_index", f"unsupported index type '{type_of(key)}' in list")


def lookup(container: Any, key: Any) -> Any:
    """Give what `key` leads to in a map or list, or MISSING; other values hold nothing.

    Raises:
        Failure: the key cannot be an index.
    """
    if isinstance(container, dict):
        return find(container, key)
    if type(container) is list:
        index = list_index(key)
        return container[index] if 0 <= index < len(container) else MISSING
    return MISSING


def qualify(container: Any, key: Any) -> Any:
    """Give `container[key]` or `container.key`.

    Raises:
        Failure: no such key, index out of bounds.
    """
    if type(container) is Optional:
        return qualify_optional(container, key)
    value = lookup(container, key)
    if value is not MISSING:
        return value
    if type(container) is list:
        raise Failure("index_out_of_range", f"index out of bounds: {show_key(key)}")
    raise missing_key(key)


def qualify_optional(container: Any, key: Any) -> Optional:
    """Give `container.?key` or `container[?key]`: an optional, absent where there is nothing."""
    if type(container) is Optional:
        if not container.present:
            return NONE
        container = container.value
    value = lookup(container, key)
    return NONE if value is MISSING else some(value)


def present(container: Any, key: str) -> bool:
    """`has(container.key)`."""
    if type(container) is Optional:
        if not container.present:
            return False
        container = container.value
    return isinstance(container, dict) and find(container, key) is not MISSING


def items_of(container: Any) -> list[Any]:
    """Give what a comprehension with one variable walks: elements, or keys.

    Raises:
        Failure: not_iterable.
    """
    if type(container) is list:
        return container
    if isinstance(container, dict):
        return keys_of(container)
    raise not_iterable(container)


def pairs_of(container: Any) -> list[tuple[Any, Any]]:
    """Give what a comprehension with two variables walks: (index, element) or (key, value).

    Raises:
        Failure: not_iterable.
    """
    if type(container) is list:
        return list(enumerate(container))
    if isinstance(container, dict):
        return list(zip(keys_of(container), container.values(), strict=True))
    raise not_iterable(container)


def not_iterable(container: Any) -> Failure:
    """Give the failure of a comprehension over something that is neither list nor map."""
    name = _GO_NAMES.get(type(container), str(type_of(container)))
    return Failure("not_iterable", f"got '{name}', expected iterable type")
