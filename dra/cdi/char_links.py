"""The links `/dev/char/<major>:<minor>` of NVIDIA's device nodes, without which containers lose their GPU.

At a `systemctl daemon-reload` systemd writes the device rules of each container anew, and finds a device by such a link
only. udev makes them for devices that it knows; NVIDIA's modules do not announce theirs.

Source: opencontainers/runc#3708; NVIDIA's container toolkit (create-dev-char-symlinks).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from dra.cdi.nodes import read_node
from dra.host.paths import HostPaths, join_root

_FOLDERS = ("", "nvidia-caps", "nvidia-caps-imex-channels")


def make_char_links(paths: HostPaths) -> tuple[str, ...]:
    """Make the links that are missing, and turn those that lead to another node; give their names.

    Raises:
        OSError: /dev/char cannot be written.
    """
    folder = paths.dev / "char"
    made = []
    for name, major, minor in _nodes(paths):
        link = folder / f"{major}:{minor}"
        target = _target(paths, name)
        if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115 - the text counts
            continue
        if link.exists() and not link.is_symlink():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{link.name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)
        made.append(link.name)
    return tuple(made)


def _nodes(paths: HostPaths) -> Iterator[tuple[str, int, int]]:
    """Give NVIDIA's nodes: (path below dev, major, minor)."""
    view, _ = paths.dev_root()
    for folder in _FOLDERS:
        place = view / "dev" / folder
        try:
            names = sorted(
                entry.name for entry in place.iterdir() if entry.name.startswith(("nvidia", "channel"))
            )
        except OSError:
            continue
        for name in names:
            inside = f"{folder}/{name}".lstrip("/")
            node = read_node(view, f"/dev/{inside}", stand_ins=paths.stand_in_nodes)
            if node is not None and node.major:
                yield inside, node.major, node.minor


def _target(paths: HostPaths, name: str) -> str:
    """Give where a link leads: beside it where the host's own /dev has the node, else into the driver's root."""
    view, spelling = paths.dev_root()
    if view == paths.dev.parent or (paths.dev / name).exists():
        return f"../{name}"
    return join_root(spelling, f"/dev/{name}")
