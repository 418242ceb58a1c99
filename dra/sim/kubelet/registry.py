"""The plugin watcher and reconciler: which sockets there are, and which plugins are registered through them.

Source: kubelet pluginmanager (watcher, reconciler with 1 s period, per-path back-off), DRA plugin handler.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dra.pb.registration_pb2 import PluginInfo
from dra.pb.services import PLUGIN_TYPE
from dra.sim.kubelet.connection import CallError, PluginConnection, RegistrationDial
from dra.sim.kubelet.versions import KubeletVersion, Timings
from dra.telemetry.log import get_logger

log = get_logger()

_CSI_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII | re.IGNORECASE)

Identity = tuple[int, int, int]


@dataclass(slots=True)
class _Attempts:
    """Failed attempts at one path. The path keeps them when the file is re-created; success clears them."""

    delay: float = 0.0
    not_before: float = 0.0


@dataclass(slots=True)
class Registered:
    """A socket through which a plugin is registered; `order` grows with each registration."""

    identity: Identity
    connection: PluginConnection
    order: int


@dataclass(slots=True)
class PluginRegistry:
    """Watches the registry directory in one thread and keeps registrations.

    Args:
        kubelet_root: the kubelet's root directory.
        version: which kubelet this is.
        timings: periods and time limits.
        on_change: called when a plugin registers, leaves, connects or disconnects, with the driver's name.
        on_health: called with the driver's name after each of its health messages.
    """

    kubelet_root: Path
    version: KubeletVersion
    timings: Timings
    on_change: Callable[[str], None] = lambda _driver: None
    on_health: Callable[[str], None] = lambda _driver: None
    attempts: list[tuple[str, str]] = field(default_factory=list)
    _registered: dict[Path, Registered] = field(default_factory=dict)
    _back_off: dict[Path, _Attempts] = field(default_factory=dict)
    _order: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def directory(self) -> Path:
        """The registry directory."""
        return self.kubelet_root / "plugins_registry"

    def start(self) -> None:
        """Make the directory and start to watch it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="kubelet-registry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop as a kubelet that exits: connections end, nobody is told."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            registered, self._registered = self._registered, {}
        for entry in registered.values():
            entry.connection.close()

    def connection(self, driver: str) -> PluginConnection | None:
        """Give the instance to call: the latest connected one, else the latest."""
        with self._lock:
            found = [entry for entry in self._registered.values() if entry.connection.driver == driver]
        found.sort(key=lambda entry: (entry.connection.connected, entry.order))
        return found[-1].connection if found else None

    def connections(self, driver: str) -> list[PluginConnection]:
        """Give all registered instances of a driver, in the order of their registration."""
        with self._lock:
            entries = sorted(self._registered.values(), key=lambda entry: entry.order)
        return [entry.connection for entry in entries if entry.connection.driver == driver]

    def settled(self, driver: str) -> bool:
        """Whether each instance of a driver is registered through the socket that stands at its path now.

        One that was dialled just when its socket was replaced is registered under what stood there before: the next
        round drops its connection, with the calls in it, and registers it once more. A real kubelet does the same,
        and starts its pods again; whoever has no such loop waits for this.
        """
        with self._lock:
            mine = [(p, e.identity) for p, e in self._registered.items() if e.connection.driver == driver]
        return all(identity_of(path) == identity for path, identity in mine)

    def all_connections(self) -> list[PluginConnection]:
        """Give all registered instances of all drivers."""
        with self._lock:
            return [entry.connection for entry in self._registered.values()]

    # -- one round ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self.reconcile()
            self._stop.wait(self.timings.scan)

    def reconcile(self) -> None:
        """Do one round: de-register what is gone or was re-created, then register what is new."""
        desired = find_sockets(self.directory)
        with self._lock:
            gone = [path for path, entry in self._registered.items() if desired.get(path) != entry.identity]
        for path in gone:
            self._deregister(path)
        with self._lock:
            new = [path for path in desired if path not in self._registered and self._may_try(path)]
        # Side by side, so that one that hangs does not delay the others by more than its own time limits.
        threads = [threading.Thread(target=self._register, args=(path, desired[path])) for path in new]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _may_try(self, path: Path) -> bool:
        attempts = self._back_off.get(path)
        return attempts is None or time.monotonic() >= attempts.not_before

    def _deregister(self, path: Path) -> None:
        with self._lock:
            entry = self._registered.pop(path)
        entry.connection.close()
        log.info("sim_plugin_deregistered", driver=entry.connection.driver, path=str(path))
        self.on_change(entry.connection.driver)

    def _register(self, path: Path, identity: Identity) -> None:
        dial = RegistrationDial(path, self.timings)
        try:
            outcome = self._handshake(dial, path, identity)
        except CallError as error:
            outcome = str(error)
        finally:
            dial.close()
        self.attempts.append((path.name, outcome))
        if not outcome:
            self._back_off.pop(path, None)
            return
        attempts = self._back_off.setdefault(path, _Attempts())
        attempts.delay = min(
            max(self.timings.first_back_off, attempts.delay * 2), self.timings.longest_back_off
        )
        attempts.not_before = time.monotonic() + attempts.delay
        log.info("sim_plugin_registration_failed", path=str(path), reason=outcome)

    def _handshake(self, dial: RegistrationDial, path: Path, identity: Identity) -> str:
        """Run the handshake; gives an empty text or why the plugin was refused. Raises CallError."""
        info = dial.get_info()
        refusal = self._refusal(info, path)
        if refusal:
            dial.notify(registered=False, error=refusal)
            return refusal
        connection = PluginConnection(
            info,
            prepare_version=self.version.choose_prepare(info.supported_versions),
            health_version=self.version.choose_health(info.supported_versions),
            timings=self.timings,
            on_change=lambda: self.on_change(info.name),
            on_health=lambda: self.on_health(info.name),
        )
        with self._lock:
            self._order += 1
            self._registered[path] = Registered(identity, connection, self._order)
        connection.start()
        self.on_change(info.name)
        try:
            dial.notify(registered=True)
        except CallError:
            self._deregister(path)
            raise
        connection.told = True
        self.on_change(info.name)
        return ""

    def _refusal(self, info: PluginInfo, path: Path) -> str:
        if info.type != PLUGIN_TYPE:
            return f"no handler registered for plugin type: {info.type} at socket {path}"
        if not self.version.choose_prepare(info.supported_versions):
            return f"none of the services are supported: {', '.join(info.supported_versions)}"
        if self.version.validates_endpoint:
            problem = endpoint_problem(info.name, info.endpoint, kubelet_root=self.kubelet_root)
            if problem:
                return problem
        with self._lock:
            others = [entry.connection for other, entry in self._registered.items() if other != path]
        if any((other.driver, other.endpoint) == (info.name, info.endpoint) for other in others):
            return f"driver {info.name} with endpoint {info.endpoint} is already registered"
        return ""


def find_sockets(directory: Path) -> dict[Path, Identity]:
    """Give the sockets below a directory, hidden names left out, each with what changes on re-creation."""
    found: dict[Path, Identity] = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            path = Path(folder, name)
            identity = None if name.startswith(".") else identity_of(path)
            if identity is not None:
                found[path] = identity
    return found


def identity_of(path: Path) -> Identity | None:
    """Give what changes when the socket at a path is re-created; None without one."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_ctime_ns) if stat.S_ISSOCK(status.st_mode) else None


def endpoint_problem(name: str, endpoint: str, *, kubelet_root: Path) -> str:
    """Give what a 1.37 kubelet finds wrong with a plugin's name or endpoint; empty if nothing."""
    if len(name) > 63 or not _CSI_NAME.fullmatch(name):
        return f"invalid driver name {name!r}"
    if not endpoint or not endpoint.startswith("/"):
        return f"endpoint {endpoint!r} must be an absolute path"
    if len(endpoint.encode()) > 107:
        return f"endpoint {endpoint} is too long"
    if not Path(os.path.normpath(endpoint)).is_relative_to(kubelet_root):
        return f"endpoint {endpoint} is outside of {kubelet_root}"
    return ""
