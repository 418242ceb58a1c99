"""Texts of files that people hand in: manifests and dumps, of any size and origin."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import BinaryIO

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
MOST_BYTES = 512 * 1024 * 1024
_LOOK = 64 * 1024
# PowerShell's `>` writes UTF-16.
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig"))


class UnreadableText(Exception):  # noqa: N818 - the reason is the content
    """There is no text in a file; the message says why."""


def read_text(path: str) -> str:
    """Give the text of a file, or of standard input for `-`.

    Raises:
        UnreadableText: it cannot be read, is no text, or is larger than 512 MiB.
    """
    try:
        if path == "-":
            if sys.stdin is None:
                raise UnreadableText("standard input is closed")
            return _decoded(_limited(sys.stdin.buffer))
        with Path(path).open("rb") as file:
            return _decoded(_limited(file))
    except OSError as error:
        raise UnreadableText(error.strerror or str(error)) from error


def files_in(folder: Path, *, below: bool) -> tuple[list[Path], list[tuple[str, str]]]:
    """Give the .yaml, .yml and .json files of a folder, in order, and the folders that cannot be read with the reason.

    Hidden ones are left out, and what is no file (a pipe would never end). A link that leads nowhere is not left out:
    reading it says so. `below` takes the folders in it too; links to folders are not followed.
    """
    files: list[Path] = []
    failed: list[tuple[str, str]] = []

    def note(error: OSError) -> None:
        failed.append((str(error.filename), error.strerror or str(error)))

    for place, folders, names in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if below else []
        found = (Path(place, name) for name in names if not name.startswith("."))
        files += [item for item in found if item.suffix in SUFFIXES and _is_text_file(item)]
    return sorted(files), failed


def _is_text_file(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _limited(file: BinaryIO) -> bytes:
    # A device such as /dev/zero has no end: what is no text is known from the beginning.
    content = file.read(_LOOK)
    if b"\0" in content and not content.startswith(tuple(mark for mark, _ in _MARKS)):
        raise UnreadableText("it is not text in UTF-8")
    content += file.read(MOST_BYTES + 1 - len(content))
    if len(content) > MOST_BYTES:
        raise UnreadableText(f"it has more than {MOST_BYTES // 2**20} MiB")
    return content


def _decoded(content: bytes) -> str:
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    try:
        # Files that were put together have their marks in the middle too.
        return content.decode(encoding).replace("\n\ufeff", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        name = "UTF-16" if encoding == "utf-16" else "UTF-8"
        raise UnreadableText(f"it is not text in {name} (line {line})") from error


def no_number(name: str) -> float:
    """Refuse `NaN` and `Infinity`, which Python's reader takes and JSON does not have (its `parse_constant`)."""
    raise ValueError(f"{name} is no number of JSON")


def number_error(error: ValueError) -> str:
    """Say what is wrong with a number that Python does not read: there it talks of its own settings."""
    return "a number has too many digits" if "digits" in str(error) else str(error)
