"""Reading and writing well-formed objects quickly: a reader and a pruner for each shape of the tables, made once.

`decode` has to say where and how a value does not fit, and so carries its path along. Almost every object fits: for
those a reader without paths gives the same, several times faster. It gives up at the first thing that `decode` would
have something to say about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from dra.api.rules.scalars import NOTHING, DecodeError, scalar, zero_of
from dra.api.rules.schema import Field, Struct, Type, load_struct

Json = dict[str, Any]
Make = Callable[[Any], Any]


class OddError(Exception):
    """The value does not fit, or has fields that are unknown or stand there twice."""


@cache
def reader_of(ref: str) -> Make:
    """Give what reads objects of the shape `module.Kind`.

    Raises (the reader):
        OddError: `decode` has to look.
    """
    return _struct_reader(load_struct(ref))


@cache
def pruner_of(ref: str) -> Make:
    """Give what leaves the empty optional fields out of an object of the shape `module.Kind`."""
    return _struct_pruner(load_struct(ref))


# -- reading -----------------------------------------------------------------------------------------------------


def _reader(shape: Type) -> Make:
    if shape.kind == "struct":
        return reader_of(shape.ref)
    if shape.kind == "list":
        assert shape.elem is not None
        return _list_reader(_reader(shape.elem))
    if shape.kind == "map":
        assert shape.elem is not None
        return _map_reader(_reader(shape.elem))
    return _string if shape.kind == "string" else _scalar_reader(shape)


def _string(value: Any) -> Any:
    if not isinstance(value, str):
        raise OddError
    return value


def _scalar_reader(shape: Type) -> Make:
    def read(value: Any) -> Any:
        try:
            return scalar(value, shape, ("", ""))
        except DecodeError as error:
            raise OddError from error

    return read


def _object(value: Any) -> Json:
    if isinstance(value, dict) and not getattr(value, "duplicates", ()):
        return value
    raise OddError


def _list_reader(inner: Make) -> Make:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or None in value:
            raise OddError
        return [inner(item) for item in value]

    return read


def _map_reader(inner: Make) -> Make:
    def read(value: Any) -> Any:
        items = _object(value).items()
        if any(item is None for _, item in items):
            raise OddError
        return {key: inner(item) for key, item in items}

    return read


def _struct_reader(struct: Struct) -> Make:
    # Made when there is a value to read: structs hold themselves.
    readers: dict[str, Make] = {}
    filled = [(name, known) for name, known in struct.fields.items() if zero_of(known) is not NOTHING]

    def read(value: Any) -> Json:
        if not readers:
            readers.update({name: _reader(known.type) for name, known in struct.fields.items()})
        result = {}
        for key, item in _object(value).items():
            reader = readers.get(key)
            if reader is None:
                raise OddError
            if item is not None:
                result[key] = reader(item)
        for name, known in filled:
            if name not in result:
                result[name] = zero_of(known)
        return result

    return read


# -- pruning -----------------------------------------------------------------------------------------------------


def _pruner(shape: Type) -> Make | None:
    """Give what prunes values of a type, None where nothing in them can be left out."""
    if shape.kind == "struct":
        return pruner_of(shape.ref)
    if shape.elem is None:
        return None
    inner = _pruner(shape.elem)
    return None if inner is None else _items_pruner(inner)


def _items_pruner(inner: Make) -> Make:
    def prune(value: Any) -> Any:
        if isinstance(value, list):
            return [inner(item) for item in value]
        if isinstance(value, dict):
            return {key: inner(item) for key, item in value.items()}
        return value

    return prune


def _struct_pruner(struct: Struct) -> Make:
    rules: dict[str, tuple[Make | None, bool, bool, bool]] = {}

    def prune(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if not rules:
            made = {name: (_pruner(known.type), *_when_empty(known)) for name, known in struct.fields.items()}
            rules.update(made)
        result: Json = {}
        for key, item in value.items():
            rule = rules.get(key)
            if rule is None:
                result[key] = item
                continue
            inner, stays, zero_goes, is_null = rule
            kept = item if inner is None else inner(item)
            if kept:
                result[key] = kept
            elif stays or not (zero_goes or kept is None):
                result[key] = None if is_null else kept
        return result

    return prune


def _when_empty(known: Field) -> tuple[bool, bool, bool]:
    """Whether an empty field stays, whether a zero counts as empty, and whether it is written as null."""
    kind = known.type.kind
    number_or_text = kind in {"string", "bool", "int32", "int64", "float"}
    zero_goes = kind in {"list", "map", "bytes"} or (number_or_text and not known.keeps_zero)
    return known.always or known.required, zero_goes, kind in {"list", "map"}
