"""Manifests in files: what stands in them, and in which line. YAML (several documents), JSON, lists, folders, `-`."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dra.api.rules.decode import Pairs
from dra.diagnose.texts import UnreadableText, read_text
from dra.diagnose.validate_model import Finding

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
# Aliases can make a small file huge.
MAX_NODES = 1_000_000
_OCTAL = re.compile(r"[-+]?0o[0-7]+", re.ASCII)


@dataclass(slots=True)
class Spot:
    """Where a value stands: its line (that of its key), and what lies in it.

    `text_line` is the line of the first line of a literal block, 0 for any other value.
    """

    line: int
    text_line: int = 0
    children: dict[str | int, Spot] = field(default_factory=dict)

    def find(self, path: str) -> tuple[Spot, bool]:
        """Give the deepest spot on a path such as `spec.devices.requests[0].name`, and whether it is the end of it.

        Keys stand as they are or in brackets. `exactly`, which v1beta1 does not have, may be missing.
        """
        spot, rest = self, path
        while rest := rest.removeprefix("."):
            step = max((form for form in spot._forms() if _starts(rest, form)), key=len, default=None)
            if step is not None:
                spot, rest = spot._forms()[step], rest[len(step) :]
            elif _starts(rest, "exactly"):
                rest = rest.removeprefix("exactly")
            else:
                return spot, False
        return spot, True

    def _forms(self) -> dict[str, Spot]:
        forms = {f"[{key}]": child for key, child in self.children.items()}
        return forms | {key: child for key, child in self.children.items() if isinstance(key, str)}


def _starts(text: str, step: str) -> bool:
    return text.startswith(step) and (len(text) == len(step) or text[len(step)] in ".[")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object of a file."""

    file: str
    value: dict[str, Any]
    spot: Spot


def manifest_of(value: dict[str, Any], file: str = "") -> Manifest:
    """Give an object that does not come from a file, such as one under admission: all of it is in line 0."""
    return Manifest(file, value, _spot_of(value))


def _spot_of(value: Any) -> Spot:
    if isinstance(value, dict):
        return Spot(0, 0, {key: _spot_of(item) for key, item in value.items()})
    if isinstance(value, list):
        return Spot(0, 0, {index: _spot_of(item) for index, item in enumerate(value)})
    return Spot(0)


def read_manifests(paths: Iterable[str]) -> tuple[list[Manifest], list[Finding], list[str]]:
    """Give all objects of files, folders (and the folders in them) and `-`; what could not be read; the files' names."""
    manifests: list[Manifest] = []
    findings: list[Finding] = []
    names: list[str] = []
    for path in paths:
        for file in _files(path):
            name = "standard input" if path == "-" else str(file)
            names.append(name)
            try:
                text = read_text(str(file))
            except UnreadableText as error:
                findings.append(_unreadable(name, f"cannot read it: {error}"))
                continue
            for item in _documents(name, text):
                for each in (item,) if isinstance(item, Finding) else _expand(item):
                    (findings if isinstance(each, Finding) else manifests).append(each)  # type: ignore[arg-type]
        if not names and Path(path).is_dir():
            findings.append(_unreadable(path, f"the folder holds no {', '.join(sorted(SUFFIXES))} file"))
    return manifests, findings, names


def _unreadable(name: str, why: str) -> Finding:
    return Finding(name, 1, "error", "DRA-MANIFEST-UNREADABLE", why)


def _files(path: str) -> list[Path]:
    place = Path(path)
    if path == "-" or not place.is_dir():
        return [place]
    return sorted(
        item
        for item in place.rglob("*")
        if item.suffix in SUFFIXES
        and item.is_file()
        and not any(part.startswith(".") for part in item.relative_to(place).parts)
    )


def _documents(name: str, text: str) -> Iterator[Manifest | Finding]:
    try:
        for value, spot in _values(text):
            if value is None:
                continue
            if isinstance(value, dict):
                yield Manifest(name, value, spot)
            else:
                yield Finding(
                    name,
                    spot.line,
                    "error",
                    "DRA-MANIFEST-KIND",
                    "a document is no object with apiVersion and kind",
                )
    except _SyntaxError as error:
        remedy = "Write YAML or JSON."
        if "{{" in text:
            remedy = "Templates must be rendered first: helm template … | dra validate -"
        yield Finding(name, error.line, "error", "DRA-MANIFEST-SYNTAX", error.args[0], remedy=remedy)


def _values(text: str) -> Iterator[tuple[Any, Spot]]:
    """Read JSON or YAML. A mapping in braces without quotes is YAML that looks like JSON."""
    if text.lstrip()[:1] not in {"{", "["}:
        yield from _yaml(text)
        return
    try:
        found = list(_json(text))
    except _SyntaxError as not_json:
        try:
            found = list(_yaml(text))
        except _SyntaxError:
            raise not_json from None  # it is neither: the message about JSON is the better one
    yield from found


class _SyntaxError(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def _json(text: str) -> Iterator[tuple[Any, Spot]]:
    """Read one JSON value after the other. Lines come from YAML's reader, which reads JSON too."""
    decoder = json.JSONDecoder(object_pairs_hook=_pairs)
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        first = text.count("\n", 0, position)
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _SyntaxError(f"{error.msg} at column {error.colno}", error.lineno) from error
        except RecursionError as error:
            raise _SyntaxError("it nests too deeply", first + 1) from error
        spot = Spot(first + 1)
        # The value is good even where only its lines cannot be told. A tab is white space in JSON, not so in YAML.
        with contextlib.suppress(_SyntaxError):
            spot = next((found for _, found in _yaml(text[position:end].replace("\t", " "), first)), spot)
        yield value, spot
        position = end


def _pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    result = Pairs(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        result.duplicates = tuple(key for place, key in enumerate(keys) if key in keys[:place])
    return result


def _yaml(text: str, lines_before: int = 0) -> Iterator[tuple[Any, Spot]]:
    import yaml

    loader_class: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader = loader_class(text)
    try:
        builder = _Builder(loader, lines_before)
        while loader.check_node():
            node = loader.get_node()
            yield builder.build(node, node.start_mark.line)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise _SyntaxError(
            f"{error.problem or error.context or 'it is not YAML'}", line + lines_before
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise _SyntaxError(" ".join(str(error).split()), 1 + lines_before) from error
    except RecursionError as error:
        raise _SyntaxError("it nests too deeply", 1 + lines_before) from error
    finally:
        loader.dispose()


class _Builder:
    """Makes JSON values of YAML nodes as kubectl does: times stay text, keys become text, later keys win."""

    def __init__(self, loader: Any, lines_before: int) -> None:
        self._loader = loader
        self._before = lines_before
        self._left = MAX_NODES

    def build(self, node: Any, line: int) -> tuple[Any, Spot]:
        self._left -= 1
        if self._left < 0:
            raise _SyntaxError(f"it has more than {MAX_NODES} values", line + 1)
        spot = Spot(line + 1 + self._before)
        match node.id:
            case "mapping":
                return self._mapping(node, spot), spot
            case "sequence":
                items = []
                for index, item in enumerate(node.value):
                    value, spot.children[index] = self.build(item, item.start_mark.line)
                    items.append(value)
                return items, spot
        if node.style == "|":
            spot.text_line = node.start_mark.line + 2 + self._before
        return self._scalar(node), spot

    def _mapping(self, node: Any, spot: Spot) -> Pairs:
        written = [self._key(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        self._loader.flatten_mapping(node)
        result = Pairs()
        for key, item in node.value:
            name = self._key(key)
            value, child = self.build(item, key.start_mark.line)
            # Merged keys come first, so that what is written here wins.
            result[name], spot.children[name] = value, child
        result.duplicates = tuple(key for place, key in enumerate(written) if key in written[:place])
        return result

    def _key(self, node: Any) -> str:
        if node.id != "scalar":
            raise _SyntaxError("a key is no text", node.start_mark.line + 1 + self._before)
        if node.tag.endswith(":bool"):
            return "true" if self._loader.construct_yaml_bool(node) else "false"
        return str(node.value)

    def _scalar(self, node: Any) -> Any:
        kind, text = node.tag.rpartition(":")[2], node.value
        if kind == "null":
            return None
        if kind == "bool":
            return self._loader.construct_yaml_bool(node)
        if kind in {"int", "float"} and ":" not in text:
            number = (
                self._loader.construct_yaml_int(node)
                if kind == "int"
                else self._loader.construct_yaml_float(node)
            )
            return number if math.isfinite(number) else text
        if kind == "str" and not node.style and _OCTAL.fullmatch(text):
            return int(text.replace("0o", ""), 8)
        return text


def _expand(manifest: Manifest) -> Iterator[Manifest | Finding]:
    """Give the items of a list, or the object itself; a finding for what is neither."""
    value = manifest.value
    kind, items = value.get("kind"), value.get("items")
    if not isinstance(kind, str) or not kind.endswith("List") or "items" not in value:
        yield manifest
        return
    if not isinstance(items, list):
        line = manifest.spot.children["items"].line
        if items is not None:
            yield Finding(
                manifest.file, line, "error", "DRA-MANIFEST-KIND", "the items of a list are no list"
            )
        return
    place = manifest.spot.children.get("items", manifest.spot)
    for index, item in enumerate(items):
        if isinstance(item, dict):
            # Items of a typed list need not repeat what they are.
            if kind != "List" and "kind" not in item:
                item.update({"apiVersion": value.get("apiVersion"), "kind": kind.removesuffix("List")})
            yield from _expand(Manifest(manifest.file, item, place.children.get(index, place)))
        else:
            line = place.children.get(index, place).line
            why = f"item {index} of a list is no object with apiVersion and kind"
            yield Finding(manifest.file, line, "error", "DRA-MANIFEST-KIND", why)
