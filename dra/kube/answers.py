"""Whether what came with a 200 is what was asked for.

A proxy, a login page or another program behind the address also answers with JSON. Taken at its word, an empty
list means that everything was deleted, and an object without a UID that it was made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra.api.versions import GROUP, to_v1
from dra.errors import KubeError
from dra.kube.failures import Call
from dra.kube.resources import Resource

Json = dict[str, Any]
_REMEDY = "Check that the address is that of a Kubernetes API server and that no proxy answers in its place."


def bad_answer(call: Call, text: str) -> KubeError:
    """Give the error for an answer that is not what was asked for; trying again can help."""
    return KubeError(
        "DRA-API-BAD-ANSWER",
        f"{call}: {text}",
        remedy=_REMEDY,
        status=200,
        verb=call.verb,
        resource=call.resource,
        name=call.name,
    )


def checked_object(call: Call, resource: Resource, document: object, *, version: str) -> Json:
    """Give one object in the shape of v1.

    Raises:
        KubeError: DRA-API-BAD-ANSWER where it is another kind of object, another object, or none.
    """
    obj = _mapping(call, document)
    kind = obj.get("kind")
    if kind != resource.kind:
        raise bad_answer(call, f"the answer is no {resource.kind} (its kind is {kind!r})")
    return _received(call, resource, obj, version=version)


def checked_items(call: Call, resource: Resource, document: Json, *, version: str) -> list[Json]:
    """Give the items of a list in the shape of v1; the items of built-in kinds carry no kind.

    Raises:
        KubeError: DRA-API-BAD-ANSWER.
    """
    kind, items = document.get("kind"), document.get("items")
    metadata = document.get("metadata")
    if kind != f"{resource.kind}List" or not isinstance(metadata, Mapping):
        raise bad_answer(call, f"the answer is no {resource.kind}List (its kind is {kind!r})")
    # A nil slice of Go is null.
    if items is not None and not isinstance(items, list):
        raise bad_answer(call, "the items of the answer are no list")
    found = []
    for item in items or []:
        obj = _mapping(call, item)
        if obj.get("kind", resource.kind) != resource.kind:
            raise bad_answer(call, f"an item of the answer is no {resource.kind} but a {obj['kind']!r}")
        found.append(_received(call, resource, obj, version=version))
    return found


def checked_bookmark(call: Call, document: object) -> Json:
    """Give the object of a bookmark, of which only the resourceVersion counts.

    Raises:
        KubeError: DRA-API-BAD-ANSWER.
    """
    obj = _mapping(call, document)
    if not isinstance(obj.get("metadata"), Mapping):
        raise bad_answer(call, "the bookmark has no metadata")
    return obj


def check_deletion(call: Call, resource: Resource, document: Json) -> None:
    """Look at the answer to a DELETE: a Status, the object that is being deleted, or a list of them.

    Raises:
        KubeError: DRA-API-BAD-ANSWER.
    """
    kind = document.get("kind")
    if kind not in ("Status", resource.kind, f"{resource.kind}List") or document.get("status") == "Failure":
        raise bad_answer(call, f"the answer tells of no deletion (its kind is {kind!r})")


def _received(call: Call, resource: Resource, obj: Json, *, version: str) -> Json:
    group = str(obj.get("apiVersion", resource.api_version(version))).rpartition("/")[0]
    if group != resource.group:
        raise bad_answer(call, f"the answer is a {resource.kind} of the group {group!r}")
    metadata = obj.get("metadata")
    if not isinstance(metadata, Mapping):
        raise bad_answer(call, f"the {resource.kind} in the answer has no metadata")
    for key in ("name", "uid"):
        if not isinstance(metadata.get(key), str) or not metadata[key]:
            raise bad_answer(call, f"the {resource.kind} in the answer has no metadata.{key}")
    for key, asked in (("name", call.name), ("namespace", call.namespace)):
        if asked and metadata.get(key) != asked:
            raise bad_answer(call, f"the answer is the {resource.kind} of {key} {metadata.get(key)!r}")
    for key in ("spec", "status"):
        if obj.get(key) is not None and not isinstance(obj[key], Mapping):
            raise bad_answer(call, f"the {key} of the {resource.kind} in the answer is no object")
    if resource.group != GROUP:
        return obj
    try:
        return to_v1(obj, version=version, kind=resource.kind)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise bad_answer(call, f"the {resource.kind} in the answer is malformed ({error})") from error


def _mapping(call: Call, document: object) -> Json:
    if isinstance(document, dict):
        return document
    raise bad_answer(call, f"{str(document)[:80]!r} is no object")
