"""`dra mps-keeper`: one keeper on a node, from its lock to its last answer."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dra.host.boot import boot_id
from dra.host.files import ensure_dir, host_error
from dra.host.paths import HostPaths
from dra.mps.control import Control, Timings
from dra.mps.keeper import Keeper
from dra.mps.launcher import Launcher
from dra.mps.server import KeeperServer
from dra.prepare.sharing.mps_model import SOCKET_NAME, mps_folder
from dra.telemetry.log import get_logger

log = get_logger()

LOCK_NAME = "keeper.lock"
_LOCK_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What a keeper is told.

    Args:
        driver: name of the DRA driver.
        paths: the node.
        isolate: each daemon gets a mount namespace, and its shared memory is a tmpfs. False for simulated nodes.
        environment: more for the daemons' environment.
        timings: how long things may take.
    """

    driver: str
    paths: HostPaths
    isolate: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)

    @property
    def state_dir(self) -> Path:
        """The driver's state directory."""
        return self.paths.state_dir(self.driver)


class KeeperService:
    """A keeper with its socket. `start` waits for a keeper before it to end: there is one for each state directory."""

    def __init__(self, settings: KeeperSettings) -> None:
        self._settings = settings
        launcher = Launcher(settings.paths, settings.isolate, settings.environment)
        control = Control(launcher, settings.timings, memory=settings.isolate)
        self.keeper = Keeper(settings.state_dir, control, boot_id=boot_id(settings.paths))
        self.server = KeeperServer(self.keeper, mps_folder(settings.state_dir) / SOCKET_NAME)
        self._lock: int | None = None
        self._stop = threading.Event()

    def start(self) -> bool:
        """Start serving; False if it was told to stop before it could.

        Raises:
            HostError: the state directory cannot be used.
        """
        if not self._take_lock():
            return False
        self.keeper.open()
        self.server.start()
        log.info("mps_keeper_started", state_dir=str(self._settings.state_dir), pid=os.getpid())
        return True

    def stop(self) -> None:
        """Stop serving. The daemons run on."""
        self._stop.set()
        if self._lock is None:
            return
        self.server.stop()
        self.keeper.close()
        os.close(self._lock)
        self._lock = None
        log.info("mps_keeper_stopped")

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self._stop.set())
        if self.start():
            # Waiting without end would not notice a signal on some platforms.
            while not self._stop.wait(3600):
                pass
        self.stop()
        return 0

    def _take_lock(self) -> bool:
        folder = mps_folder(self._settings.state_dir)
        ensure_dir(folder)
        path, told = folder / LOCK_NAME, False
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise host_error(error, "open", path) from error
        while not self._stop.is_set():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    log.warning("mps_keeper_waits", lock=str(path))
                told = True
                time.sleep(_LOCK_PAUSE)
            except OSError as error:
                os.close(descriptor)
                raise host_error(error, "lock", path) from error
            else:
                self._lock = descriptor
                return True
        os.close(descriptor)
        return False


def check_alive(state_dir: Path) -> None:
    """Ask the keeper of a state directory whether it is there, for a probe.

    Raises:
        HostError: DRA-MPS-KEEPER-…
    """
    from dra.prepare.sharing.keeper_client import KeeperClient

    KeeperClient(state_dir).hello()
