"""Objects that kubectl sends as protobuf although the server answers in JSON: the few kinds that `kubectl create NAME`,
`kubectl auth` and evictions use.

Source: the generated.proto files of the Kubernetes API (field numbers), an envelope of four bytes (k8s, zero) and runtime.Unknown.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from dra.sim.apiserver.status import ApiFailure

Json = dict[str, Any]
# A field's name and kind: a scalar (`s` text, `b` base64, `i` number, `t` yes or no), a message, or a map `{s}`, `{b}`;
# with `*` in front it repeats.
Fields = dict[int, tuple[str, str]]

_META: Fields = {
    1: ("name", "s"), 2: ("generateName", "s"), 3: ("namespace", "s"), 5: ("uid", "s"), 6: ("resourceVersion", "s"),
    11: ("labels", "{s}"), 12: ("annotations", "{s}"), 14: ("finalizers", "*s"),
}  # fmt: skip
_MESSAGES: dict[str, Fields] = {
    "ObjectMeta": _META,
    "Namespace": {1: ("metadata", "ObjectMeta"), 2: ("spec", "NamespaceSpec")},
    "NamespaceSpec": {1: ("finalizers", "*s")},
    "ConfigMap": {
        1: ("metadata", "ObjectMeta"), 2: ("data", "{s}"), 3: ("binaryData", "{b}"), 4: ("immutable", "t"),
    },
    "Secret": {
        1: ("metadata", "ObjectMeta"), 2: ("data", "{b}"), 3: ("type", "s"), 4: ("stringData", "{s}"),
        5: ("immutable", "t"),
    },
    "ServiceAccount": {1: ("metadata", "ObjectMeta")},
    "SelfSubjectAccessReview": {1: ("metadata", "ObjectMeta"), 2: ("spec", "AccessSpec")},
    "AccessSpec": {1: ("resourceAttributes", "ResourceAttributes"), 2: ("nonResourceAttributes", "PathAttributes")},
    "ResourceAttributes": {
        1: ("namespace", "s"), 2: ("verb", "s"), 3: ("group", "s"), 4: ("version", "s"), 5: ("resource", "s"),
        6: ("subresource", "s"), 7: ("name", "s"),
    },
    "PathAttributes": {1: ("path", "s"), 2: ("verb", "s")},
    "SelfSubjectRulesReview": {1: ("metadata", "ObjectMeta"), 2: ("spec", "RulesSpec")},
    "RulesSpec": {1: ("namespace", "s")},
    "SelfSubjectReview": {1: ("metadata", "ObjectMeta")},
    "Eviction": {1: ("metadata", "ObjectMeta"), 2: ("deleteOptions", "DeleteOptions")},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "i"), 2: ("preconditions", "Preconditions"), 3: ("orphanDependents", "t"),
        4: ("propagationPolicy", "s"), 5: ("dryRun", "*s"),
    },
    "Preconditions": {1: ("uid", "s"), 2: ("resourceVersion", "s")},
    "Unknown": {1: ("typeMeta", "TypeMeta"), 2: ("raw", "raw")},
    "TypeMeta": {1: ("apiVersion", "s"), 2: ("kind", "s")},
}  # fmt: skip


def decode_object(body: bytes) -> Json:
    """Give the object in a protobuf body.

    Raises:
        ApiFailure: 415, the kind is not one of those that are understood; 400 for broken content.
    """
    try:
        envelope = _message(body[4:], "Unknown")
        kind = envelope["typeMeta"]["kind"]
        if kind not in _MESSAGES:
            raise ApiFailure(
                415,
                "UnsupportedMediaType",
                f"the simulated server does not read {kind} as protobuf; send application/json",
            )
        return {**envelope["typeMeta"], **_message(envelope.get("raw", b""), kind)}
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ApiFailure(400, "BadRequest", "the protobuf body cannot be read") from error


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7


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
            at += 8 if kind == 1 else 4
    return found


def _message(data: bytes, name: str) -> Json:
    result: Json = {}
    for number, raw in _fields(data):
        known = _MESSAGES[name].get(number)
        if known is None:
            continue
        key, kind = known
        if kind.startswith("{"):
            entry = dict(_fields(raw))
            result.setdefault(key, {})[entry.get(1, b"").decode()] = _scalar(entry.get(2, b""), kind[1])
        elif kind.startswith("*"):
            result.setdefault(key, []).append(_scalar(raw, kind[1:]))
        else:
            value = _scalar(raw, kind)
            if value not in ("", None):
                result[key] = value
    return result


def _scalar(raw: Any, kind: str) -> Any:
    if kind == "s":
        return raw.decode()
    if kind == "b":
        return b64encode(raw).decode()
    if kind == "t":
        return bool(raw)
    if kind == "i":
        return raw - (1 << 64) if raw >= 1 << 63 else raw
    return raw if kind == "raw" else _message(raw, kind)
