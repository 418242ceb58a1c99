"""Objects that kubectl sends as protobuf although the server answers in JSON: `kubectl create deployment`, `kubectl auth`,
evictions.

The types come from the schemas, the numbers of the fields from `protobuf_fields.txt`. A few kinds that have no schema stand here.
Source: the generated.proto files of the Kubernetes API, an envelope of four bytes (k8s, zero) and runtime.Unknown.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from dra.api.rules.schema import Type, load_struct
from dra.sim.apiserver.status import ApiFailure

Json = dict[str, Any]
_DELETE = {
    "gracePeriodSeconds": (1, "int64"), "preconditions": (2, "Preconditions"), "orphanDependents": (3, "bool"),
    "propagationPolicy": (4, "string"), "dryRun": (5, "[]string"),
}  # fmt: skip
# Messages without a schema: field -> number and type, in the words of the schemas.
_OWN: dict[str, dict[str, tuple[int, str]]] = {
    "Unknown": {"typeMeta": (1, "TypeMeta"), "raw": (2, "raw")},
    "TypeMeta": {"apiVersion": (1, "string"), "kind": (2, "string")},
    "DeleteOptions": _DELETE,
    "Preconditions": {"uid": (1, "string"), "resourceVersion": (2, "string")},
    "Eviction": {"metadata": (1, "meta_v1.ObjectMeta"), "deleteOptions": (2, "DeleteOptions")},
    "SelfSubjectReview": {"metadata": (1, "meta_v1.ObjectMeta")},
    "Binding": {"metadata": (1, "meta_v1.ObjectMeta"), "target": (2, "core_v1.ObjectReference")},
}


# What reading a message that is cut or garbled can end with: a number where text was due, and so on.
_BROKEN = (
    IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error, ValueError, OverflowError, OSError,
    RecursionError,
)  # fmt: skip


class Field(NamedTuple):
    """A field of a message; `zero_is_unset`: a zero was not set by anybody."""

    name: str
    type: Type
    zero_is_unset: bool


class Message(NamedTuple):
    """The fields of a message by number; `inner` are messages whose fields belong to this one."""

    fields: dict[int, Field]
    inner: dict[int, Message]


class Unreadable(Exception):  # noqa: N818
    """There is no table for a kind."""


def decode_object(body: bytes) -> Json:
    """Give the object in a protobuf body.

    Raises:
        ApiFailure: 415, the kind is not one of those that are understood; 400 for broken content.
    """
    try:
        envelope = _message(body[4:], _own("Unknown"))
        about = envelope["typeMeta"]
        kind = about["kind"]
        message = _own(kind) if kind in _OWN else _of_schema(_ref(about.get("apiVersion") or "", kind))
        return {**about, **_message(envelope.get("raw", b""), message)}
    except Unreadable as error:
        text = f"the simulated server does not read {error} as protobuf; send application/json"
        raise ApiFailure(415, "UnsupportedMediaType", text) from error
    except _BROKEN as error:
        raise ApiFailure(400, "BadRequest", "the protobuf body cannot be read") from error


def _ref(version: str, kind: str) -> str:
    group, _, short = version.rpartition("/")
    return f"{(group or 'core').partition('.')[0]}_{short}.{kind}"


@cache
def _numbers() -> dict[str, dict[str, tuple[tuple[int, ...], bool]]]:
    """Give the numbers of each struct's fields (outer message first), and whether zeros are unset."""
    text = (resources.files("dra.sim.apiserver") / "protobuf_fields.txt").read_text(encoding="utf-8")
    found: dict[str, dict[str, tuple[tuple[int, ...], bool]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        ref, *fields = line.split(" ")
        entry = found[ref] = {}
        for field in fields:
            name, _, path = field.partition("=")
            entry[name] = (tuple(map(int, path.rstrip("~").split("."))), path.endswith("~"))
    return found


@cache
def _of_schema(ref: str) -> Message:
    numbers = _numbers().get(ref)
    if numbers is None:
        raise Unreadable(ref.rpartition(".")[2])
    shape = load_struct(ref)
    whole = Message({}, {})
    for name, (path, zero) in numbers.items():
        at = whole
        for outer in path[:-1]:
            at = at.inner.setdefault(outer, Message({}, {}))
        at.fields[path[-1]] = Field(name, shape.fields[name].type, zero)
    return whole


@cache
def _own(kind: str) -> Message:
    fields = {}
    for name, (number, text) in _OWN[kind].items():
        shape = Type("list", elem=Type(text[2:])) if text.startswith("[]") else Type(text)
        if text[:1].isupper() or "." in text:
            shape = Type("struct", ref=text)
        fields[number] = Field(name, shape, zero_is_unset=False)
    return Message(fields, {})


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _fields(data: bytes) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            found.append((tag >> 3, value))
        elif kind == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise IndexError
            found.append((tag >> 3, data[at : at + size]))
            at += size
        else:
            size = 8 if kind == 1 else 4
            found.append((tag >> 3, data[at : at + size]))
            at += size
    return found


def _message(data: bytes, message: Message) -> Json:
    result: Json = {}
    for number, raw in _fields(data):
        if number in message.inner:
            result.update(_message(raw, message.inner[number]))
            continue
        known = message.fields.get(number)
        if known is None:
            continue
        shape = known.type
        if shape.kind == "map" and shape.elem is not None:
            entry = dict(_fields(raw))
            key = entry.get(1, b"").decode()
            result.setdefault(known.name, {})[key] = _value(entry.get(2, _zero(shape.elem)), shape.elem)
        elif shape.kind == "list" and shape.elem is not None:
            result.setdefault(known.name, []).append(_value(raw, shape.elem))
        else:
            value = _value(raw, shape)
            if value not in ("", None) and not (known.zero_is_unset and not value):
                result[known.name] = value
    return result


def _zero(shape: Type) -> Any:
    return 0 if shape.kind in {"bool", "int32", "int64"} else b"\0" * 8 if shape.kind == "float" else b""


def _value(raw: Any, shape: Type) -> Any:
    match shape.kind:
        case "string":
            return raw.decode()
        case "raw":
            return raw
        case "bytes":
            return b64encode(raw).decode()
        case "bool":
            return bool(raw)
        case "int32" | "int64":
            return raw - (1 << 64) if raw >= 1 << 63 else raw
        case "float":
            return struct.unpack("<d", raw)[0]
        case "quantity":
            return dict(_fields(raw)).get(1, b"").decode()
        case "time" | "microtime":
            return _time(dict(_fields(raw)), micro=shape.kind == "microtime")
        case "intstr":
            parts = dict(_fields(raw))
            return parts.get(3, b"").decode() if parts.get(1) else _value(parts.get(2, 0), Type("int32"))
        case "any":
            inner = dict(_fields(raw)).get(1, b"")
            return json.loads(inner) if inner else None
        case "list":
            # A list inside a map is a message of its own.
            assert shape.elem is not None
            return [_value(item, shape.elem) for number, item in _fields(raw) if number == 1]
    return _message(raw, _own(shape.ref) if shape.ref in _OWN else _of_schema(shape.ref))


def _time(parts: dict[int, Any], *, micro: bool) -> str | None:
    if not parts:
        return None
    seconds = _value(parts.get(1, 0), Type("int64"))
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=parts.get(2, 0) // 1000)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
