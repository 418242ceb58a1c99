"""Record files that could not be read: under which names they lie beside the records, and what they still tell.

`<uid>.json.corrupt-<n>` waits for its claim to be prepared or unprepared; of one claim the newest few are kept. A file that was set
aside under another name, by hand or by another program, waits for nobody: it is kept for a week.
"""

from __future__ import annotations

import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from dra.api.claim import ClaimRef
from dra.errors import HostError
from dra.host.files import host_error
from dra.prepare.model import is_safe_uid
from dra.prepare.record_files import discard
from dra.telemetry.log import error_fields, get_logger

KEPT_OF_A_CLAIM = 3
STRAY_SECONDS = 7 * 86400.0
STRAYS_KEPT = 16

_MARK = ".corrupt"
_NAME = re.compile(r"(?P<uid>.+)\.json\.corrupt-(?P<number>\d{1,12})", re.ASCII)
# What a damaged file may still tell. Both spellings of JSON: with and without a space after the colon.
_TELLS = re.compile(rb'"(device|namespace|name|share_id)":\s*"([A-Za-z0-9._-]{1,253})"')

log = get_logger()


@dataclass(frozen=True, slots=True)
class Told:
    """What a damaged file tells: the claim as far as it is named, and names of devices."""

    ref: ClaimRef
    devices: tuple[str, ...]


def claim_of(name: str) -> str | None:
    """Give the UID of the claim whose record was set aside under a name; None if that is no such name."""
    match = _NAME.fullmatch(name)
    return match["uid"] if match and is_safe_uid(match["uid"]) else None


def of_claim(directory: Path, uid: str) -> list[Path]:
    """Give what was set aside of a claim, the oldest first. Raises OSError."""
    found = [path for path in directory.iterdir() if claim_of(path.name) == uid]
    return sorted(found, key=_number)


def set_aside(path: Path, uid: str) -> Path:
    """Rename a record that cannot be used; give its new path. Of older ones of the claim a few are kept.

    Raises:
        HostError: it cannot be renamed, as on a read-only disk.
    """
    try:
        before = of_claim(path.parent, uid)
        target = path.with_name(f"{uid}.json{_MARK}-{1 + (_number(before[-1]) if before else 0)}")
        path.rename(target)
    except OSError as error:
        raise host_error(error, "set aside", path) from error
    for old in before[: len(before) + 1 - KEPT_OF_A_CLAIM]:
        try:
            discard(old, fsync=False)
        except HostError as error:
            log.warning("set_aside_not_removed", **error_fields(error))
    return target


def told_by(data: bytes, uid: str) -> Told:
    """Give what a damaged file of a claim still tells. Nothing of it is certain."""
    told: dict[str, list[str]] = {}
    for key, value in _TELLS.findall(data):
        told.setdefault(key.decode(), []).append(value.decode())
    namespace, name = told.get("namespace", [""])[0], told.get("name", [""])[0]
    ref = ClaimRef(namespace, name, uid) if namespace and name else ClaimRef("", "", uid)
    return Told(ref, tuple(dict.fromkeys(told.get("device", ()))))


def remove_strays(directory: Path) -> int:
    """Remove files that were set aside under names of no claim: those of more than a week, and too many; how many.

    A directory is left: what is in it is not ours.
    """
    try:
        names = [path for path in directory.iterdir() if _MARK in path.name and claim_of(path.name) is None]
    except OSError:
        return 0
    ages: list[tuple[float, Path]] = []
    for path in names:
        try:
            status = path.lstat()
        except OSError:
            continue
        # When it got its name, which is not when it was written.
        if not stat.S_ISDIR(status.st_mode):
            ages.append((time.time() - status.st_ctime, path))
    removed = 0
    for place, (age, path) in enumerate(sorted(ages)):
        if age < STRAY_SECONDS and place < STRAYS_KEPT:
            continue
        try:
            path.unlink()
        except OSError as error:
            log.warning("set_aside_not_removed", **error_fields(host_error(error, "remove", path)))
            continue
        removed += 1
    return removed


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
