"""Dumps on disk to a Cluster: what `kubectl get … -o yaml` or `-o json` wrote, lists, several documents a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dra.diagnose.explain.cluster import KINDS, Cluster, Collection
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
    if path == "-":
        yield "standard input", sys.stdin.read()
        return
    place = Path(path)
    files = [place]
    if place.is_dir():
        files = sorted(item for item in place.iterdir() if item.suffix in _SUFFIXES)
    for file in files:
        try:
            yield str(file), file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ConfigError(
                "DRA-DUMP-UNREADABLE",
                f"cannot read {file}: {reason}",
                remedy="Name files that kubectl get … -o yaml or -o json wrote.",
            ) from error


def _documents(name: str, text: str) -> Iterator[dict[str, Any]]:
    load = _json if text.lstrip()[:1] == "{" else _yaml
    for document in load(name, text):
        if document is None:
            continue
        if not isinstance(document, dict):
            raise _bad(name, f"a document is {type(document).__name__}, not an object")
        yield document


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
    except yaml.YAMLError as error:
        raise _bad(name, str(error)) from error


def _bad(name: str, why: str) -> ConfigError:
    return ConfigError(
        "DRA-DUMP-FORMAT",
        f"{name} is not a dump of Kubernetes objects: {why}",
        remedy="Write it with kubectl get … -o yaml or -o json.",
    )
