"""Paths inside a root, resolved as a process would that lives in it.

A driver root is another file system's `/`: an absolute link in it means that root, and `..` ends there.
`os.path.realpath` would follow such a link into the wrong tree, or out of it into the host's.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

# As the kernel's MAXSYMLINKS: more is a loop.
MAX_LINKS = 40


def resolve(root: Path, path: str) -> Path | None:
    """Give the real file behind `path` in `root`; None if there is none or its links do not end.

    Absolute links are relative to `root`, `..` does not lead out of it, so the answer is always `root` or
    below. The root itself is taken as it is. A part that may not be searched counts as absent.
    """
    inside = resolve_inside(str(root), path)
    return None if inside is None else root / inside.lstrip("/")


def resolve_inside(root: str, path: str) -> str | None:
    """Do what `resolve` does, but give the path inside the root (`/usr/lib/libcuda.so.580.95.05`)."""
    base = root.rstrip("/")
    done: list[str] = []
    todo = path.split("/")[::-1]
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if done:
                done.pop()
            continue
        here = "/".join([base, *done, part])
        try:
            target = os.readlink(here)  # noqa: PTH115 - called for each part of each path
        except OSError as error:
            if error.errno != errno.EINVAL:
                return None
            done.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            return None
        if target.startswith("/"):
            done.clear()
        todo.extend(target.split("/")[::-1])
    return "/" + "/".join(done)
