"""Sets of field paths, and the operations of server-side apply on values: what a value sets, how two differ, merging.

A path is a tuple of elements as `fieldsV1` writes them: `f:name` for a field, `k:{"key":"value"}` for an item of a
keyed list, `v:"value"` for an item of a set. Pure. Source: sigs.k8s.io/structured-merge-diff.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.schema import ANY, Type

Json = dict[str, Any]
Path = tuple[str, ...]
Paths = frozenset[Path]


class ShapeError(Exception):
    """A value does not have the shape its schema asks for; the text starts with the field's path."""


def to_json(paths: Paths) -> Json:
    """Give a set in the form of `fieldsV1`."""
    root: Json = {}
    for path in sorted(paths, key=lambda p: [_order(e) for e in p]):
        node = root
        for element in path:
            node = node.setdefault(element, {})
        node["."] = {}
    return _tidy(root)


def _order(element: str) -> tuple[int, str]:
    return ({"f": 0, "k": 1, "v": 2}.get(element[:1], 3), element)


def _tidy(node: Json) -> Json:
    if set(node) == {"."}:
        return {}
    return {
        key: (value if key == "." else _tidy(value))
        for key, value in sorted(node.items(), key=lambda i: i[0])
    }


def from_json(fields: Json) -> Paths:
    """Read a set from the form of `fieldsV1`."""
    found: set[Path] = set()

    def walk(node: Json, path: Path) -> None:
        for key, value in node.items():
            if key == ".":
                found.add(path)
            elif not value:
                found.add((*path, key))
            else:
                walk(value, (*path, key))

    walk(fields, ())
    return frozenset(found)


def show(path: Path) -> str:
    """Give a path as messages write it: `.spec.items[name="a"].value`."""
    text = ""
    for element in path:
        kind, rest = element[:1], element[2:]
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            pairs = ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(rest).items())
            text += f"[{pairs}]"
        else:
            text += f"[={rest}]"
    return text


def child_type(shape: Type, name: str) -> Type:
    """Give the type of a field of a struct or map."""
    if shape.kind == "struct":
        known = shape.struct().fields.get(name)
        return known.type if known else ANY
    return shape.elem if shape.kind == "map" and shape.elem is not None else ANY


def is_granular_map(shape: Type, value: Any) -> bool:
    """Whether a value is a map whose fields have owners of their own."""
    if not isinstance(value, dict):
        return False
    if shape.kind == "struct":
        return not shape.struct().atomic
    if shape.kind == "map":
        return not shape.atomic
    return shape.kind == "deduced"


def is_associative(shape: Type, value: Any) -> bool:
    """Whether a value is a list whose items have owners of their own."""
    return isinstance(value, list) and shape.kind == "list" and shape.list_type in {"set", "map"}


def item_element(shape: Type, item: Any) -> str:
    """Give the path element of a list item.

    Raises:
        ShapeError: a keyed item is no object or lacks its keys.
    """
    if shape.list_type == "set":
        return "v:" + json.dumps(item, separators=(",", ":"))
    if not isinstance(item, dict):
        raise ShapeError(": element: associative list with keys may not have non-map elements")
    keys = {key: item[key] for key in sorted(shape.keys) if item.get(key) is not None}
    defaults = {"protocol": "TCP"}
    for key in shape.keys:
        if key not in keys and key in defaults:
            keys[key] = defaults[key]
    keys = dict(sorted(keys.items()))
    if not keys:
        listed = ", ".join(f'"{key}"' for key in shape.keys)
        raise ShapeError(
            f": element: associative list with keys has an element that omits key field {listed}"
        )
    return "k:" + json.dumps(keys, separators=(",", ":"))


def items_of(shape: Type, value: list[Any]) -> dict[str, Any]:
    """Give the items of an associative list by their path elements; of doubles the last."""
    return {item_element(shape, item): item for item in value}


def field_set(value: Any, shape: Type) -> Paths:
    """Give the paths that an applied configuration sets.

    Raises:
        ShapeError: as `item_element`.
    """
    found: set[Path] = set()
    _collect(value, shape, (), found)
    return frozenset(found)


def _collect(value: Any, shape: Type, path: Path, found: set[Path]) -> None:
    if is_granular_map(shape, value) and value:
        for key, item in value.items():
            _collect(item, child_type(shape, key), (*path, f"f:{key}"), found)
    elif is_associative(shape, value) and value:
        for item in value:
            where = (*path, item_element(shape, item))
            found.add(where)
            if isinstance(item, dict):
                _collect(item, shape.elem or ANY, where, found)
    elif path:
        found.add(path)


@dataclass(slots=True)
class Difference:
    """How one value differs from another: paths that came, went, or have another content."""

    added: set[Path] = field(default_factory=set)
    removed: set[Path] = field(default_factory=set)
    modified: set[Path] = field(default_factory=set)

    @property
    def changed(self) -> set[Path]:
        """Paths that came or have another content."""
        return self.added | self.modified


def compare(old: Any, new: Any, shape: Type) -> Difference:
    """Give how `new` differs from `old`."""
    result = Difference()
    _compare(old, new, shape, (), result)
    return result


def _compare(old: Any, new: Any, shape: Type, path: Path, result: Difference) -> None:
    if old is None and new is None:
        return
    probe = new if new is not None else old
    if is_granular_map(shape, probe):
        left, right = _as_dict(old), _as_dict(new)
        _note(old, new, path, result, leaf=not left and not right)
        for key in [*left, *(k for k in right if k not in left)]:
            _compare(left.get(key), right.get(key), child_type(shape, key), (*path, f"f:{key}"), result)
        return
    if is_associative(shape, probe):
        left, right = items_of(shape, old or []), items_of(shape, new or [])
        _note(old, new, path, result, leaf=not left and not right)
        for element in [*left, *(e for e in right if e not in left)]:
            where = (*path, element)
            one, other = left.get(element), right.get(element)
            if isinstance(one, dict) or isinstance(other, dict):
                _compare(one, other, shape.elem or ANY, where, result)
            elif one is None:
                result.added.add(where)
            elif other is None:
                result.removed.add(where)
        return
    _note(old, new, path, result, leaf=True)


def _note(old: Any, new: Any, path: Path, result: Difference, *, leaf: bool) -> None:
    if not path:
        return
    if old is None:
        result.added.add(path)
    elif new is None:
        result.removed.add(path)
    elif leaf and old != new:
        result.modified.add(path)


def _as_dict(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def merge(live: Any, config: Any, shape: Type) -> Any:
    """Lay an applied configuration over a live value.

    Raises:
        ShapeError: as `item_element`.
    """
    if config is None:
        return live
    if is_granular_map(shape, config):
        result = dict(_as_dict(live))
        for key, item in config.items():
            result[key] = merge(result.get(key), item, child_type(shape, key))
        return result
    if is_associative(shape, config):
        return _merge_items(live if isinstance(live, list) else [], config, shape)
    return config


def _merge_items(live: list[Any], config: list[Any], shape: Type) -> list[Any]:
    left = [(item_element(shape, item), item) for item in live]
    right = [(item_element(shape, item), item) for item in config]
    wanted, present = dict(right), dict(left)
    seen: set[str] = set()
    for element, _ in right:
        if element in seen:
            raise ShapeError(f": duplicate entries for key [{show((element,))[1:-1]}]")
        seen.add(element)
    merged: list[Any] = []
    emitted: set[str] = set()
    position = 0
    for element, item in right:
        while position < len(left) and (left[position][0] not in wanted or left[position][0] in emitted):
            if left[position][0] not in emitted:
                merged.append(left[position][1])
            position += 1
        merged.append(merge(present.get(element), item, shape.elem or ANY))
        emitted.add(element)
        if position < len(left) and left[position][0] == element:
            position += 1
    merged += [item for element, item in left[position:] if element not in wanted and element not in emitted]
    return merged


def remove(value: Any, gone: set[Path], shape: Type, path: Path = ()) -> Any:
    """Give a value without the given paths; a list item that is named goes with all it holds."""
    if is_granular_map(shape, value):
        result: Json = {}
        for key, item in value.items():
            where = (*path, f"f:{key}")
            kind = child_type(shape, key)
            if where in gone and not is_granular_map(kind, item) and not is_associative(kind, item):
                continue
            kept = remove(item, gone, kind, where)
            if where in gone and not kept:
                continue
            result[key] = kept
        return result
    if is_associative(shape, value):
        left: list[Any] = []
        for item in value:
            where = (*path, item_element(shape, item))
            if where not in gone:
                left.append(remove(item, gone, shape.elem or ANY, where) if isinstance(item, dict) else item)
        return left
    return value
