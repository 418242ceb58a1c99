"""The node daemon: the order of starting and stopping its parts, signals.

Starting waits for nothing: no driver, no API server and no kubelet are each a state in which it lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import signal
import threading
import time
from collections.abc import Callable

import dra.plugin.lean_grpc  # noqa: F401  before whatever imports grpc
from dra.errors import DraError, HostError
from dra.plugin.endpoint import STOP_GRACE_SECONDS
from dra.plugin.machine import Machine
from dra.plugin.metrics import metrics_of
from dra.plugin.node_upkeep import keep_up
from dra.plugin.parts import Parts
from dra.plugin.probe import Probe
from dra.plugin.settings import PluginSettings, describe_ignored
from dra.plugin.signals import HURRY_SIGNALS, STOP_SIGNALS, SignalQueue
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

# What stopping may take beyond the grace period of the calls; after that the process ends as it is.
STOP_EXTRA_SECONDS = 8.0
# glibc's mallopt: the number of arenas. Threads that each had their own would keep memory.
_M_ARENA_MAX = -8
# From which size on memory is given back as soon as it is free. glibc raises it with the first large block that is freed
# (a list of slices), and keeps the next ones: said once, it stays.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 128 * 1024


class Daemon(Parts):
    """One instance of the driver on one machine."""

    def __init__(self, settings: PluginSettings, machine: Machine) -> None:
        super().__init__(settings, machine)
        self._made = contextlib.ExitStack()
        self.probe = Probe(
            registration=self.endpoint.sockets.registration,
            service=self.endpoint.sockets.service,
            readiness=self.readiness,
        )
        self.metrics = metrics_of(self)

    def _stop_health(self) -> None:
        if self.health is not None:
            self.health.monitor.stop(timeout_seconds=1.5)

    def _pool_missing(self) -> str:
        """Say why the pool in the API is not the wanted one; empty if it is, or if another instance publishes.

        A new pod of a rolling update must become ready while the old one still holds the publisher's lock.
        """
        status = self.publisher.status()
        if status.ready or status.state == "waiting":
            return ""
        if status.last_error is not None:
            return str(status.last_error)
        return "the pool is not published yet" if self.pool.looked else "the hardware was not looked at yet"

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything; returns at once.

        Raises:
            HostError, ConfigError: what no retry would mend: the state directory, the probe's port.
        """
        settings = self.settings
        log.info(
            "plugin_starting",
            driver=settings.driver_name, node=settings.node_name, simulate=settings.simulate,
            service=str(self.endpoint.sockets.service), registration=str(self.endpoint.sockets.registration),
        )  # fmt: skip
        if settings.ignored:
            log.warning("settings_without_effect", text=describe_ignored(settings.ignored))
        self.readiness.set("registered", "the kubelet has not registered the driver yet")
        self.readiness.ask("sockets", lambda: "" if self.endpoint.present else "a socket is not in place")
        self.readiness.ask("pool", self._pool_missing)
        if self.passed is not None:
            self.inventory.subscribe(self.passed.inventory_changed)
        if self.health is not None:
            # Before the pool: what was held against a device is known when it is published first.
            self.inventory.subscribe(self.health.monitor.inventory_changed)
            self.health.monitor.start()
        self.inventory.subscribe(self.policies.inventory_changed)
        self.inventory.subscribe(self.pool.inventory_changed)
        keep_up(self.inventory, settings, self.machine.paths, self.client, events=self.events)
        self.inventory.start()
        self.engine.open()
        self.endpoint.start()
        self.publisher.start()
        self.janitor.start()
        if settings.claim_status:
            self.claim_status.follow(inventory=self.inventory, feed=self.feed, store=self.engine.store)
            self.claim_status.start()
        self.mps_watch.begin_if_needed()
        self.policies.start()
        if settings.healthcheck_port >= 0:
            self.probe.start(settings.healthcheck_port)
        self.metrics.start()
        gc.freeze()
        gc.enable()  # the command line keeps it from running while modules load
        log.info("plugin_started", probe_port=self.probe.port)

    def stop(self, *, grace_seconds: float = STOP_GRACE_SECONDS) -> bool:
        """Stop: registration, publishing, calls in flight. Slices and CDI files stay. Gives whether all calls ended.

        A part that fails keeps no other from being stopped. Also for a start that failed half-way.
        """
        finished: list[bool] = []
        to_stop: tuple[tuple[str, Callable[[], object]], ...] = (
            ("registration", self.endpoint.leave),
            ("publisher", lambda: self.publisher.stop(timeout_seconds=1.0)),
            ("calls", lambda: finished.append(self.endpoint.stop(grace_seconds=grace_seconds))),
            ("policies", self.policies.stop),
            ("janitor", self.janitor.stop),
            ("mps-presence", self.keeper_presence.stop),
            ("mps", self.mps_watch.stop),
            ("probe", self.probe.stop),
            ("metrics", self.metrics.stop),
            ("health", self._stop_health),
            ("claim status", self.claim_status.stop),
            ("inventory", lambda: self.inventory.stop(timeout_seconds=1.0)),
            ("events", lambda: self.events.stop(timeout_seconds=0.5)),
            ("nvml", self.session.close),
            ("api", self.client.close),
            ("machine", self.machine.close),
        )
        for name, stop in to_stop:
            try:
                stop()
            except Exception as error:
                log.exception("part_not_stopped", part=name, **error_fields(error))
        log.info("plugin_stopped", calls_finished=finished == [True])
        return finished == [True]

    def run(self, signals: SignalQueue) -> int:
        """Start, wait for a signal, stop; gives the exit status. Call from the main thread, and end the process then.

        Threads may be left that hang in a driver.

        Raises:
            HostError, ConfigError: as `start`; what had started is stopped.
        """
        tune_memory()
        self._dump_stacks_when_asked()
        asked = signals.wait(0)  # it may have come while Python was loading
        try:
            if asked not in STOP_SIGNALS:
                self.start()
                asked = self._wait_for_stop(signals)
        except BaseException:
            self.stop(grace_seconds=0)
            raise
        else:
            self._stop_while_listening(asked, signals)
        finally:
            # Without this a thread that the kernel cannot end would keep the next instance from publishing.
            self.publisher.let_go()
        return 0

    def _wait_for_stop(self, signals: SignalQueue) -> int:
        while True:
            number = signals.wait()
            if number in STOP_SIGNALS:
                return int(number)
            if number == signal.SIGUSR1:
                self._let_go_or_resume()

    def _stop_while_listening(self, number: int, signals: SignalQueue) -> None:
        """Stop in another thread; the main one hears whether somebody has no patience, and waits for no lock."""

        def stop() -> None:
            try:
                log.info("signal_received", signal=signal.Signals(number).name)
                self.stop()
            finally:
                signals.wake()

        try:
            start_thread(threading.Thread(target=stop, name="stop", daemon=True))
        except HostError:
            stop()
            return
        end = time.monotonic() + STOP_GRACE_SECONDS + STOP_EXTRA_SECONDS
        while (left := end - time.monotonic()) > 0:
            again = signals.wait(left)
            if again == 0:
                return
            if again in HURRY_SIGNALS:
                self.endpoint.hurry()

    def _dump_stacks_when_asked(self) -> None:
        state_dir = self.machine.paths.state_dir(self.settings.driver_name)
        try:
            state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            stacks = (state_dir / "stacks.txt").open("w")
        except OSError as error:
            log.warning("stack_dump_unavailable", path=str(state_dir), error=str(error))
            return
        self._made.push(stacks)
        # Written by C code: it works when every Python thread is stuck.
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)

    def _let_go_or_resume(self) -> None:
        """SIGUSR1 lets go of NVML (for a driver unload or a GPU reset), and once more takes it up again."""
        try:
            start_thread(threading.Thread(target=self._toggle_nvml, name="nvml-release", daemon=True))
        except HostError as error:
            log.warning("nvml_release_failed", **error_fields(error))

    def _toggle_nvml(self) -> None:
        try:
            if self.session.state.released:
                self.session.resume()
                self.inventory.rescan("NVML was taken up again")
                if self.health is not None:
                    self.health.monitor.resume()
                log.info("nvml_resumed")
            else:
                log.info("nvml_released", complete=self.session.release("SIGUSR1"))
        except DraError as error:
            log.warning("nvml_release_failed", **error_fields(error))


def tune_memory() -> None:
    """Keep glibc from giving each thread an arena of its own, and from keeping large blocks."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
