"""Becomes a program of the driver in a root and with mounts of its own: `python launch.py JSON`.

What is wanted is one JSON object: `empty` (a directory that gets an empty file system in memory), `binds` ([source,
target] pairs, the target made if missing), `root` (entered with chroot; empty: not), `command` (absolute path and
arguments) and `wait` (a line is read from stdin first; at its end without one, nothing is started). With binds it gets a
mount namespace of its own, so that each daemon has its own `/dev/shm` and nobody else sees it.

Standard library only: it runs between fork and exec of the keeper, which has threads. The process stays the same one:
its id and the time at which it was started are the daemon's.
"""

import ctypes
import json
import os
import sys

# Source: sched.h, sys/mount.h.
CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV = 2, 4
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
FAILED = 126


def main(wanted: dict) -> None:  # type: ignore[type-arg]
    """Do it; does not return."""
    if wanted.get("wait") and not sys.stdin.buffer.readline().strip():
        sys.exit(FAILED)
    if wanted.get("binds"):
        _unshare()
        # Opened first: the empty file system hides what lies below it, as a state directory under /tmp.
        opened = [(source, os.open(source, os.O_PATH), target) for source, target in wanted["binds"]]
        if wanted.get("empty"):
            # Made directories then are of this namespace only, also where the root is mounted read-only.
            _mount("mps", wanted["empty"], MS_NOSUID | MS_NODEV, kind="tmpfs", options="size=1m,mode=755")
        for source, descriptor, target in opened:
            os.makedirs(target, exist_ok=True)  # noqa: PTH103 - as little as possible is imported
            _mount(f"/proc/self/fd/{descriptor}", target, MS_BIND, name=source)
    if wanted.get("root"):
        os.chroot(wanted["root"])
        os.chdir("/")
    if wanted.get("wait"):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
    os.execve(wanted["command"][0], wanted["command"], dict(os.environ))  # noqa: S606 - no shell is meant


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "a mount namespace of its own is not permitted")
    # The host's later mounts still come in; ours go nowhere.
    _mount("none", "/", MS_REC | MS_SLAVE)


def _mount(
    source: str, target: str, flags: int, *, kind: str = "none", options: str = "", name: str = ""
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [os.fsencode(word) for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options)):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {name or source} on {target}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        sys.exit(FAILED)
