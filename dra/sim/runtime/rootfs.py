"""Two small file system models: the host under a directory, and the container that is being made."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


def follow(root: Path, path: str, known: dict[str, str] | None = None) -> Path | None:
    """Give the file behind a host path, links followed inside the host's root; None if there is none.

    `known` remembers which paths are links between calls at one moment: the mounts of a container share directories.
    """
    base = str(root).rstrip("/")
    known = {} if known is None else known
    inside = "/"
    parts = [part for part in path.split("/") if part]
    for _ in range(400):
        if not parts:
            found = base + inside
            return Path(found) if os.path.exists(found) else None  # noqa: PTH110 - hundreds for each container
        inside = posixpath.normpath(posixpath.join(inside, parts.pop(0)))
        target = known.get(inside)
        if target is None:
            target = known[inside] = _link_target(base + inside)
        if target:
            parts = [part for part in target.split("/") if part] + parts
            inside = "/" if target.startswith("/") else posixpath.dirname(inside)
    return None


def _link_target(path: str) -> str:
    """Give where a link leads; empty for what is none, or is not there."""
    try:
        return os.readlink(path)  # noqa: PTH115 - hundreds for each container
    except OSError:
        return ""


@dataclass(slots=True)
class ContainerFiles:
    """The files of a container that do not come from its image: mounts and links.

    `mounts` maps a path in the container to the host's file or directory, `links` a path to its target.
    """

    mounts: dict[str, Path] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def add_link(self, link: str, target: str) -> None:
        """Make a link as `create-symlinks` does: an existing one is replaced."""
        self.links[posixpath.normpath(link)] = target

    def resolve(self, path: str) -> Path | None:
        """Give the host's file that a path in the container leads to; None if there is none."""
        path = posixpath.normpath(path)
        for _ in range(40):
            if path in self.links:
                path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self.links[path]))
                continue
            if path in self.mounts:
                return self.mounts[path]
            for destination, source in self.mounts.items():
                if path.startswith(destination.rstrip("/") + "/") and source.is_dir():
                    below = source / path.removeprefix(destination).lstrip("/")
                    return below if below.exists() else None
            return None
        return None

    def names_in(self, directory: str) -> Iterator[str]:
        """Give the names that stand in a directory of the container, as far as they were injected."""
        directory = posixpath.normpath(directory)
        names = {path for path in (*self.mounts, *self.links) if posixpath.dirname(path) == directory}
        yield from sorted(posixpath.basename(path) for path in names)
        source = self.mounts.get(directory)
        if source is not None and source.is_dir():
            yield from sorted(entry.name for entry in source.iterdir())
