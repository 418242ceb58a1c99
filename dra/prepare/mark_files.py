"""Small files that note what this driver did to the hardware, for the case that a claim's record is lost.

What they tell of ends with the boot, so that nothing needs to survive a power failure and nothing is fsynced. A file that
cannot be written or removed is a line in the log, never an error: the records still tell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dra.errors import HostError
from dra.host.files import ensure_dir, is_leftover, read_bytes, remove_durable, write_durable
from dra.telemetry.log import error_fields, get_logger
from dra.values import is_dns_label

log = get_logger()


class MarkFiles:
    """The marks in one directory, each a JSON object by its name. Thread-safe for different names.

    Args:
        directory: where they are; made when it is needed.
        boot_id: of this boot; marks of others mean nothing.
    """

    def __init__(self, directory: Path, *, boot_id: str) -> None:
        self._directory = directory
        self._boot_id = boot_id

    def read(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Give the marks of this boot: those of these names, or all; none where the directory cannot be read."""
        wanted = self._names() if names is None else (name for name in names if is_dns_label(name.lower()))
        for name in wanted:
            content = self._content(name)
            if content is not None and content.get("boot_id") == self._boot_id:
                yield name, content

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a mark."""
        if not is_dns_label(name.lower()):
            return
        data = json.dumps({**content, "boot_id": self._boot_id}, separators=(",", ":")).encode()
        path = self._directory / f"{name}.json"
        try:
            ensure_dir(self._directory, mode=0o750)
            write_durable(path, data, mode=0o600, fsync=False)
        except HostError as error:
            log.warning("mark_not_written", **error_fields(error))

    def remove(self, name: str) -> None:
        """Remove a mark; fine if there is none."""
        path = self._directory / f"{name}.json"
        try:
            if os.path.lexists(path):
                remove_durable(path, fsync=False)
        except HostError as error:
            log.warning("mark_not_removed", **error_fields(error))

    def clear_old(self) -> int:
        """Remove what another boot left; how many."""
        stale = [
            name
            for name in self._names()
            if (content := self._content(name)) is not None and content.get("boot_id") != self._boot_id
        ]
        for name in stale:
            self.remove(name)
        return len(stale)

    def leftovers(self) -> list[Path]:
        """Give the temporary files of writes that never ended, or have not yet."""
        return [self._directory / entry for entry in self._entries() if is_leftover(entry, prefix="")]

    def _names(self) -> Iterator[str]:
        yield from (entry.removesuffix(".json") for entry in self._entries() if entry.endswith(".json"))

    def _entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self._directory))  # noqa: PTH208 - names are all that is wanted
        except OSError:
            return []

    def _content(self, name: str) -> Mapping[str, Any] | None:
        """Give what a mark says, nothing if it is damaged; None if it is not there or cannot be read."""
        try:
            data = read_bytes(self._directory / f"{name}.json")
        except HostError:
            return None
        if data is None:
            return None
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
