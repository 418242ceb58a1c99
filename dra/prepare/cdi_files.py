"""The CDI files of claims: their names, and reading, writing and removing them.

One file a claim. The name is that of NVIDIA's driver (`.yaml`, with JSON in it, which is YAML), so that a
take-over rewrites a claim's file and never doubles it. Source: CDI specification, names and directories.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

from dra.errors import HostError
from dra.host.files import ensure_dir, host_error, is_leftover, read_bytes, remove_durable, write_durable
from dra.inventory.names import parse_device_name
from dra.prepare.model import is_safe_uid

CDI_CLASS = "claim"
# A container engine reads specs as root; others may look.
_MODE = 0o644
_SHARE = re.compile(r"(?P<device>.+)-(?P<share>[0-9a-f]{8})", re.ASCII)


def cdi_kind(driver: str) -> str:
    """Give the kind of a driver's specs: `k8s.gpu.nvidia.com/claim`."""
    return f"k8s.{driver}/{CDI_CLASS}"


def cdi_device_name(uid: str, device: str, share_id: str | None = None) -> str:
    """Give the name of a device in its claim's spec: `<uid>-gpu-0`, with a share `<uid>-gpu-0-<8 characters>`."""
    return f"{uid}-{device}" + (f"-{share_id[:8]}" if share_id else "")


class CdiFiles:
    """The specs of one driver in one CDI directory. Holds no state; thread-safe."""

    def __init__(self, root: Path, *, driver: str) -> None:
        self.kind = cdi_kind(driver)
        self._root = root
        self._prefix = f"k8s.{driver}-{CDI_CLASS}_"

    def path(self, uid: str) -> Path:
        """Give the file of a claim."""
        return self._root / f"{self._prefix}{uid}.yaml"

    def cdi_id(self, uid: str, device: str, share_id: str | None) -> str:
        """Give the qualified name that the kubelet passes to the container engine."""
        return f"{self.kind}={cdi_device_name(uid, device, share_id)}"

    def is_ours(self, path: Path) -> bool:
        """Whether a path is that of a claim's spec, so that it may be removed."""
        return path.name.startswith(self._prefix) and path.suffix in (".yaml", ".json")

    def write(self, path: Path, data: bytes) -> None:
        """Write a spec, making the directory if it is not there.

        Not fsynced: a spec means nothing after a reboot, when the kubelet prepares again.

        Raises:
            HostError: DRA-HOST-NO-SPACE, DRA-HOST-READ-ONLY, ... naming the path.
        """
        try:
            write_durable(path, data, mode=_MODE, fsync=False)
        except HostError as error:
            if error.code != "DRA-HOST-MISSING":
                raise
            ensure_dir(path.parent)
            write_durable(path, data, mode=_MODE, fsync=False)

    def digest(self, path: Path) -> str | None:
        """Give the SHA-256 of a spec as it is on disk; None if there is none."""
        data = read_bytes(path)
        return None if data is None else hashlib.sha256(data).hexdigest()

    def remove(self, path: Path) -> None:
        """Remove a spec; fine if it is not there, even on a read-only disk.

        Raises:
            HostError: it is there and cannot be removed.
        """
        if os.path.lexists(path):
            remove_durable(path, fsync=False)

    def uids(self) -> set[str]:
        """Give the claims that have a spec.

        Raises:
            HostError: the directory is there and cannot be read.
        """
        found = set()
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    stem = entry.name.removesuffix(".yaml")
                    uid = stem.removeprefix(self._prefix)
                    if entry.name != stem != uid and is_safe_uid(uid):
                        found.add(uid)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError as error:
            raise host_error(error, "read", self._root) from error
        return found

    def devices(self, uid: str) -> tuple[tuple[str, str | None], ...]:
        """Give what a claim's spec tells of its devices: (device, first characters of the share id)."""
        try:
            data = read_bytes(self.path(uid)) or b""
        except HostError:
            return ()
        # Not parsed: this is asked for when something is broken, and NVIDIA's own files are other YAML.
        pattern = rb"name\"?:\s*\"?" + re.escape(uid.encode()) + rb"-([a-z0-9-]+)"
        return tuple(dict.fromkeys(_split(name.decode()) for name in re.findall(pattern, data)))

    def remove_leftovers(self, *, older_than_seconds: float) -> int:
        """Remove temporary files of writes that never ended; give how many."""
        removed = 0
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if is_leftover(entry.name, prefix=self._prefix):
                        removed += remove_if_old(Path(entry.path), older_than_seconds)
        except OSError:
            return removed
        return removed


def remove_if_old(path: Path, older_than_seconds: float) -> bool:
    """Remove a temporary file that nobody can be writing any more; whether it was removed."""
    try:
        if time.time() - path.stat().st_mtime < older_than_seconds:
            return False
        path.unlink()
    except OSError:
        return False
    return True


def _split(name: str) -> tuple[str, str | None]:
    match = _SHARE.fullmatch(name)
    if match and parse_device_name(match["device"]):
        return match["device"], match["share"]
    return name, None
