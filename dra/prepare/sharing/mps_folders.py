"""The folders of a daemon, and the memory file system that its clients and it have in common."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

from dra.host.files import ensure_dir, host_error
from dra.prepare.sharing.mps_model import DaemonFolders
from dra.telemetry.log import get_logger

log = get_logger()

# Source: sys/mount.h.
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_RELATIME = 2, 4, 8, 1 << 21
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_NOT_PERMITTED = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
# Where /proc/meminfo says nothing.
_FALLBACK_KIB = 65_536


def make_folders(folders: DaemonFolders, *, memory: bool) -> None:
    """Make what a daemon needs; fine if it is there.

    Args:
        folders: where.
        memory: `shm` becomes a tmpfs of its own, at most half of the machine's memory. Where this process may not
            mount, it is a plain directory.

    Raises:
        HostError: the disk refuses.
    """
    for path in (folders.root, folders.pipe, folders.shm, folders.log):
        ensure_dir(path)
    if memory and not os.path.ismount(folders.shm):
        _mount_tmpfs(folders.shm)
    try:
        # Clients of any user make files there, as in /dev/shm.
        folders.shm.chmod(0o1777)
    except OSError as error:
        raise host_error(error, "change the mode of", folders.shm) from error


def remove_folders(folders: DaemonFolders) -> None:
    """Remove all of it; fine if nothing is there. A container that still runs keeps what it has.

    Raises:
        HostError: something cannot be removed.
    """
    for _ in range(4):  # mounted twice by two keepers that raced
        if not os.path.ismount(folders.shm) or not _detach(folders.shm):
            break
    # Sockets and files that others make meanwhile are no error the first time.
    shutil.rmtree(folders.root, ignore_errors=True)
    if folders.root.exists():
        try:
            shutil.rmtree(folders.root)
        except FileNotFoundError:
            return
        except OSError as error:
            raise host_error(error, "remove", folders.root) from error


def _mount_tmpfs(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RELATIME
    options = f"size={_memory_kib() // 2}k,mode=1777".encode()
    if libc.mount(b"shm", os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags), options) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NOT_PERMITTED:
        raise host_error(OSError(number, os.strerror(number)), "mount a tmpfs on", path)
    log.warning("mps_shm_is_a_directory", path=str(path), error=os.strerror(number))


def _detach(path: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_PERMITTED:
        raise host_error(OSError(number, os.strerror(number)), "unmount", path)
    return False


def _memory_kib() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1])
    return 2 * _FALLBACK_KIB
