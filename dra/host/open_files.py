"""Which processes have a device open: /proc/<pid>/fd, as far as this process may see it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# What the kernel puts behind the name of a file that has none any more.
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A process that has a device open; `comm` is the kernel's name for it, at most 15 characters."""

    pid: int
    comm: str


def holders_of(proc: Path, nodes: Iterable[Path]) -> tuple[Holder, ...]:
    """Give the processes that have one of these device nodes open, by pid.

    A container's node is another file than the host's, so that nodes are told by their numbers and not by name. Nodes
    that do not exist, and processes that end meanwhile or may not be looked at, count as nothing. Only what lies in a
    /dev, or is called as one of the nodes is, is looked at closer: a file on a server that is gone would never answer.

    Source: proc(5), /proc/<pid>/fd: links that lead to the open file itself.
    """
    wanted = {key: node.name for node in nodes if (key := _key(node)) is not None}
    if not wanted:
        return ()
    names = frozenset(wanted.values())
    return tuple(
        sorted(
            Holder(int(entry.name), _comm(Path(entry.path)))
            for entry in os.scandir(proc)
            if entry.name.isdigit()
            and any(_key(link) in wanted for link in _open_devices(f"{entry.path}/fd", names))
        )
    )


def _open_devices(directory: str, names: frozenset[str]) -> Iterator[Path]:
    """Give the links of a process that may lead to one of the devices."""
    try:
        links = os.listdir(directory)  # noqa: PTH208 - of every process
    except OSError:
        return
    for link in links:
        path = f"{directory}/{link}"
        with contextlib.suppress(OSError):
            target = os.readlink(path)  # noqa: PTH115 - of every file of every process
            if target.startswith("/dev/") or target.rpartition("/")[2].removesuffix(_DELETED) in names:
                yield Path(path)


def _key(path: Path) -> tuple[int, int, int] | None:
    """Give what makes a device itself: its kind and numbers; of a file that stands for one, where it lies."""
    try:
        status = path.stat()
    except OSError:
        return None
    if stat.S_ISCHR(status.st_mode):
        return (stat.S_IFCHR, os.major(status.st_rdev), os.minor(status.st_rdev))
    return (stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino)


def _comm(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
