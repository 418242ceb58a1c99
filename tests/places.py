"""Where the tests write.

They build the file trees of some thousand simulated nodes and remove them again. On a disk that is most of their time,
and none of them is about the disk; where the machine keeps files in memory, they go there.
"""

from __future__ import annotations

import os
from pathlib import Path

_IN_MEMORY = "/dev/shm"
# Of living trees there are some 20 MB at a time; what failed tests leave is kept.
_BYTES_NEEDED = 2 << 30


def _suits(path: str) -> bool:
    """Whether there is room for trees with programs and device nodes in a directory."""
    if not Path(path).is_dir() or not os.access(path, os.W_OK | os.X_OK):
        return False
    told = os.statvfs(path)
    refused = told.f_flag & (os.ST_NOEXEC | os.ST_RDONLY)
    return not refused and told.f_bavail * told.f_frsize >= _BYTES_NEEDED


# Short whatever TMPDIR says: the path of a unix socket has 107 bytes.
SHORT = _IN_MEMORY if _suits(_IN_MEMORY) else "/tmp"
