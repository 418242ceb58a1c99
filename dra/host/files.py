"""Durable files: what was written is whole after a crash, and an error says what is wrong with the disk.

A file is written to a temporary name in the same directory and renamed over the old one: a rename from elsewhere
is not seen by the watchers of CDI directories, and a reader never sees half a file. The temporary name never ends
in .json or .yaml, since CDI readers take every such file, hidden ones too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from dra.errors import HostError

TEMP_SUFFIX = ".dra-tmp"
_CHUNK = 1 << 17

# errno -> (slug, what to do).
_CAUSES = {
    errno.ENOSPC: (
        "DRA-HOST-NO-SPACE",
        "Free space (or inodes) on that file system; the call is retried by itself.",
    ),
    errno.EDQUOT: (
        "DRA-HOST-NO-SPACE",
        "Raise the quota of that file system; the call is retried by itself.",
    ),
    errno.EROFS: ("DRA-HOST-READ-ONLY", "Mount that path writable in the plugin's pod."),
    errno.EACCES: ("DRA-HOST-READ-ONLY", "Let the plugin write there: it has to run as root and privileged."),
    errno.EPERM: ("DRA-HOST-READ-ONLY", "Let the plugin write there: it has to run as root and privileged."),
    errno.ENOENT: ("DRA-HOST-MISSING", "Create that directory, or mount it into the plugin's pod."),
    errno.ENOTDIR: ("DRA-HOST-MISSING", "Something that is not a directory stands in the way; remove it."),
    errno.EEXIST: ("DRA-HOST-MISSING", "Something that is not a directory stands in the way; remove it."),
    errno.EISDIR: ("DRA-HOST-IS-DIRECTORY", "A directory stands where a file has to be; remove it."),
    errno.ELOOP: ("DRA-HOST-IO", "A symbolic link stands where a file has to be; remove it."),
    errno.EMFILE: ("DRA-HOST-TOO-MANY-FILES", "Raise the limit of open files (ulimit -n) of the plugin."),
    errno.ENFILE: ("DRA-HOST-TOO-MANY-FILES", "Raise fs.file-max of the node."),
    errno.ENAMETOOLONG: ("DRA-HOST-NAME-TOO-LONG", "Choose a shorter directory."),
    errno.ESTALE: ("DRA-HOST-MISSING", "The file system was mounted anew; restart the plugin's pod."),
}


def host_error(error: OSError, action: str, path: Path) -> HostError:
    """Translate an OSError that came from doing `action` (`write`, `remove`) to `path`."""
    code, remedy = _CAUSES.get(
        error.errno or 0, ("DRA-HOST-IO", "Check the disk and the kernel log of the node.")
    )
    reason = error.strerror or str(error)
    return HostError(code, f"cannot {action} {path}: {reason}", remedy=remedy, path=str(path))


def write_durable(
    path: Path, data: bytes, *, mode: int, fsync: bool = True, fsync_name: bool | None = None
) -> None:
    """Replace `path` by `data` in one step, with exactly this mode whatever the umask.

    After a crash the file is the old one or the new one; what may be left over is a temporary file that
    `is_leftover` knows. With `fsync` that holds for a power failure too; with `fsync_name` (as `fsync` if not
    given) it is the new one once this has returned.

    Raises:
        HostError: DRA-HOST-NO-SPACE, DRA-HOST-READ-ONLY, DRA-HOST-MISSING (no such directory), ...; the old
            file is then still there, or the new one, whole.
    """
    # Text, not paths: this is done several times in each prepare.
    target = str(path)
    temporary = str(temporary_name(path))
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            _write_all(descriptor, data)
            if mode != 0o600:
                os.fchmod(descriptor, mode)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, target)  # noqa: PTH104
        if fsync if fsync_name is None else fsync_name:
            sync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise host_error(error, "write", path) from error


def remove_durable(path: Path, *, fsync: bool = True) -> bool:
    """Remove a file; False if it was not there.

    Raises:
        HostError: as `write_durable`.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise host_error(error, "remove", path) from error
    if fsync:
        try:
            sync_dir(path.parent)
        except OSError as error:
            raise host_error(error, "remove", path) from error
    return True


def ensure_dir(path: Path, *, mode: int = 0o755) -> None:
    """Make a directory and its parents; fine if it is there.

    Raises:
        HostError: as `write_durable`.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise host_error(error, "create the directory", path) from error


def read_bytes(path: Path) -> bytes | None:
    """Give a file's content; None if there is no such file.

    Raises:
        HostError: DRA-HOST-IO and the like.
    """
    try:
        # No file object: it asks the kernel five more things about a file than are wanted here. A pipe that somebody
        # put there must not make us wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            parts = []
            while part := os.read(descriptor, _CHUNK):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise host_error(error, "read", path) from error


def temporary_name(path: Path) -> Path:
    """Give a fresh temporary name beside `path`: hidden, of ours by its ending, never read as a spec."""
    return path.parent / f".{path.name}.{secrets.token_hex(6)}{TEMP_SUFFIX}"


def is_leftover(name: str, *, prefix: str) -> bool:
    """Whether `name` is a temporary file of `write_durable` for a file whose name starts with `prefix`."""
    return name.startswith(f".{prefix}") and name.endswith(TEMP_SUFFIX)


def sync_dir(path: Path) -> None:
    """Put the names in a directory on disk; a file system that cannot is taken as it is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
