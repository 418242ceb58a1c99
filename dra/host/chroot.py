"""Run a program inside another root: the image has no `chroot` program. Also a script of its own, which does it."""

from __future__ import annotations

import os
import sys


def chroot_command(root: str, command: list[str]) -> list[str]:
    """Give the command that runs another one inside a root; it ends with 127 where that cannot be.

    Needs nothing of this package at run time, whatever the environment is that it is given.
    """
    return [sys.executable, "-SsE", __file__, root, *command]


def main() -> None:
    """Enter the root and become the program."""
    root, *command = sys.argv[1:]
    try:
        os.chroot(root)
        os.chdir("/")
        os.execv(command[0], command)  # noqa: S606 - the program of the driver root
    except OSError as error:
        print(f"{command[0]} in {root}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
