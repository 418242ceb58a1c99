"""The door of a running cluster: other commands ask through a unix socket in its directory.

One request and one answer a connection, each a line of JSON. Only the user who runs the cluster can open the socket.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra.errors import ConfigError, DraError
from dra.sim.run_file import SOCKET, running
from dra.telemetry.log import error_fields, get_logger

log = get_logger()
Json = dict[str, Any]
Answer = Callable[[Json], Any]

_LARGEST_REQUEST = 1 << 20
# Restarting a kubelet or stopping a driver takes seconds.
_PATIENCE_SECONDS = 60.0


class Door:
    """Answers requests one after the other, in a thread of its own.

    Args:
        root: the cluster's directory.
        answer: gives the answer to a request; a DraError it raises reaches the asker.
    """

    def __init__(self, root: Path, answer: Answer) -> None:
        self._answer = answer
        self._path = root / SOCKET
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(self._path))
        finally:
            os.umask(before)
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._run, name="sim-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._path.unlink(missing_ok=True)
        # Closing alone does not wake a thread that waits in accept.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5.0)
                try:
                    self._serve(connection)
                except (OSError, ValueError) as error:
                    log.info("sim_door_failed", error=str(error))

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline(_LARGEST_REQUEST))
        try:
            answer: Json = {"answer": self._answer(request)}
        except DraError as error:
            usage = isinstance(error, ConfigError)
            answer = {
                "error": {
                    "code": error.code,
                    "message": error.message,
                    "remedy": error.remedy,
                    "usage": usage,
                }
            }
        except Exception as error:  # marked border: the door stays open
            log.exception("sim_request_failed", **error_fields(error))
            answer = {
                "error": {
                    "code": "DRA-BUG",
                    "message": f"{type(error).__name__}: {error}",
                    "remedy": "",
                    "usage": False,
                }
            }
        connection.sendall(json.dumps(answer).encode() + b"\n")


def ask(root: Path, request: Json) -> Any:
    """Ask the cluster that runs in a directory.

    Raises:
        DraError: DRA-SIM-NOT-RUNNING, DRA-SIM-NO-ANSWER, or what the cluster answered.
    """
    found = running(root)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PATIENCE_SECONDS)
            connection.connect(str(root / SOCKET))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline())
    except (OSError, ValueError) as error:
        raise DraError(
            "DRA-SIM-NO-ANSWER",
            f"the simulated cluster (process {found.pid}) does not answer: {error}",
            remedy="It may still be starting; otherwise end it with: dra sim down.",
        ) from error
    if "error" in answer:
        failed = answer["error"]
        kind = ConfigError if failed["usage"] else DraError
        raise kind(failed["code"], failed["message"], remedy=failed["remedy"])
    return answer["answer"]
