"""What is left of an MPS daemon that NVIDIA's driver started for a claim: a Deployment, a tmpfs and a directory.

The daemon serves the claim's containers as long as they run. With the claim's end its directory on this node goes; its
Deployment is deleted only where the administrator said so (`--clean-up-mps-deployments`), by its name and nothing else.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from dra.errors import DraError, HostError
from dra.telemetry.log import error_fields, get_logger

# <claim UID>-<5 hex digits>, as the driver makes them.
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-[0-9a-f]{1,16}", re.ASCII)
PREFIX = "mps-control-daemon-"

# Deletes a Deployment of this name in the driver's namespace. Raises DraError; fine if there is none.
DeleteDeployment = Callable[[str], None]


def deployment_name(daemon_id: str) -> str:
    """Give the name of a daemon's Deployment."""
    return f"{PREFIX}{daemon_id}"


class ForeignMps:
    """The leftovers of one daemon.

    Args:
        daemon_id: as the checkpoint has it.
        state_dir: the driver's directory, which was NVIDIA's driver's too.
        delete: None: the Deployment is left, and named in the log.
    """

    kind: ClassVar[str] = "nvidia-mps"
    # A Deployment outlives a reboot.
    ends_with_boot: ClassVar[bool] = False
    shared_resource: str | None = None

    def __init__(self, daemon_id: str, *, state_dir: Path, delete: DeleteDeployment | None = None) -> None:
        if not _ID.fullmatch(daemon_id):
            raise ValueError(f"{daemon_id[:100]!r} is no id of a daemon")
        self._id = daemon_id
        self._directory = state_dir / "mps" / daemon_id
        self._delete = delete
        self._log = get_logger()

    @classmethod
    def revive(
        cls, args: Mapping[str, Any], *, state_dir: Path, delete: DeleteDeployment | None
    ) -> ForeignMps:
        """Make the effect that clears up."""
        return cls(str(args["id"]), state_dir=state_dir, delete=delete)

    def args(self) -> Mapping[str, Any]:
        """Give the id."""
        return {"id": self._id}

    def apply(self) -> None:
        """Do nothing: it is never made here."""

    def verify(self) -> bool:
        """Whether the daemon's directory is still there."""
        return self._directory.is_dir()

    def undo(self) -> None:
        """Take away what is left. Raises HostError; a Deployment that cannot be deleted is only told of."""
        name = deployment_name(self._id)
        if self._delete is None:
            self._log.warning(
                "mps_deployment_left", deployment=name,
                remedy="Delete it, or start the plugin with --clean-up-mps-deployments.",
            )  # fmt: skip
        else:
            try:
                self._delete(name)
                self._log.info("mps_deployment_deleted", deployment=name)
            except DraError as error:
                # The pod's end must not wait for it.
                self._log.warning("mps_deployment_left", deployment=name, **error_fields(error))
        self._clear(self._directory)

    def _clear(self, directory: Path) -> None:
        if not directory.is_dir():
            return
        shm = directory / "shm"
        if shm.is_mount():
            self._unmount(shm)
        if shm.is_mount():
            raise HostError(
                "DRA-MPS-SHM-BUSY",
                f"{shm} is still mounted",
                remedy="A process holds it; the call is retried. umount --lazy frees it by hand.",
                path=str(shm),
            )
        shutil.rmtree(directory, ignore_errors=True)

    @staticmethod
    def _unmount(path: Path) -> None:
        # The image has no umount program. Source: umount2(2), MNT_DETACH.
        ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(path), 2)
