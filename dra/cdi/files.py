"""The CDI files of claims: names, writing, removing, and which of them nobody needs any more.

One file a claim, by the name NVIDIA's driver gives it, so that a take-over rewrites a claim's file and never doubles it.
Files of others in the same directory are never touched: ours are known by their name and by the kind in them.

Source: CDI specification, sections on directories, file names and transient specs.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.cdi.checked import CheckedSpec, as_checked
from dra.cdi.spec import CLASS, encode, kind_of
from dra.errors import ClaimError, HostError
from dra.host.files import ensure_dir, host_error, read_bytes, remove_durable, write_durable

# Engines run as root, but rootless ones and people read here too.
MODE = 0o644
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
_KIND_LINE = re.compile(rb"^kind:[ \t]*[\"']?([^\"'\s]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ClaimSpecFile:
    """A spec of one of our claims."""

    claim_uid: str
    path: Path


class SpecFiles:
    """The specs of one DRA driver in one CDI directory. Holds no state; safe for several threads and processes."""

    def __init__(
        self,
        cdi_root: Path,
        *,
        driver: str = "gpu.nvidia.com",
    ) -> None:
        self._root = cdi_root
        self._kind = kind_of(driver)
        self._prefix = f"k8s.{driver}-{CLASS}_"

    def path(self, claim_uid: str) -> Path:
        """Give the file of a claim, whether it is there or not.

        Raises:
            ClaimError: DRA-CLAIM-UID-FORM: the UID cannot be part of a file name.
        """
        if _UID.fullmatch(claim_uid) is None:
            raise ClaimError(
                "DRA-CLAIM-UID-FORM",
                f"{claim_uid[:140]!r} is no UID that the API server makes",
                remedy="Check what calls the plugin's socket.",
            )
        return self._root / f"{self._prefix}{claim_uid}.yaml"

    def write(self, claim_uid: str, spec: Mapping[str, Any], *, fsync: bool = True) -> Path:
        """Check a spec, write it in one step, read it back; make the directory if it is not there.

        Raises:
            BugError: DRA-CDI-INVALID; nothing was written.
            HostError: DRA-HOST-NO-SPACE, DRA-HOST-READ-ONLY, DRA-CDI-READ-BACK, ...: the file is the old one, or none.
        """
        data = as_checked(spec).data
        path = self.path(claim_uid)
        try:
            write_durable(path, data, mode=MODE, fsync=fsync)
        except HostError as error:
            if error.code != "DRA-HOST-MISSING":
                raise
            ensure_dir(self._root)
            write_durable(path, data, mode=MODE, fsync=fsync)
        if read_bytes(path) != data:
            raise HostError(
                "DRA-CDI-READ-BACK",
                f"{path} does not hold what was just written to it",
                remedy="Check the disk, and whether something else writes to that directory.",
                path=str(path),
            )
        return path

    def remove(self, claim_uid: str) -> bool:
        """Remove a claim's spec; False if there was none. Containers that run do not notice.

        Raises:
            HostError: it is there and cannot be removed.
        """
        path = self.path(claim_uid)
        # Also fine on a read-only disk if there is nothing to remove.
        return os.path.lexists(path) and remove_durable(path)

    def needs_rewrite(self, path: Path, spec: Mapping[str, Any]) -> bool:
        """Whether the file is missing, differs from the spec, or cannot be read by others.

        Raises:
            HostError: it is there and cannot be read.
        """
        try:
            if stat.S_IMODE(path.lstat().st_mode) != MODE:
                return True
        except FileNotFoundError:
            return True
        except OSError as error:
            raise host_error(error, "read", path) from error
        return read_bytes(path) != (spec.data if isinstance(spec, CheckedSpec) else encode(spec))

    def list_ours(self) -> tuple[ClaimSpecFile, ...]:
        """Give the specs in the directory that are ours by name and by kind, by name.

        A file of our name that is empty is ours too: it is what a crash without fsync leaves.

        Raises:
            HostError: the directory is there and cannot be read.
        """
        found = []
        for name in self._names():
            claim_uid = name.removeprefix(self._prefix).removesuffix(".yaml")
            if name != f"{self._prefix}{claim_uid}.yaml" or not _UID.fullmatch(claim_uid):
                continue
            path = self._root / name
            try:
                data = read_bytes(path) if stat.S_ISREG(path.lstat().st_mode) else None
            except (OSError, HostError):
                continue
            if data is not None and (not data.strip() or kind_in(data) == self._kind):
                found.append(ClaimSpecFile(claim_uid, path))
        return tuple(found)

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self._root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise host_error(error, "read", self._root) from error


def kind_in(data: bytes) -> str:
    """Give the kind of a spec as it lies on disk, JSON or the YAML of NVIDIA's driver; empty if it gives none."""
    try:
        spec = json.loads(data)
    except (ValueError, RecursionError):
        match = _KIND_LINE.search(data)
        return match[1].decode("ascii", "replace") if match else ""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    return kind if isinstance(kind, str) else ""
