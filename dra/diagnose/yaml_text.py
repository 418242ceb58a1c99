"""YAML as people hand it in, within bounds: document by document, and an error in one keeps no other from being read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dra.diagnose.texts import number_error

# Values that aliases (`*name`) and merges (`<<`) may add to those that are written out. A short file can otherwise stand
# for more than any memory holds. kubectl's reader has a limit of the same kind.
MAX_ALIASED = 100_000
_MARKER = re.compile(r"^---(?=\s|$)", re.MULTILINE)


class YamlError(Exception):
    """What is wrong with a document: the message, its line (from 1), and what to do where that is known."""

    def __init__(self, message: str, line: int, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Document:
    """A document as PyYAML's loader composed it: `loader` makes values of `root`; its lines count from `before`."""

    loader: Any
    root: Any
    before: int


def documents(text: str, loader_class: Any) -> Iterator[Document | YamlError]:
    """Give every document of a text, or what is wrong with it.

    After an error of syntax the next document begins at the next line with `---`: no value can hold such a line.
    """
    last = -1
    # Without an anchor there is no alias.
    aliases = "&" in text
    loader = loader_class(text)
    try:
        while True:
            try:
                if not loader.check_node():
                    return
                node = loader.get_node()
            except _failures():
                break
            # An empty document seems to stand where the next one begins. It does no harm to read it again.
            if node.start_mark.index != node.end_mark.index:
                last = node.start_mark.line
            yield _bounded(loader, node, 0, aliases=aliases)
    finally:
        loader.dispose()
    for line, part in _parts(text):
        if line > last:
            yield from _alone(part, line, loader_class)


def _failures() -> tuple[type[Exception], ...]:
    import yaml

    return (yaml.YAMLError, ValueError, RecursionError)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Cut a text at its markers: the line of each part (from 0), and the part."""
    starts = [0, *(match.start() for match in _MARKER.finditer(text) if match.start())]
    line = 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        part = text[start:end]
        yield line, part
        line += part.count("\n")


def _alone(text: str, before: int, loader_class: Any) -> Iterator[Document | YamlError]:
    loader = loader_class(text)
    try:
        while loader.check_node():
            yield _bounded(loader, loader.get_node(), before, aliases=True)
    except _failures() as error:
        message, line = described(error, text)
        yield YamlError(message, before + line)
    finally:
        loader.dispose()


def described(error: Exception, text: str) -> tuple[str, int]:
    """Say what PyYAML has against a text, and in which of its lines (from 1)."""
    import yaml

    if isinstance(error, yaml.MarkedYAMLError):
        message = ", ".join(filter(None, (error.context, error.problem))) or "it is not YAML"
        mark, last = error.problem_mark or error.context_mark, text.rstrip().count("\n")
        if mark and error.context_mark and mark.line > last:
            # What was never closed is only missed at the end: where it was opened tells more.
            mark = error.context_mark
        return message, min(mark.line, last) + 1 if mark else 1
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character[:1])
        place = max(text.find(chr(code)), 0)
        return f"the character #x{code:04x} may not stand in YAML", text.count("\n", 0, place) + 1
    if isinstance(error, RecursionError):
        return "it nests too deeply", 1
    return number_error(ValueError(" ".join(str(error).split()))), 1


def _bounded(loader: Any, node: Any, before: int, *, aliases: bool) -> Document | YamlError:
    """Give a document if its aliases keep within bounds."""
    written, whole = _sizes(node) if aliases else (0, 0)
    line = before + node.start_mark.line + 1
    if whole is None:
        return YamlError("a value holds itself: an alias (*name) stands below its own anchor (&name)", line)
    if whole - written > MAX_ALIASED:
        return YamlError(
            f"its aliases (*name) make {_number(whole)} values of the {written} that are written",
            line,
            f"Write out what is meant; aliases may add {MAX_ALIASED} values.",
        )
    return Document(loader, node, before)


def _number(value: int) -> str:
    return f"{value}" if value < 10**15 else f"more than {10**15}"


def _sizes(root: Any) -> tuple[int, int | None]:
    """Count the values below a node as they are written, and with every alias replaced; None if that has no end.

    Each node is looked at once, however often it stands there.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, done = waiting.pop()
        key = id(node)
        if done:
            open_nodes.discard(key)
            sizes[key] = 1 + sum(sizes[id(item)] for item in _children(node))
        elif key in open_nodes:
            return len(sizes), None
        elif key not in sizes:
            open_nodes.add(key)
            waiting.append((node, True))
            waiting += [(item, False) for item in _children(node) if id(item) not in sizes]
    return len(sizes), sizes[id(root)]


def _children(node: Any) -> Iterator[Any]:
    if node.id == "mapping":
        for key, item in node.value:
            yield key
            yield item
    elif node.id == "sequence":
        yield from node.value
