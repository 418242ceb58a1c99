"""Stand-ins for programs of the driver, which act on the simulated node that they lie in.

They are copied into the driver root and run there by themselves: standard library only, nothing of this package.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
STAND_INS = ("nvidia-smi", "nvidia-cuda-mps-control")


# For a shell it starts Python, for Python it is a text. In a container without that Python it does nothing, successfully.
_START = """#!/bin/sh
''''[ -x "{python}" ] || exit 0; exec "{python}" -I -S "$0" "$@" # '''
"""


def stand_in(name: str) -> str:
    """Give the text of a program that runs with this Python, isolated and without packages."""
    source = (_FOLDER / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    return _START.format(python=sys.executable) + source
