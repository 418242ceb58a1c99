"""The keeper's unix socket: one JSON object a line, one answer a line. For root and for the keeper's own user only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dra.errors import ConfigError, DraError, HostError
from dra.host.files import ensure_dir, host_error
from dra.mps.keeper import Keeper
from dra.prepare.sharing.mps_model import LINE_BYTES, PROTOCOL, DaemonSpec, check_id
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

# Connections at once; each has a thread. The plugin's prepare calls, and its wait for events.
_CONNECTIONS = 96
# A connection that says nothing for so long is closed.
_IDLE_SECONDS = 120.0
_MAX_WAIT_SECONDS = 60.0
# struct ucred. Source: unix(7).
_UCRED = struct.Struct("3i")


class KeeperServer:
    """Serves a keeper. `path` is made anew: who holds the keeper's lock owns the name."""

    def __init__(self, keeper: Keeper, path: Path) -> None:
        self._keeper, self._path = keeper, path
        self._listener: socket.socket | None = None
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def start(self) -> None:
        """Listen.

        Raises:
            HostError: the socket cannot be made.
        """
        ensure_dir(self._path.parent)
        try:
            self._listener = listen(self._path)
        except OSError as error:
            raise host_error(error, "listen on", self._path) from error
        start_thread(threading.Thread(target=self._accept, name="mps-accept", daemon=True))

    def stop(self) -> None:
        """Stop listening, and end all connections."""
        self._stopping = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._path.unlink(missing_ok=True)
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._stopping:
                    return
                continue
            if not may_ask(connection) or not self._places.acquire(blocking=False):
                connection.close()
                continue
            try:
                start_thread(
                    threading.Thread(target=self._serve, args=(connection,), name="mps-call", daemon=True)
                )
            except HostError as error:
                self._places.release()
                connection.close()
                log.warning("mps_call_refused", **error_fields(error))

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            connection.settimeout(_IDLE_SECONDS)
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline(LINE_BYTES + 1):
                    if len(line) > LINE_BYTES:
                        return
                    connection.sendall(json.dumps(self.answer(line)).encode() + b"\n")
        except OSError:
            return  # the caller has gone
        finally:
            with self._lock:
                self._open.discard(connection)
            self._places.release()

    def answer(self, line: bytes) -> dict[str, Any]:
        """Give the answer to one line. Never raises."""
        try:
            return {"v": PROTOCOL, "ok": True, **self._carry_out(_request(line))}
        except DraError as error:
            log.info("mps_call_failed", **error_fields(error))
            return {"v": PROTOCOL, "ok": False, "error": _error(error)}
        except Exception as error:  # marked border: one call's failure is its own
            log.exception("mps_call_bug")
            bug = HostError(
                "DRA-BUG", f"the MPS keeper met a bug: {error!r}", remedy="Report it with its log."
            )
            return {"v": PROTOCOL, "ok": False, "error": _error(bug)}

    def _carry_out(self, request: Mapping[str, Any]) -> dict[str, Any]:
        keeper, op = self._keeper, request.get("op")
        try:
            match op:
                case "hello":
                    return {"pid": os.getpid()}
                case "ensure":
                    return keeper.ensure(DaemonSpec.from_json(request.get("daemon")))
                case "status":
                    return keeper.status(check_id(request.get("id")))
                case "stop":
                    return {"stopped": keeper.stop(check_id(request.get("id")))}
                case "list":
                    return {"daemons": keeper.all_daemons()}
                case "events":
                    after, wait = request.get("after"), request.get("wait_seconds", 0)
                    if not (after is None or isinstance(after, int)) or not isinstance(wait, (int, float)):
                        raise ValueError("after and wait_seconds are numbers")
                    found, last = keeper.happenings(after, min(float(wait), _MAX_WAIT_SECONDS))
                    return {"events": [each.as_json() for each in found], "last": last}
        except ValueError as error:
            raise _bad(str(error)) from error
        raise _bad(f"there is no operation {str(op)[:40]!r}")


def listen(path: Path) -> socket.socket:
    """Make a listening socket at a path of any length, which only this user (and root) can open. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # An address is at most 107 bytes long.
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
        path.chmod(0o600)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def may_ask(connection: socket.socket) -> bool:
    """Whether who is at the other end is root, or this process's own user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(credentials)
    if uid in (0, os.geteuid()):
        return True
    log.warning("mps_call_refused", uid=uid)
    return False


def _request(line: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad("the line is not JSON") from error
    if not isinstance(request, dict):
        raise _bad("the line is not an object")
    if request.get("v") != PROTOCOL:
        raise ConfigError(
            "DRA-MPS-KEEPER-VERSION",
            f"the MPS keeper speaks version {PROTOCOL} of its protocol, the plugin {str(request.get('v'))[:20]}",
            remedy="Bring the keeper (DaemonSet with OnDelete: delete its pod; that ends its daemons) and the plugin to "
            "the same version.",
            retryable=True,
        )
    return request


def _bad(why: str) -> ConfigError:
    return ConfigError(
        "DRA-MPS-KEEPER-REQUEST",
        f"the MPS keeper does not understand the request: {why}",
        remedy="Bring plugin and keeper to the same version.",
    )


def _error(error: DraError) -> dict[str, Any]:
    return {
        "code": error.code, "message": error.message, "remedy": error.remedy, "retryable": error.retryable,
    }  # fmt: skip
