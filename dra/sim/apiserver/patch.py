"""JSON merge patch, JSON patch and strategic merge patch over plain JSON.

All functions give a new value and leave their arguments alone.
Source: RFC 7386, RFC 6902, and the strategic merge patch of Kubernetes (`$patch`, `$deleteFromPrimitiveList/`,
`$setElementOrder/`, `$retainKeys`).
"""

from __future__ import annotations

import copy
from typing import Any

from dra.api.rules.schema import ANY, Field, Type
from dra.sim.apiserver.status import internal, rejected_patch

Json = dict[str, Any]


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result: Json = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def _pointer(path: str) -> list[str]:
    if path == "":
        return []
    if not path.startswith("/"):
        raise rejected_patch()
    return [part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/")]


def _index(items: list[Any], token: str, *, grow: bool) -> int:
    if grow and token == "-":  # noqa: S105
        return len(items)
    if not token.lstrip("-").isdigit():
        raise rejected_patch()
    at = int(token)
    if at < 0:
        at += len(items)
    if not 0 <= at < len(items) + (1 if grow else 0):
        raise rejected_patch()
    return at


def _walk(document: Any, tokens: list[str]) -> Any:
    for token in tokens:
        if isinstance(document, dict) and token in document:
            document = document[token]
        elif isinstance(document, list):
            document = document[_index(document, token, grow=False)]
        else:
            raise rejected_patch()
    return document


def _add(document: Any, tokens: list[str], value: Any, *, replace: bool = False) -> Any:
    if not tokens:
        return value
    parent = _walk(document, tokens[:-1])
    last = tokens[-1]
    if isinstance(parent, dict):
        # The Go library lets `replace` name a key that is not there.
        parent[last] = value
    elif isinstance(parent, list):
        at = _index(parent, last, grow=not replace)
        if replace:
            parent[at] = value
        else:
            parent.insert(at, value)
    else:
        raise rejected_patch()
    return document


def _remove(document: Any, tokens: list[str]) -> Any:
    if not tokens:
        raise rejected_patch()
    parent = _walk(document, tokens[:-1])
    last = tokens[-1]
    if isinstance(parent, dict):
        if last not in parent:
            raise rejected_patch()
        return parent.pop(last)
    if isinstance(parent, list):
        return parent.pop(_index(parent, last, grow=False))
    raise rejected_patch()


def json_patch(target: Any, operations: list[Json]) -> Any:
    """Apply a JSON patch.

    Raises:
        ApiFailure: 422, an operation does not fit.
    """
    document = copy.deepcopy(target)
    for operation in operations:
        action = operation.get("op")
        if "path" not in operation:
            raise rejected_patch()
        tokens = _pointer(str(operation["path"]))
        if action in {"add", "replace"}:
            if "value" not in operation:
                raise rejected_patch()
            value = copy.deepcopy(operation["value"])
            document = _add(document, tokens, value, replace=action == "replace")
        elif action == "remove":
            _remove(document, tokens)
        elif action == "test":
            try:
                found = _walk(document, tokens)
            except Exception:
                if operation.get("value") is None:
                    continue
                raise
            if found != operation.get("value"):
                raise rejected_patch()
        elif action in {"move", "copy"}:
            source = _pointer(str(operation.get("from", "")))
            value = copy.deepcopy(_walk(document, source))
            if action == "move":
                _remove(document, source)
            document = _add(document, tokens, value)
        else:
            raise rejected_patch()
    return document


def _field_type(shape: Type, name: str) -> Type:
    if shape.kind == "struct":
        field: Field | None = shape.struct().fields.get(name)
        return field.type if field else ANY
    if shape.kind == "map" and shape.elem is not None:
        return shape.elem
    return ANY


def strategic_patch(target: Any, patch: Any, shape: Type) -> Any:
    """Apply a strategic merge patch; lists with a merge key merge by it, all others are replaced."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    directive = patch.get("$patch")
    if directive == "replace":
        return {k: copy.deepcopy(v) for k, v in patch.items() if k != "$patch"}
    if directive == "delete":
        return {}
    if directive is not None and directive != "merge":
        raise internal(f"unknown patch type: {directive} in map: {_go_map(patch)}")
    result: Json = dict(target) if isinstance(target, dict) else {}
    retained = patch.get("$retainKeys")
    if isinstance(retained, list):
        result = {k: v for k, v in result.items() if k in retained}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name) or [] if item not in value]
        if key.startswith("$"):
            continue
        child = _field_type(shape, key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = strategic_patch(result.get(key), value, child)
        elif isinstance(value, list) and child.kind == "list" and child.merge_key:
            order = patch.get(f"$setElementOrder/{key}")
            result[key] = _merge_list(result.get(key) or [], value, child, order)
        else:
            result[key] = copy.deepcopy(value)
    for key, order in patch.items():
        name = key.partition("/")[2]
        if key.startswith("$setElementOrder/") and name not in patch and isinstance(result.get(name), list):
            result[name] = _ordered(result[name], order, _field_type(shape, name).merge_key, result[name])
    return result


def _merge_list(current: list[Any], patch: list[Any], shape: Type, order: Any) -> list[Any]:
    key = shape.merge_key
    if key == "*":
        merged = list(current) + [item for item in patch if item not in current]
        return _ordered(merged, order if isinstance(order, list) else patch, key, current)
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if "$patch" not in item]
    result = list(current)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise internal(f"map: {_go_map(item)} does not contain declared merge key: {key}")
    for item in patch:
        at = next((i for i, old in enumerate(result) if old.get(key) == item.get(key)), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append({k: copy.deepcopy(v) for k, v in item.items() if not k.startswith("$")})
        else:
            result[at] = strategic_patch(result[at], item, shape.elem or ANY)
    return _ordered(result, order if isinstance(order, list) else patch, key, current)


def _go_map(item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    return f"map[{' '.join(f'{k}:{v}' for k, v in sorted(item.items()))}]"


def _ordered(items: list[Any], order: list[Any], key: str, before: list[Any]) -> list[Any]:
    """Put the items that `order` names in its order; the others keep their place relative to them where they had one."""

    def identity(item: Any) -> Any:
        return item.get(key) if isinstance(item, dict) else item

    ranks = {identity(entry): i for i, entry in enumerate(order)}
    places = {identity(entry): i for i, entry in enumerate(before)}
    named = sorted((i for i in items if identity(i) in ranks), key=lambda i: ranks[identity(i)])
    others = [i for i in items if identity(i) not in ranks]
    merged: list[Any] = []
    while named and others:
        left, right = identity(named[0]), identity(others[0])
        known = left in places and right in places
        merged.append(others.pop(0) if known and places[right] < places[left] else named.pop(0))
    return merged + named + others
