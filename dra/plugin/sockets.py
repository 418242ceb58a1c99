"""Socket files of the plugin: their names, and what may be removed.

A socket file belongs to the process whose server made it, which its inode tells. Nothing here removes a file of
somebody else as long as anybody answers on it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dra.errors import ConfigError

# Bytes of a unix socket's path without the closing NUL. Source: sun_path of Linux, 108 bytes.
MAX_SOCKET_PATH = 107

# A socket that refuses may be one that is bound and about to listen: ask again after so many seconds.
_SECOND_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """Where one instance of the plugin serves: the prepare and health services, and the registration."""

    service: Path
    registration: Path


def plan_sockets(driver: str, *, plugins_dir: Path, registry_dir: Path, pod_uid: str = "") -> SocketPaths:
    """Choose the socket files of this instance; with a pod UID two instances never share one.

    Where the readable name does not fit, a hashed one is used, as the Go helper of Kubernetes 1.37 does.

    Raises:
        ConfigError: DRA-SOCKET-PATH-TOO-LONG if not even the shortest name fits.
    """
    short = _hash(pod_uid.encode(), 8)
    both = _hash(f"{driver}\0{pod_uid}".encode(), 16)
    if pod_uid:
        service = [f"dra.{pod_uid}.sock", f"dra.{short}.sock"]
        registration = [f"{driver}-{pod_uid}-reg.sock", f"{driver}-{short}-reg.sock", f"dra-{both}-reg.sock"]
    else:
        service = ["dra.sock"]
        registration = [f"{driver}-reg.sock", f"dra-{both}-reg.sock"]
    return SocketPaths(
        service=_first_fitting(plugins_dir / driver, service),
        registration=_first_fitting(registry_dir, registration),
    )


def _hash(data: bytes, length: int) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()[:length]).rstrip(b"=").decode()


def _first_fitting(directory: Path, names: Iterable[str]) -> Path:
    path = directory
    for name in names:
        path = directory / name
        if _length(path) <= MAX_SOCKET_PATH:
            return path
    excess = _length(path) - MAX_SOCKET_PATH
    raise ConfigError(
        "DRA-SOCKET-PATH-TOO-LONG",
        f"the socket path {path} is {excess} bytes longer than the {MAX_SOCKET_PATH} that Linux allows",
        remedy="Use a kubelet root directory with a shorter path or a shorter driver name.",
        path=str(path),
    )


def _length(path: Path) -> int:
    # The hidden name, of 14 bytes, has to fit as well.
    return len(os.fsencode(path.parent)) + 1 + max(len(os.fsencode(path.name)), 14)


def hidden_path(path: Path, driver: str) -> Path:
    """Give a fresh name beside `path` under which a socket is bound before it is shown.

    The kubelet ignores names that start with a dot. Random, because two pods may both be process 1.
    """
    return path.with_name(f".{secrets.token_hex(3)}{_hidden_suffix(driver)}")


def _hidden_suffix(driver: str) -> str:
    return f".{_hash(driver.encode(), 4)}"


def inode_of(path: Path) -> tuple[int, int] | None:
    """Give (device, inode) of a socket file; None if there is none or something else is at that path."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def unlink_own(path: Path, inode: tuple[int, int] | None) -> bool:
    """Remove a socket file if it still is the one with this inode; gives whether it was removed."""
    if inode is None or inode_of(path) != inode:
        return False
    path.unlink(missing_ok=True)
    return True


def refuses(path: Path) -> bool:
    """Whether nobody listens on a socket file. A busy server, or an error of any other kind, is not a refusal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False


def remove_stale(
    paths: Iterable[Path],
    *,
    refused: Callable[[Path], bool] = refuses,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Path]:
    """Remove the socket files on which nobody answers, and give them.

    A killed instance leaves its files, and the kubelet would dial them for ever. Each is asked twice, because a
    starting server of another implementation refuses between its bind and its listen.
    """
    first = [(path, inode) for path in paths if (inode := inode_of(path)) is not None and refused(path)]
    if not first:
        return []
    sleep(_SECOND_LOOK_SECONDS)
    return [path for path, inode in first if refused(path) and unlink_own(path, inode)]


def find_sockets_of(driver: str, *, plugins_dir: Path, registry_dir: Path) -> list[Path]:
    """Give the socket files that instances of this driver have or have left, hidden ones included.

    The hashed registration name does not tell whose it is, so that those of others are not among them.
    """
    hidden = r"\.[0-9a-f]{6}" + re.escape(_hidden_suffix(driver))
    registration = rf"{re.escape(driver)}(-[A-Za-z0-9_-]+)?-reg\.sock|{hidden}"
    service = rf"dra([.-][A-Za-z0-9_-]+)?\.sock|{hidden}"
    return sorted([*_matching(registry_dir, registration), *_matching(plugins_dir / driver, service)])


def _matching(directory: Path, pattern: str) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(directory) if re.fullmatch(pattern, entry.name)]
    except OSError:
        return []
