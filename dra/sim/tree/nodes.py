"""Device nodes and sockets in a file tree, real where the process may make them.

Without the right to `mknod` a node is a regular file whose first line says what it stands for
(`simulated-device c 195 0 gid 44`). `device_numbers` reads both kinds, so a consumer that must work in either
case asks it instead of `os.stat`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_MARK = "simulated-device"


@dataclass(frozen=True, slots=True)
class DeviceNumbers:
    """What a node is: kind `c` or `b`, numbers, permission bits, group; `real` says that the kernel agrees."""

    kind: str
    major: int
    minor: int
    mode: int
    gid: int
    real: bool


@lru_cache(maxsize=1)
def can_make_nodes() -> bool:
    """Say whether this process may create a character device whose driver does not exist."""
    with tempfile.TemporaryDirectory(prefix="dra-node-") as directory:
        probe = Path(directory) / "node"
        try:
            os.mknod(probe, stat.S_IFCHR | 0o600, os.makedev(195, 0))
        except OSError:
            return False
        return stat.S_ISCHR(probe.lstat().st_mode)


def make_device_node(
    path: Path, major: int, minor: int, *, mode: int = 0o666, gid: int = 0, real: bool | None = None
) -> None:
    """Make (or make again) a character device node.

    `real` forces one of the two kinds; by default the kernel's answer decides.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if can_make_nodes() if real is None else real:
        os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
        path.chmod(mode)
        if gid:
            os.chown(path, -1, gid)
    else:
        path.write_text(f"{_MARK} c {major} {minor} gid {gid}\n")
        path.chmod(mode)


def device_numbers(path: Path) -> DeviceNumbers | None:
    """Read a node or its stand-in; None where there is neither."""
    try:
        status = path.lstat()
    except OSError:
        return None
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
        return DeviceNumbers(
            kind, os.major(status.st_rdev), os.minor(status.st_rdev), mode, status.st_gid, real=True
        )
    if not stat.S_ISREG(status.st_mode) or status.st_size > 100:
        return None
    words = path.read_text(errors="replace").split()
    if len(words) != 6 or words[0] != _MARK:
        return None
    return DeviceNumbers(words[1], int(words[2]), int(words[3]), mode, int(words[5]), real=False)


def make_socket(path: Path) -> None:
    """Make a socket file with nobody behind it, as a stopped daemon leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    # The address of a socket holds 108 bytes; the tree may lie deeper than that.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    path.chmod(0o666)


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file, its directories first."""
    write_bytes(path, text.encode(), mode=mode)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file as a whole, its directories first; a reader sees the old or the new one.

    One that is as it should be stays: renames are what costs most when a change is shown in hundreds of files.
    """
    if _is_already(path, data, mode):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_bytes(data)
    temporary.chmod(mode)
    temporary.replace(path)


def _is_already(path: Path, data: bytes, mode: int) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        right = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == mode
        return right and status.st_size == len(data) and os.read(descriptor, len(data) + 1) == data
    finally:
        os.close(descriptor)


def make_link(path: Path, target: str) -> None:
    """Make (or make again) a symbolic link; one that leads there stays."""
    with contextlib.suppress(OSError):
        if os.readlink(path) == target:  # noqa: PTH115 - a Path would be made of it
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.symlink_to(target)


def under(root: Path, path: str) -> Path:
    """Give an absolute path as it lies under a root directory."""
    return root / path.lstrip("/")
