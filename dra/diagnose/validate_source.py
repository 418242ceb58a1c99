"""Manifests in files: what stands in them, and in which line. YAML (several documents), JSON, lists, folders, `-`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dra.api.rules.decode import Pairs, whole_characters
from dra.diagnose.texts import SUFFIXES, UnreadableText, files_in, no_number, number_error, read_text
from dra.diagnose.validate_model import Finding
from dra.diagnose.yaml_scalars import is_true, json_float, kubectl_loader, scalar_number
from dra.diagnose.yaml_text import YamlError, described, documents

# Far more than any kind has.
MAX_DEPTH = 200
_STEP_END = re.compile(r"[.\[]")
_PAIRED = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_INDEX = re.compile(r"[0-9]{1,9}")


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
            step = spot._step(rest)
            if step is not None:
                spot, rest = step
            elif _starts(rest, "exactly"):
                rest = rest.removeprefix("exactly")
            else:
                return spot, False
        return spot, True

    def _step(self, path: str) -> tuple[Spot, str] | None:
        """Give what a path leads to first, by the longest key that fits, and the rest of the path."""
        ends = [*(match.start() for match in _STEP_END.finditer(path, 1)), len(path)]
        for end in reversed(ends):
            form = path[:end]
            key = form[1:-1] if form[0] == "[" and form[-1] == "]" else None
            child = self.children.get(form)
            if child is None and key is not None:
                child = self.children.get(key)
                if child is None and _INDEX.fullmatch(key):
                    child = self.children.get(int(key))
            if child is not None:
                return child, path[end:]
        return None


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
    return Manifest(file, value, _spot_of(value, MAX_DEPTH, 0))


def _spot_of(value: Any, depth: int, line: int) -> Spot:
    """Give the spots of a value of which all stands in one line, as far as is known."""
    if isinstance(value, dict) and depth:
        return Spot(line, 0, {key: _spot_of(item, depth - 1, line) for key, item in value.items()})
    if isinstance(value, list) and depth:
        return Spot(line, 0, {index: _spot_of(item, depth - 1, line) for index, item in enumerate(value)})
    return Spot(line)


def is_too_deep(value: Any) -> bool:
    """Tell whether values lie in each other deeper than anything that follows them is made for."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level if isinstance(outer, (dict, list)) for item in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def read_manifests(paths: Iterable[str]) -> tuple[list[Manifest], list[Finding], list[str]]:
    """Give all objects of files, folders (and the folders in them) and `-`; what could not be read; the files' names."""
    manifests: list[Manifest] = []
    findings: list[Finding] = []
    names: list[str] = []
    for path in paths:
        files, failed = [Path(path)], list[tuple[str, str]]()
        if path != "-" and Path(path).is_dir():
            files, failed = files_in(Path(path), below=True)
            if not files and not failed:
                findings.append(_unreadable(path, f"the folder holds no {', '.join(sorted(SUFFIXES))} file"))
        names += [folder for folder, _ in failed]
        findings += [_unreadable(folder, f"cannot read it: {why}") for folder, why in failed]
        for file in files:
            names.append("standard input" if path == "-" else str(file))
            for each in _file(names[-1], str(file)):
                if isinstance(each, Finding):
                    findings.append(each)
                else:
                    manifests.append(each)
    return manifests, findings, names


def _file(name: str, path: str) -> Iterator[Manifest | Finding]:
    try:
        text = read_text(path)
    except UnreadableText as error:
        yield _unreadable(name, f"cannot read it: {error}")
        return
    for item in _documents(name, text):
        if isinstance(item, Finding):
            yield item
        else:
            yield from _expand(item)


def _unreadable(name: str, why: str) -> Finding:
    return Finding(name, 1, "error", "DRA-MANIFEST-UNREADABLE", why)


def _documents(name: str, text: str) -> Iterator[Manifest | Finding]:
    for found in _values(text):
        if isinstance(found, YamlError):
            remedy = found.remedy or "Write YAML or JSON."
            if "{{" in text:
                remedy = "Templates must be rendered first: helm template … | dra validate -"
            yield Finding(name, found.line, "error", "DRA-MANIFEST-SYNTAX", found.message, remedy=remedy)
            continue
        value, spot = found
        if isinstance(value, dict):
            yield Manifest(name, value, spot)
        elif value is not None:
            why = "a document is no object with apiVersion and kind"
            yield Finding(name, spot.line, "error", "DRA-MANIFEST-KIND", why)


_Found = tuple[Any, Spot] | YamlError


def _values(text: str) -> Iterator[_Found]:
    """Read JSON or YAML. A mapping in braces without quotes is YAML that looks like JSON."""
    if text.lstrip()[:1] not in {"{", "["}:
        yield from _yaml(text)
        return
    found = list(_json(text))
    if any(isinstance(item, YamlError) for item in found):
        other = list(_yaml(text))
        # Where it is neither, the message about JSON is the better one.
        if _good(other) > _good(found):
            found = other
    yield from found


def _good(found: list[_Found]) -> int:
    return sum(not isinstance(item, YamlError) for item in found)


def _json(text: str) -> Iterator[_Found]:
    """Read one JSON value after the other. Lines come from YAML's reader, which reads JSON too."""
    decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=no_number, parse_float=json_float)
    position, line, counted = 0, 1, 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
            value = whole_characters(value, text[position:end])
        except json.JSONDecodeError as error:
            yield YamlError(f"{error.msg} at column {error.colno}", error.lineno)
            return
        except ValueError as error:
            yield YamlError(number_error(error), line)
            return
        except RecursionError:
            yield YamlError("it nests too deeply", line)
            return
        # A tab is white space in JSON, not so in YAML; and YAML has no characters of two escapes.
        same = _PAIRED.sub(r"\\ufffd", text[position:end].replace("\t", " "))
        lines = next(_yaml(same, line - 1), None)
        # The value is good even where only its lines cannot be told.
        yield value, lines[1] if isinstance(lines, tuple) else _spot_of(value, MAX_DEPTH, line)
        position = end


def _pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    result = Pairs(pairs)
    if len(result) != len(pairs):
        result.duplicates = _repeated(key for key, _ in pairs)
    return result


def _repeated(keys: Iterable[str]) -> tuple[str, ...]:
    """Give the keys that stood there before, each as often as it is one too many."""
    seen: set[str] = set()
    repeated = []
    for key in keys:
        if key in seen:
            repeated.append(key)
        seen.add(key)
    return tuple(repeated)


def _yaml(text: str, lines_before: int = 0) -> Iterator[_Found]:
    import yaml

    for document in documents(text, kubectl_loader()):
        if isinstance(document, YamlError):
            yield YamlError(document.message, document.line + lines_before, document.remedy)
            continue
        before = document.before + lines_before
        found: _Found
        try:
            found = _Builder(document.loader, before).build(document.root, document.root.start_mark.line)
        except YamlError as error:
            found = error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            message, line = described(error, text)
            found = YamlError(message, line + before)
        yield found


class _Builder:
    """Makes JSON values of YAML nodes as kubectl does: times stay text, keys become text, later keys win."""

    def __init__(self, loader: Any, lines_before: int) -> None:
        self._loader = loader
        self._before = lines_before

    def build(self, node: Any, line: int) -> tuple[Any, Spot]:
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
        result.duplicates = _repeated(written)
        return result

    def _key(self, node: Any) -> str:
        if node.id != "scalar":
            raise YamlError("a key is no text", node.start_mark.line + 1 + self._before)
        if node.tag.endswith(":bool"):
            return "true" if is_true(node.value) else "false"
        return str(node.value)

    def _scalar(self, node: Any) -> Any:
        kind, text = node.tag.rpartition(":")[2], node.value
        if kind == "null":
            return None
        if kind == "bool":
            return is_true(text)
        if kind not in {"int", "float"}:
            return text
        try:
            return scalar_number(text)
        except ValueError as error:
            raise YamlError(number_error(error), node.start_mark.line + 1 + self._before) from error


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
