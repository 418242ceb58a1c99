"""Texts of files that people hand in: manifests and dumps, of any size and origin."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import BinaryIO

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
            return _decoded(_limited(sys.stdin.buffer))
        with Path(path).open("rb") as file:
            return _decoded(_limited(file))
    except OSError as error:
        raise UnreadableText(error.strerror or str(error)) from error


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
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableText(f"it is not text in {'UTF-16' if encoding == 'utf-16' else 'UTF-8'}") from error
