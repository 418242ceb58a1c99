"""The plugin's side of the MPS keeper: calls over its unix socket, and what to do where it is gone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.errors import DeviceError, DraError, HostError
from dra.host.files import read_bytes
from dra.host.processes import start_ticks
from dra.prepare.sharing.mps import DaemonStatus
from dra.prepare.sharing.mps_folders import remove_folders
from dra.prepare.sharing.mps_model import (
    LINE_BYTES,
    PROTOCOL,
    SOCKET_NAME,
    TABLE_NAME,
    DaemonSpec,
    daemon_folders,
    mps_folder,
)
from dra.telemetry.log import get_logger

log = get_logger()

ABSENT = "DRA-MPS-KEEPER-ABSENT"
# The kubelet gives up after 45 s; a daemon that starts takes a second or two.
ENSURE_SECONDS = 32.0
STOP_SECONDS = 32.0
ASK_SECONDS = 5.0
_CONNECT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class KeeperEvent:
    """Something that the keeper noticed about a daemon."""

    number: int
    daemon: str
    reason: str
    message: str


class KeeperClient:
    """Calls to the keeper of one state directory. Thread-safe: each call has a connection of its own.

    Args:
        state_dir: the driver's directory.
        proc: where the processes of the node can be seen, the keeper's among them.
    """

    def __init__(self, state_dir: Path, *, proc: Path = Path("/proc")) -> None:
        self._state_dir, self._proc = state_dir, proc
        self._socket = mps_folder(state_dir) / SOCKET_NAME

    def hello(self) -> None:
        """Ask whether it is there. Raises DraError."""
        self._call({"op": "hello"}, seconds=ASK_SECONDS)

    def ensure(self, spec: DaemonSpec) -> None:
        """Have a daemon run. Raises DraError."""
        self._call({"op": "ensure", "daemon": spec.as_json()}, seconds=ENSURE_SECONDS)

    def status(self, daemon_id: str) -> DaemonStatus | None:
        """Give what is known of a daemon. Raises DraError."""
        found = self._call({"op": "status", "id": daemon_id}, seconds=ASK_SECONDS)
        return _status(found) if found.get("known") else None

    def stop(self, daemon_id: str) -> None:
        """End a daemon and remove its files.

        A keeper that is gone keeps nobody from that where its daemon is gone too (they end together with its pod).

        Raises:
            DraError: the keeper is gone and the daemon lives, or cannot be ended.
        """
        try:
            self._call({"op": "stop", "id": daemon_id}, seconds=STOP_SECONDS)
        except DraError as error:
            if error.code != ABSENT or self._may_live(daemon_id):
                raise
            log.info("mps_daemon_cleared_without_keeper", daemon=daemon_id)
            remove_folders(daemon_folders(self._state_dir, daemon_id))

    def list(self) -> Sequence[DaemonStatus]:
        """Give all daemons. Raises DraError."""
        found = self._call({"op": "list"}, seconds=ASK_SECONDS)
        return [_status(item) for item in found.get("daemons", ()) if item.get("known")]

    def events(self, after: int | None, *, wait_seconds: float) -> tuple[Sequence[KeeperEvent], int]:
        """Give what happened after a number, and the last number; waits for it. Raises DraError."""
        request = {"op": "events", "after": after, "wait_seconds": wait_seconds}
        found = self._call(request, seconds=wait_seconds + ASK_SECONDS)
        events = [
            KeeperEvent(int(e["number"]), str(e["daemon"]), str(e["reason"]), str(e["message"]))
            for e in found.get("events", ())
        ]
        return events, int(found.get("last", 0))

    def _call(self, request: Mapping[str, Any], *, seconds: float) -> Mapping[str, Any]:
        line = json.dumps({"v": PROTOCOL, **request}).encode() + b"\n"
        try:
            with _connect(self._socket) as connection:
                connection.settimeout(seconds)
                connection.sendall(line)
                with connection.makefile("rb") as lines:
                    answer = lines.readline(LINE_BYTES + 1)
        except TimeoutError as error:
            raise HostError(
                "DRA-MPS-KEEPER-HUNG",
                f"the MPS keeper has not answered within {seconds:g} s ({request['op']})",
                remedy="The call is retried by itself; look at the log of the keeper's pod.",
            ) from error
        except OSError as error:
            raise self._absent(error.strerror or str(error)) from error
        if not answer.endswith(b"\n"):
            raise self._absent("it closed the connection")
        return _result(answer)

    def _absent(self, why: str) -> HostError:
        return HostError(
            ABSENT,
            f"the MPS keeper of this node cannot be reached at {self._socket}: {why}",
            remedy="MPS needs it: deploy it (deploy/manifests/mps-keeper.yaml), or see why its pod on this node does not "
            "run; the call is retried by itself.",
        )

    def _may_live(self, daemon_id: str) -> bool:
        """Whether the process that the keeper's table names for a daemon is there."""
        try:
            data = read_bytes(mps_folder(self._state_dir) / TABLE_NAME)
            rows = [] if data is None else json.loads(data)["daemons"]
            for row in rows:
                if row["spec"]["id"] == daemon_id:
                    return bool(row["pid"]) and start_ticks(int(row["pid"]), self._proc) == row["started"]
        except (DraError, ValueError, KeyError, TypeError):
            return True  # nobody can say
        return False


def visible_processes(proc: Path) -> Path:
    """Give where processes of the node can be seen: `proc`, unless that is a simulated node's."""
    return proc if (proc / "self").exists() else Path("/proc")


def _connect(path: Path) -> socket.socket:
    """Connect to a socket at a path of any length. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_SECONDS)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except BaseException:
        connection.close()
        raise
    return connection


def _result(answer: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(answer)
        if found["ok"]:
            return dict(found)
        error = found["error"]
        raise DeviceError(
            str(error["code"]),
            str(error["message"]),
            remedy=str(error.get("remedy", "")),
            retryable=bool(error.get("retryable")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(
            "DRA-MPS-KEEPER-VERSION",
            f"the MPS keeper's answer cannot be understood: {answer[:80]!r}",
            remedy="Bring plugin and keeper to the same version.",
        ) from error


def _status(found: Mapping[str, Any]) -> DaemonStatus:
    try:
        spec = DaemonSpec.from_json(found["daemon"])
    except (ValueError, KeyError) as error:
        raise HostError(
            "DRA-MPS-KEEPER-VERSION",
            f"the MPS keeper's answer cannot be understood: {error}",
            remedy="Bring plugin and keeper to the same version.",
        ) from error
    return DaemonStatus(
        spec, bool(found.get("ready")), int(found.get("pid", 0)), int(found.get("restarts", 0))
    )
