"""The CDI files of claims, as prepare needs them: written, compared, removed, and read for what a lost record held.

Names, content and rules are those of `dra.cdi`; one file a claim.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dra.cdi.files import SpecFiles
from dra.cdi.spec import kind_of
from dra.errors import HostError
from dra.host.files import is_leftover, read_bytes
from dra.inventory.names import parse_device_name
from dra.prepare.record_files import discard

_SHARE = re.compile(r"(?P<device>.+)-(?P<share>[0-9a-f]{8})", re.ASCII)


class CdiFiles:
    """The specs of one driver in one CDI directory. Holds no state; thread-safe."""

    def __init__(self, root: Path, *, driver: str) -> None:
        self.kind = kind_of(driver)
        self._root = root
        self._specs = SpecFiles(root, driver=driver)
        self._prefix = self._specs.path("x").name.removesuffix("x.yaml")

    def path(self, uid: str) -> Path:
        """Give the file of a claim."""
        return self._specs.path(uid)

    def is_ours(self, path: Path) -> bool:
        """Whether a path is that of a claim's spec, so that it may be removed."""
        return path.name.startswith(self._prefix) and path.suffix in (".yaml", ".json")

    def write(self, uid: str, spec: Mapping[str, Any]) -> None:
        """Write a spec, making the directory if it is not there.

        Not fsynced: within a boot every reader sees what was renamed into place, whole, also after a crash of this
        process. Only a power failure could tear it, and then it means nothing any more: the kubelet prepares again
        what still runs here, `Engine.open` removes the specs of an earlier boot, and the janitor finds, by its
        name, one that nothing tells of. CDI directories are usually on tmpfs anyway.

        Raises:
            HostError: DRA-HOST-NO-SPACE, DRA-HOST-READ-ONLY, ... naming the path.
        """
        try:
            self._specs.write(uid, spec, fsync=False)
        except HostError as error:
            if error.code != "DRA-HOST-IS-DIRECTORY":
                raise
            discard(self.path(uid), fsync=False)
            self._specs.write(uid, spec, fsync=False)

    def is_as(self, uid: str, spec: Mapping[str, Any]) -> bool:
        """Whether a claim's file is there and has this content."""
        return not self._specs.needs_rewrite(self.path(uid), spec)

    def content(self, uid: str, *, sha256: str) -> Mapping[str, Any] | None:
        """Give a claim's spec if the file is the one with this digest, whole and readable for others.

        Raises:
            HostError: it is there and cannot be read.
        """
        data = read_bytes(self.path(uid))
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            return None
        try:
            spec = json.loads(data)
        except ValueError:
            return _foreign(data)
        return spec if isinstance(spec, dict) and self.is_as(uid, spec) else None

    def remove(self, path: Path) -> None:
        """Remove a spec; fine if it is not there, even on a read-only disk.

        Raises:
            HostError: it is there and cannot be removed.
        """
        if os.path.lexists(path):
            discard(path, fsync=False)

    def uids(self) -> set[str]:
        """Give the claims that have a spec of ours.

        Raises:
            HostError: the directory is there and cannot be read.
        """
        return {file.claim_uid for file in self._specs.list_ours()}

    def devices(self, uid: str) -> tuple[tuple[str, str | None], ...]:
        """Give what a claim's spec tells of its devices: (device, first characters of the share id)."""
        try:
            data = read_bytes(self.path(uid)) or b""
        except HostError:
            return ()
        # Not parsed: this is asked for when something is broken, and NVIDIA's own files are other YAML.
        pattern = rb"name\"?:\s*\"?" + re.escape(uid.encode()) + rb"-([a-z0-9-]+)"
        return tuple(dict.fromkeys(_split(name.decode()) for name in re.findall(pattern, data)))

    def leftovers(self) -> list[Path]:
        """Give the temporary files of writes that never ended, or have not yet."""
        try:
            with os.scandir(self._root) as entries:
                return [Path(entry.path) for entry in entries if is_leftover(entry.name, prefix=self._prefix)]
        except OSError:
            return []


def _foreign(data: bytes) -> Mapping[str, Any] | None:
    """Read a spec that was taken over as NVIDIA's driver wrote it; rare, and so is what it needs."""
    import yaml

    try:
        spec = yaml.safe_load(data)
    except yaml.YAMLError:
        return None
    return spec if isinstance(spec, dict) else None


def _split(name: str) -> tuple[str, str | None]:
    match = _SHARE.fullmatch(name)
    if match and parse_device_name(match["device"]):
        return match["device"], match["share"]
    return name, None
