"""Dumps on disk to a Cluster: what `kubectl get … -o yaml` or `-o json` wrote, lists, several documents a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dra.api.rules.decode import DecodeError, Findings, decode, whole_characters
from dra.api.rules.schema import Type, load_struct
from dra.diagnose.explain.cluster import KINDS, Cluster, Collection
from dra.diagnose.texts import UnreadableText, files_in, no_number, number_error, read_text
from dra.diagnose.validate_types import type_error
from dra.diagnose.yaml_scalars import json_float, kubectl_loader
from dra.diagnose.yaml_text import YamlError, described, documents
from dra.errors import ConfigError

# Far more than any cluster has; aliases of YAML make a short file endless.
_MAX_OBJECTS = 1_000_000
_MAX_LISTS = 8


def read_files(paths: Sequence[str]) -> Cluster:
    """Read files, folders (their .yaml, .yml and .json files) and `-` (standard input).

    A kind of which no object was found counts as not read: an empty list does not say what it is a list of.

    Raises:
        ConfigError: DRA-DUMP-UNREADABLE, DRA-DUMP-FORMAT.
    """
    collection = Collection()
    for path in paths:
        for name, text in _texts(path):
            for document in _documents(name, text):
                for obj in _objects(name, document):
                    collection.add(_typed(name, obj))
    unread = {kind: "not in the files" for kind in KINDS if not collection.objects[kind]}
    return Cluster(collection.objects, unread, collection.version)


def _texts(path: str) -> Iterator[tuple[str, str]]:
    files, failed = [Path(path)], list[tuple[str, str]]()
    if path != "-" and Path(path).is_dir():
        files, failed = files_in(Path(path), below=False)
    for folder, why in failed:
        raise _unreadable(folder, why)
    for file in files:
        try:
            yield "standard input" if path == "-" else str(file), read_text(str(file))
        except UnreadableText as error:
            raise _unreadable(file, error) from error


def _unreadable(path: object, why: object) -> ConfigError:
    return ConfigError(
        "DRA-DUMP-UNREADABLE",
        f"cannot read {path}: {why}",
        remedy="Name files that kubectl get … -o yaml or -o json wrote.",
    )


def _documents(name: str, text: str) -> Iterator[dict[str, Any]]:
    for document in _values(name, text):
        if document is None:
            continue
        if not isinstance(document, dict):
            raise _bad(name, f"a document is {type(document).__name__}, not an object")
        if isinstance(document.get("items"), list) and "kind" not in document:
            # kubectl writes the kind of a list after its items.
            raise _bad(name, "it ends before its end: the kind of the list is missing")
        yield document


def _objects(name: str, document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the objects of a document, of lists in lists too, each with the kind and version that its list says it has."""
    waiting: list[tuple[Any, str, str, int]] = [(document, "", "", 0)]
    for _ in range(_MAX_OBJECTS):
        if not waiting:
            return
        obj, kind, version, depth = waiting.pop()
        if not isinstance(obj, Mapping):
            continue
        kind = str(obj.get("kind") or kind)
        version = str(obj.get("apiVersion") or version)
        items = obj.get("items")
        if not isinstance(items, list):
            yield {**obj, "kind": kind, "apiVersion": version}
            continue
        if depth == _MAX_LISTS:
            raise _bad(name, "it nests too deeply")
        rest = _MAX_OBJECTS - len(waiting)
        waiting += [(item, kind.removesuffix("List"), version, depth + 1) for item in reversed(items[:rest])]
    raise _bad(name, f"it has more than {_MAX_OBJECTS} objects")


class _WrongTypeError(DecodeError):
    """Names the field."""


class _Strict(Findings):
    """A value of a wrong type ends it; a field of a newer Kubernetes does not."""

    def mismatch(self, path: str, value: Any, shape: Type, error: DecodeError) -> Any:
        if isinstance(error, _WrongTypeError):
            raise error
        raise _WrongTypeError(f"{path.rstrip('.')} {type_error(value, shape)}")


def _typed(name: str, obj: dict[str, Any]) -> dict[str, Any]:
    """Give the object with the types that the API server gives it: what reads it need not doubt them.

    Raises:
        ConfigError: DRA-DUMP-FORMAT, which names object and field.
    """
    kind = obj["kind"]
    if kind not in KINDS:
        return obj
    group, _, version = obj["apiVersion"].rpartition("/")
    module = f"{group.partition('.')[0] or 'core'}_{version or 'v1'}"
    try:
        load_struct(f"{module}.{kind}")
    except (KeyError, OSError):
        # A version that came later, or one that is gone: nearest to the newest known.
        module = "resource_v1" if kind.startswith(("Resource", "Device")) else "core_v1"
    try:
        return {**decode(obj, f"{module}.{kind}", _Strict()), "kind": kind, "apiVersion": obj["apiVersion"]}
    except DecodeError as error:
        metadata = obj.get("metadata")
        who = metadata.get("name") if isinstance(metadata, Mapping) else None
        raise _bad(name, f"{kind} {who or 'without a name'}: {error}") from error


def _values(name: str, text: str) -> Iterator[Any]:
    """Read JSON or YAML. A mapping in braces without quotes is YAML that looks like JSON."""
    if text.lstrip()[:1] != "{":
        yield from _yaml(name, text)
        return
    try:
        found = list(_json(name, text))
    except ConfigError as not_json:
        try:
            found = list(_yaml(name, text))
        except ConfigError:
            raise not_json from None  # it is neither: the message about JSON is the better one
    yield from found


def _json(name: str, text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_constant=no_number, parse_float=json_float)
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        try:
            document, end = decoder.raw_decode(text, position)
            document = whole_characters(document, text[position:end])
        except ValueError as error:
            raise _bad(name, number_error(error)) from error
        except RecursionError as error:
            raise _bad(name, "it nests too deeply") from error
        position = end
        yield document


def _yaml(name: str, text: str) -> Iterator[Any]:
    import yaml

    for document in documents(text, kubectl_loader()):
        if isinstance(document, YamlError):
            raise _bad(name, f"line {document.line}: {document.message}", document.remedy)
        try:
            value = document.loader.construct_document(document.root)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            message, line = described(error, text)
            raise _bad(name, f"line {line}: {message}") from error
        yield value


def _bad(name: str, why: str, remedy: str = "") -> ConfigError:
    return ConfigError(
        "DRA-DUMP-FORMAT",
        f"{name} is not a dump of Kubernetes objects: {why}",
        remedy=remedy or "Write it with kubectl get … -o yaml or -o json.",
    )
