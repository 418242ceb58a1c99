"""What lies at a record's name on disk: its bytes, or why there are none to be had.

Somebody's directory, pipe or bad block in place of one record is that claim's damage, never a failure of all claims.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dra.host.files import host_error, remove_durable
from dra.telemetry.log import get_logger

Signature = tuple[int, int, int, int]

# A claim has at most 32 devices and 32 configurations of 10 KiB.
LARGEST_BYTES = 8 << 20
_CHUNK = 1 << 17
# These say something of this process or of the mount, and nothing of the file.
_NOT_OF_THE_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE})
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a symbolic link"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One look at a record's file. `trouble` says why `data` is no record's content; empty where it may be."""

    signature: Signature
    data: bytes = b""
    trouble: str = ""


def signature_of(status: os.stat_result) -> Signature:
    """Give what changes when a file is replaced or written to."""
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def read_entry(path: Path, *, unless: Signature | None = None) -> Entry | None:
    """Read what is there, without ever waiting for it; None if nothing is. Not read if it still has `unless`.

    Raises:
        OSError: nothing could be learnt of the file: no descriptors left, its directory cannot be searched.
    """
    try:
        # Opening a pipe without O_NONBLOCK waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return _unopened(path, error)
    try:
        status = os.fstat(descriptor)
        signature = signature_of(status)
        if signature == unless:
            return Entry(signature)
        if not stat.S_ISREG(status.st_mode):
            return Entry(signature, trouble=_kind(path, status))
        try:
            data = _read_all(descriptor)
        except OSError as error:
            return Entry(signature, trouble=_refused(path, error))
    finally:
        os.close(descriptor)
    if len(data) > LARGEST_BYTES:
        return Entry(signature, data, f"{path} is larger than any record ({status.st_size} bytes)")
    return Entry(signature, data)


def discard(path: Path, *, fsync: bool) -> None:
    """Remove what stands at a path of ours, a record's or a CDI spec's. A directory with something in it only gets out of the way.

    Raises:
        HostError: it cannot be removed.
    """
    if path.is_symlink() or not path.is_dir():
        remove_durable(path, fsync=fsync)
        return
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise host_error(error, "remove", path) from error
        _put_by(path)


def _put_by(path: Path) -> None:
    """Rename a directory to a name that is no record's: what is in it is not ours to delete."""
    number = 1
    while (target := path.with_name(f"{path.name}.kept-{number}")).exists():
        number += 1
    try:
        path.rename(target)
    except OSError as error:
        raise host_error(error, "rename", path) from error
    get_logger().warning("directory_kept", path=str(target), text="it stood in place of a claim's file")


def _unopened(path: Path, error: OSError) -> Entry | None:
    if error.errno in _NOT_OF_THE_FILE:
        raise error
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    # A socket, or a device without driver, cannot even be opened.
    regular = stat.S_ISREG(status.st_mode)
    return Entry(signature_of(status), trouble=_refused(path, error) if regular else _kind(path, status))


def _kind(path: Path, status: os.stat_result) -> str:
    kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "a device")
    return f"{path} is {kind}, not a file"


def _refused(path: Path, error: OSError) -> str:
    if error.errno in _NOT_OF_THE_FILE:
        raise error
    return f"{path} cannot be read: {error.strerror or error}"


def _read_all(descriptor: int) -> bytes:
    parts, left = [], LARGEST_BYTES + 1
    while left > 0 and (part := os.read(descriptor, min(_CHUNK, left))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
