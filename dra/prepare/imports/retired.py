"""What was put by at a change of drivers: NVIDIA's checkpoints and our own records, numbered in order of time.

They are for people to look at: nothing reads them again. So that changing back and forth does not fill the disk of the kubelet,
the newest few of a kind are kept.
"""

from __future__ import annotations

import re
import shutil
import stat
from pathlib import Path

from dra.host.files import host_error, sync_dir
from dra.telemetry.log import error_fields, get_logger

KEPT = 5


def put_by(path: Path, word: str, *, action: str) -> Path:
    """Rename a file or directory to `<name>.<word>-<n>` in one step, and give its new path. Older ones are removed.

    Args:
        path: what is put by.
        word: how it is called from now on, such as `imported`.
        action: what an error says could not be done with it.

    Raises:
        HostError: it cannot be renamed. That an older one cannot be removed is only logged.
    """
    try:
        before = _put_by_before(path, word)
        target = path.with_name(f"{path.name}.{word}-{1 + max(before, default=0)}")
        path.rename(target)
        sync_dir(target.parent)
    except OSError as error:
        raise host_error(error, action, path) from error
    for number in sorted(before, reverse=True)[KEPT - 1 :]:
        _remove(before[number])
    return target


def _put_by_before(path: Path, word: str) -> dict[int, Path]:
    name = re.compile(rf"{re.escape(f'{path.name}.{word}')}-(\d{{1,12}})", re.ASCII)
    found = ((name.fullmatch(each.name), each) for each in path.parent.iterdir())
    return {int(match[1]): each for match, each in found if match}


def _remove(path: Path) -> None:
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        get_logger().warning("retired_not_removed", **error_fields(host_error(error, "remove", path)))
