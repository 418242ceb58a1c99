"""Write one attribute of sysfs: a script of its own, so that a write which the kernel keeps waiting can be left behind."""

from __future__ import annotations

import os
import sys


def attribute_command(path: str, text: str) -> list[str]:
    """Give the command that writes a text to an attribute; it ends with 1, and the reason in words, where it cannot.

    Needs nothing of this package at run time, whatever the environment is that it is given.
    """
    return [sys.executable, "-SsE", __file__, path, text]


def write_attribute(path: str, text: str) -> None:
    """Write a text with one system call, as an attribute wants it; the file is not made.

    Raises:
        OSError: as the kernel says.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def main() -> None:
    """Write it."""
    try:
        write_attribute(sys.argv[1], sys.argv[2])
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
