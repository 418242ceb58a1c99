"""The server's certificate: loaded, looked at again when its files change, and judged.

A Secret that is renewed changes the files of its volume a minute later, by a symbolic link; new connections then get the
new certificate, open ones keep theirs. Files that cannot be loaded leave the old certificate in use, and say so.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dra.errors import HostError
from dra.telemetry.log import error_fields, get_logger

log = get_logger()
# How often the files are looked at.
LOOK_SECONDS = 5.0


class Certificate:
    """A certificate and its key in two PEM files. Safe for several threads.

    Args:
        wall: seconds since 1970.
    """

    def __init__(self, cert_file: Path, key_file: Path, *, wall: Callable[[], float] = time.time) -> None:
        self._cert_file, self._key_file, self._wall = cert_file, key_file, wall
        self._lock = threading.Lock()
        self._signature: tuple[object, ...] = ()
        self._context: ssl.SSLContext | None = None
        self._ends: float | None = None
        self._error = "it was not loaded yet"

    @property
    def context(self) -> ssl.SSLContext | None:
        """What connections are made with; None until a certificate could be loaded."""
        return self._context

    def look(self) -> bool:
        """Load the files if they differ from those that were loaded last; whether anything is new."""
        with self._lock:
            try:
                signature = (_signature(self._cert_file), _signature(self._key_file))
            except OSError as error:
                self._failed(_no_certificate(error.filename or self._cert_file, error.strerror or str(error)))
                return False
            if signature == self._signature:
                # What was wrong with the files is over: it is worth a word when it comes back.
                self._error = ""
                return False
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(self._cert_file, self._key_file)
            except (OSError, ValueError) as error:
                # Half of a renewal may be there: looked at again, until both halves fit.
                self._failed(_no_certificate(self._cert_file, str(error)))
                return False
            self._signature, self._context, self._error = signature, context, ""
            self._ends = _end_of(self._cert_file)
            log.info("certificate_loaded", path=str(self._cert_file), ends=self._ends)
            return True

    def trouble(self) -> str:
        """Say why no connection can be served well; empty if all is well."""
        if self._context is None:
            return f"no certificate: {self._error}"
        if self._ends is not None and self._ends <= self._wall():
            return f"the certificate {self._cert_file} has expired"
        return ""

    def _failed(self, error: HostError) -> None:
        if error.message != self._error:
            log.warning("certificate_not_loaded", **error_fields(error))
        self._error = error.message


def _signature(path: Path) -> tuple[int, int, int]:
    seen = path.stat()
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def _end_of(path: Path) -> float | None:
    """Give the end of the first certificate's life in seconds since 1970; None if it cannot be told."""
    decode = getattr(getattr(ssl, "_ssl", None), "_test_decode_cert", None)
    if decode is None:
        return None
    try:
        return ssl.cert_time_to_seconds(decode(os.fspath(path))["notAfter"])
    except (OSError, ValueError, KeyError, ssl.SSLError):
        return None


def _no_certificate(path: object, reason: str) -> HostError:
    return HostError(
        "DRA-WEBHOOK-CERTIFICATE",
        f"the certificate {path} cannot be used: {reason}",
        remedy="Check the Secret with tls.crt and tls.key that is mounted there; it is looked at again by itself.",
        retryable=True,
    )
