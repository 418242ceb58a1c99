"""Dumps on disk to a Cluster: what `kubectl get … -o yaml` or `-o json` wrote, lists, several documents a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dra.diagnose.explain.cluster import KINDS, Cluster, Collection
from dra.diagnose.texts import UnreadableText, read_text
from dra.errors import ConfigError

_SUFFIXES = {".yaml", ".yml", ".json"}


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
                collection.add(document)
    unread = {kind: "not in the files" for kind in KINDS if not collection.objects[kind]}
    return Cluster(collection.objects, unread, collection.version)


def _texts(path: str) -> Iterator[tuple[str, str]]:
    place = Path(path)
    files = [place]
    if path != "-" and place.is_dir():
        files = sorted(item for item in place.iterdir() if item.suffix in _SUFFIXES)
    for file in files:
        try:
            yield "standard input" if path == "-" else str(file), read_text(str(file))
        except UnreadableText as error:
            raise ConfigError(
                "DRA-DUMP-UNREADABLE",
                f"cannot read {file}: {error}",
                remedy="Name files that kubectl get … -o yaml or -o json wrote.",
            ) from error


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
    decoder = json.JSONDecoder()
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        try:
            document, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise _bad(name, str(error)) from error
        except RecursionError as error:
            raise _bad(name, "it nests too deeply") from error
        yield document


def _yaml(name: str, text: str) -> Iterator[Any]:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        """Times stay text, as in JSON."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            letter: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
            for letter, pairs in base.yaml_implicit_resolvers.items()
        }

    try:
        yield from yaml.load_all(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise _bad(name, " ".join(str(error).split())) from error
    except RecursionError as error:
        raise _bad(name, "it nests too deeply") from error


def _bad(name: str, why: str) -> ConfigError:
    return ConfigError(
        "DRA-DUMP-FORMAT",
        f"{name} is not a dump of Kubernetes objects: {why}",
        remedy="Write it with kubectl get … -o yaml or -o json.",
    )
