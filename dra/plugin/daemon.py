"""The node daemon: what depends on what, the order of starting and stopping, signals.

    host paths -> NVML session -> live inventory -> pool -> publisher -> API server
    kubelet -> endpoint -> engine -> CDI files;  janitor -> engine

Starting waits for nothing: no driver, no API server and no kubelet are each a state in which it lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import cast

from dra.api.gpu_settings import GpuSettings
from dra.cdi.model import CdiOptions, Exposure
from dra.cdi.renderer import parse_capabilities
from dra.controller.publisher import Publisher
from dra.errors import DraError, HostError
from dra.health.feed import HealthFeed
from dra.host.boot import boot_id
from dra.inventory.layout_watch import LayoutWatch
from dra.inventory.live import LiveInventory, on_bus_of
from dra.inventory.model import Inventory
from dra.inventory.ownership import scan_with_owned
from dra.inventory.scan import Scanner
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.kube.events import EventRecorder
from dra.nvml.kernel import mig_layouts
from dra.nvml.session import HoldPolicy, NvmlSession
from dra.plugin.claim_status import ClaimStatusWriter, claim_status_writer
from dra.plugin.counters import server_keeps_counters, server_keeps_shares
from dra.plugin.endpoint import STOP_GRACE_SECONDS, Endpoint
from dra.plugin.health_part import HealthPart
from dra.plugin.keeper_presence import KeeperPresence
from dra.plugin.machine import Machine
from dra.plugin.metrics import CallMetrics, metrics_of
from dra.plugin.mig_port import MigPort
from dra.plugin.mps_watch import MpsWatch
from dra.plugin.node_upkeep import deployment_deleter, keep_up
from dra.plugin.owned import owned_by
from dra.plugin.policies import Policies, default_time_slice
from dra.plugin.pool_source import PoolSource
from dra.plugin.ports import ClaimEvents, ClaimPort, GpuUsers, NodeEvents
from dra.plugin.probe import Probe
from dra.plugin.readiness import Readiness
from dra.plugin.renderers import RendererByGpu
from dra.plugin.settings import PluginSettings, describe_ignored, watches_health
from dra.plugin.sharing import sharing_of
from dra.plugin.signals import HURRY_SIGNALS, STOP_SIGNALS, SignalQueue
from dra.plugin.sockets import plan_sockets
from dra.prepare.engine import Engine, EnginePorts, EngineSettings
from dra.prepare.janitor import Janitor
from dra.prepare.metadata import MetadataFiles, MetadataPlanner
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

# How long a prepare call waits for the hardware to be looked at again when its device is not known.
FRESH_INVENTORY_SECONDS = 5.0
# What stopping may take beyond the grace period of the calls; after that the process ends as it is.
STOP_EXTRA_SECONDS = 8.0
# glibc's mallopt: the number of arenas. Threads that each had their own would keep memory.
_M_ARENA_MAX = -8


class Daemon:
    """One instance of the driver on one machine."""

    def __init__(self, settings: PluginSettings, machine: Machine) -> None:
        self.settings, self.machine = settings, machine
        paths = machine.paths
        self._made = contextlib.ExitStack()
        self.readiness = Readiness()
        self.calls = CallMetrics(settings.driver_name)
        self.client = KubeClient(
            Connection(
                KubeOptions(kubeconfig=settings.kubeconfig or None, user_agent=f"dra/{settings.driver_name}")
            ),
            qps=settings.kube_qps,
            burst=settings.kube_burst,
            field_manager=settings.driver_name,
        )
        self.events = EventRecorder(self.client, component=settings.driver_name, host=settings.node_name)
        self.session = NvmlSession(
            machine.library, hold=HoldPolicy(settings.nvml_hold), kernel_version=machine.kernel_version
        )
        layouts = LayoutWatch(
            lambda: mig_layouts(paths),
            tidy=self.session.tidy,
            changed=lambda: self.inventory.rescan("somebody changed the MIG layout"),
        )
        self.inventory = LiveInventory(
            layouts.around(self._scan_of(Scanner(self.session, paths))),
            interval_seconds=settings.inventory_interval_seconds,
            in_use=self._devices_in_use,
            on_bus=on_bus_of(paths),
            tidy=layouts.tidy,
        )
        self.sharing = sharing_of(
            paths,
            driver=settings.driver_name,
            session=self.session,
            inventory=lambda: self.inventory.current,
            notify=ClaimEvents(self.events).notify,
            settings=settings,
            settings_of=self._settings_of,
        )
        self.partitions = MigPort(self.session, lambda: self.inventory.current)
        self.engine = Engine(self._engine_settings(), self._engine_ports())
        self.mps_watch = MpsWatch(self.sharing.keeper, self.engine, ClaimEvents(self.events).notify)
        self.sharing.keeper.in_use = self.mps_watch.begin
        self.janitor = Janitor(
            self.engine,
            ClaimPort(self.client),
            device_in_use=GpuUsers(self.session, lambda: self.inventory.current).in_use,
            notify=ClaimEvents(self.events).notify,
        )
        self.feed = HealthFeed()
        self.keeper_presence = KeeperPresence(
            self.sharing.keeper,
            lambda present: self.pool.mps_is(present),  # noqa: PLW0108 - the pool is made below
        )
        self.pool = PoolSource(
            settings.driver_name,
            settings.node_name,
            feed=self.feed,
            mig_mode=settings.mig_mode,
            keeps_counters=self._keeps_counters,
            keeps_shares=self._keeps_shares,
            settings=settings.gpus,
            on_problem=NodeEvents(self.events, settings.node_name).problem,
            on_shared=self.keeper_presence.begin,
        )
        self.publisher = Publisher(
            self.client,
            settings.node_name,
            settings.driver_name,
            lock_path=paths.state_dir(settings.driver_name) / "publisher.lock",
            start_jitter_seconds=settings.start_jitter_seconds,
            on_server_version=self.pool.server_is,
            on_dropped=lambda dropped: self.pool.server_dropped(dropped.gates),
            on_lead=lambda: self.policies.recall(),  # noqa: PLW0108  made below
        )
        self.pool.publish_to(self.publisher.set_desired)
        self.health = self._health_part() if watches_health(settings.gates) else None
        self.policies = Policies(
            settings,
            client=self.client,
            events=self.events,
            engine=self.engine,
            pool=self.pool,
            publisher=self.publisher,
            control=self.partitions,
            inventory=lambda: self.inventory.current,
            look_again=self._look_again,
            time_slice=default_time_slice(paths),
            step=crash_step(settings.crash_at),
        )
        self.claim_status = self._claim_status()
        self.endpoint = Endpoint(
            settings.driver_name,
            sockets=plan_sockets(
                settings.driver_name,
                plugins_dir=paths.kubelet_plugins_dir,
                registry_dir=paths.kubelet_registry_dir,
                pod_uid=settings.pod_uid,
            ),
            engine=self.engine,
            feed=self.feed,
            on_status=self._kubelet_said,
            on_failure=ClaimEvents(self.events).failed,
            measure=self.calls.call,
        )
        self.probe = Probe(
            registration=self.endpoint.sockets.registration,
            service=self.endpoint.sockets.service,
            readiness=self.readiness,
        )
        self.metrics = metrics_of(self)

    # -- parts -------------------------------------------------------------------------------------

    def _scan_of(self, scanner: Scanner) -> Callable[[], Inventory]:
        """Give the look at the hardware; for partitions on demand, with what could be made and what is ours."""
        if self.settings.mig_mode != "dynamic" and not self.settings.follow_policies:
            return scanner.scan
        return scan_with_owned(
            lambda: scanner.scan(profiles=True),
            lambda: owned_by(self.engine.store, self.engine.settings.boot_id, self.engine.marks),
        )

    def _health_part(self) -> HealthPart:
        return HealthPart(
            self.settings,
            self.machine,
            self.session,
            boot_id=self.engine.settings.boot_id,
            pool=self.pool,
            inventory=lambda: self.inventory.current,
            rescan=self.inventory.rescan,
            held=self._devices_in_use,
            records=self.engine.store.records,
            events=self.events,
            speaks=lambda: self.publisher.status().state != "waiting",
            settings_of=self._settings_of,
        )

    def _claim_status(self) -> ClaimStatusWriter:
        return claim_status_writer(
            self.client,
            driver=self.settings.driver_name,
            boot_id=self.engine.settings.boot_id,
            records=self.engine.store.records,
            conditions=lambda: self.feed.current()[1],
            inventory=lambda: self.inventory.current,
        )

    def _stop_health(self) -> None:
        if self.health is not None:
            self.health.monitor.stop(timeout_seconds=1.5)

    def _keeps_counters(self, version: tuple[int, int]) -> bool | None:
        return server_keeps_counters(
            self.client, version, driver=self.settings.driver_name, node_name=self.settings.node_name
        )

    def _keeps_shares(self, version: tuple[int, int]) -> bool | None:
        return server_keeps_shares(
            self.client, version, driver=self.settings.driver_name, node_name=self.settings.node_name
        )

    def _engine_settings(self) -> EngineSettings:
        paths = self.machine.paths
        return EngineSettings(
            driver=self.settings.driver_name,
            pool=self.settings.node_name,
            state_dir=paths.state_dir(self.settings.driver_name),
            cdi_root=paths.cdi_root,
            boot_id=boot_id(paths),
            create_partitions=self.settings.mig_mode == "dynamic",
            imported_partitions_are_ours=self.settings.gates.get("DynamicMIG", False),
        )

    def _engine_ports(self) -> EnginePorts:
        settings = self.settings
        options = CdiOptions(
            driver=settings.driver_name,
            exposure=cast("Exposure", settings.cdi_exposure),
            capabilities=parse_capabilities(settings.driver_capabilities),
            hook_path=settings.cdi_hook_path,
        )
        return EnginePorts(
            delete_deployment=deployment_deleter(self.client, settings),
            source=ClaimPort(self.client),
            inventory=lambda: self.inventory.current,
            fresh_inventory=self._look_again,
            renderer=RendererByGpu(
                self.machine.paths, options, lambda: self.inventory.current, lambda: self.policies.settings
            ),
            notify=ClaimEvents(self.events).notify,
            conflict=self._conflict,
            step=crash_step(settings.crash_at),
            strategies=self.sharing.strategies,
            effects=self.sharing.effects,
            shares=self.sharing.shares,
            mig=self.partitions,
            layout_changed=lambda: self.inventory.rescan("partitions were made or destroyed"),
            settings=lambda: self.policies.settings,
            timing=self.calls.step,
            metadata=self._metadata(),
        )

    def _metadata(self) -> MetadataPlanner:
        paths, driver = self.machine.paths, self.settings.driver_name
        files = MetadataFiles(
            driver, state_dir=paths.state_dir(driver), cdi_root=paths.cdi_root, host_path=paths.host_spelling
        )
        return MetadataPlanner(
            files,
            lambda device: self.pool.attributes_of(device),  # noqa: PLW0108  the pool is made after the engine
            enabled=self.settings.device_metadata,
        )

    def _settings_of(self, gpu_uuid: str) -> GpuSettings:
        return self.policies.of(gpu_uuid)

    def _conflict(self, holder_uid: str) -> None:
        self.janitor.request(holder_uid)

    def _look_again(self) -> Inventory:
        self.inventory.rescan_and_wait(timeout_seconds=FRESH_INVENTORY_SECONDS)
        return self.inventory.current

    def _devices_in_use(self) -> set[str]:
        return {hold.device for hold in self.engine.store.holds(self.engine.settings.boot_id)}

    def _kubelet_said(self, accepted: bool, error: str) -> None:
        self.readiness.set("registered", "" if accepted else f"the kubelet refused the driver: {error}")

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
            self.claim_status.start()
        self.mps_watch.begin_if_needed()
        self.policies.start()
        if settings.healthcheck_port >= 0:
            self.probe.start(settings.healthcheck_port)
        self.metrics.start()
        gc.freeze()
        log.info("plugin_started", probe_port=self.probe.port)

    def stop(self, *, grace_seconds: float = STOP_GRACE_SECONDS) -> bool:
        """Stop: registration, publishing, calls in flight. Slices and CDI files stay. Gives whether all calls ended.

        A part that fails keeps no other from being stopped. Also for a start that failed half-way.
        """
        finished: list[bool] = []
        parts: tuple[tuple[str, Callable[[], object]], ...] = (
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
        for name, part in parts:
            try:
                part()
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


def crash_step(crash_at: tuple[str, int] | None) -> Callable[[str], None]:
    """Give the callable for the journal's steps: it kills this process at the chosen one, for tests."""
    if crash_at is None:
        return lambda _step: None
    wanted, count = crash_at
    lock, seen = threading.Lock(), [0]

    def step(name: str) -> None:
        if name != wanted:
            return
        with lock:
            seen[0] += 1
            reached = seen[0] >= count
        if reached:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def tune_memory() -> None:
    """Keep glibc from giving each thread an arena of its own."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)
