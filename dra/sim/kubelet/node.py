"""A kubelet for one node, as far as a DRA driver and the API server can tell.

It watches the registry directory, registers plugins, wipes slices, prepares and unprepares the claims of pods. With
an API it also lives the life of the pods bound to its node; without pods it is driven by `run_pod` and `stop_pod`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dra.sim.kubelet.claims import ClaimReader, DraManager, Json, UnprepareError
from dra.sim.kubelet.connection import PluginConnection
from dra.sim.kubelet.pods import PodRuns, RunningPod
from dra.sim.kubelet.programs import Program, run_program
from dra.sim.kubelet.registry import PluginRegistry
from dra.sim.kubelet.slices import SliceDeleter, SliceWiper
from dra.sim.kubelet.versions import KubeletVersion, Timings
from dra.sim.runtime import Runtime
from dra.telemetry.log import get_logger

log = get_logger()


class SimKubelet:
    """One kubelet process. `start` again after `stop` is what a restart is: make a new object.

    Args:
        node_name: the node.
        kubelet_root: its root directory (`/var/lib/kubelet` as the node has it).
        api: where claims are read.
        slices: where slices are wiped; None: nowhere.
        runtime: makes containers; None: claims are prepared and no container is made.
        minor: the Kubernetes version, 32 to 37.
        timings: periods and time limits.
        program: what containers do.
    """

    def __init__(
        self,
        node_name: str,
        kubelet_root: Path,
        api: ClaimReader,
        *,
        slices: SliceDeleter | None = None,
        runtime: Runtime | None = None,
        minor: int = 36,
        timings: Timings | None = None,
        program: Program = run_program,
    ) -> None:
        self.node_name, self.root = node_name, kubelet_root
        self.timings = timings or Timings()
        self.version = KubeletVersion(minor)
        kubelet_root.mkdir(parents=True, exist_ok=True)
        self.wiper = SliceWiper(
            slices,
            node_name,
            delay_seconds=self.timings.wipe_delay if self.version.monitors_connections else 0.0,
        )
        self.registry = PluginRegistry(
            kubelet_root,
            self.version,
            self.timings,
            on_change=self._plugin_changed,
            on_health=self._health_changed,
        )
        self.manager = DraManager(
            api,
            self.registry.connection,
            state=kubelet_root / "dra_manager_state",
            replace_devices=self.version.replaces_devices,
        )
        self.pods = PodRuns(self.manager, runtime=runtime, program=program)
        self._changed = threading.Condition()
        self._health_listeners: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._active: Callable[[], set[str]] = lambda: {
            running.pod["metadata"]["uid"] for running in self.pods.all()
        }
        self._reconciler = threading.Thread(target=self._reconcile, name="kubelet-reconcile", daemon=True)

    def start(self) -> None:
        """Start: wipe the node's slices, look for plugins, look after claims of pods that are gone."""
        self.wiper.wipe_node()
        self.registry.start()
        self._reconciler.start()

    def stop(self) -> None:
        """End as a kubelet does that is stopped: containers go on, the checkpoint stays."""
        self._stop.set()
        self.wiper.stop()
        self.registry.stop()
        if self._reconciler.is_alive():
            self._reconciler.join()

    # -- plugins -----------------------------------------------------------------------------------

    def connection(self, driver: str) -> PluginConnection | None:
        """Give the instance that would be called now; None if the driver is not registered."""
        return self.registry.connection(driver)

    def wait_registered(
        self,
        driver: str,
        *,
        timeout_seconds: float = 60.0,
        instances: int = 1,
        instead_of: PluginConnection | None = None,
    ) -> PluginConnection:
        """Wait until so many instances of a driver are registered for good, connected and told; gives the one to call.

        Args:
            driver: its name.
            timeout_seconds: how long.
            instances: how many.
            instead_of: an instance that ended, or will: it is waited for until another is the latest.

        Raises:
            TimeoutError: with what the kubelet saw.
        """

        def ready() -> bool:
            found = self.registry.connections(driver)
            return (
                len(found) >= instances
                and found[-1] is not instead_of
                and all(connection.connected and connection.told for connection in found)
                and self.registry.settled(driver)
            )

        with self._changed:
            if not self._changed.wait_for(ready, timeout=timeout_seconds):
                raise TimeoutError(f"{driver} is not registered; attempts: {self.registry.attempts}")
        connection = self.registry.connection(driver)
        if connection is None:
            raise TimeoutError(f"{driver} went away")
        return connection

    def wait_gone(self, driver: str, *, timeout_seconds: float = 60.0) -> None:
        """Wait until no instance of a driver is registered. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self.registry.connections(driver), timeout=timeout_seconds
            ):
                raise TimeoutError(f"{driver} is still registered")

    def wait_health(
        self, driver: str, wanted: Callable[[PluginConnection], bool], *, timeout_seconds: float = 60.0
    ) -> PluginConnection:
        """Wait until the health that an instance streams is as wanted; gives the instance. Raises TimeoutError."""
        found: list[PluginConnection] = []

        def ready() -> bool:
            found[:] = [connection for connection in self.registry.connections(driver) if wanted(connection)]
            return bool(found)

        with self._changed:
            if not self._changed.wait_for(ready, timeout=timeout_seconds):
                raise TimeoutError(f"the health of {driver} did not become what was wanted")
        return found[0]

    def health(self) -> dict[tuple[str, str, str], tuple[str, str]]:
        """Give (state, message) of each device by driver, pool and device."""
        return {
            (connection.driver, pool, device): connection.health_of(pool, device)
            for connection in self.registry.all_connections()
            for pool, device in connection.health
        }

    def listen_health(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of health."""
        self._health_listeners.append(listener)

    def _plugin_changed(self, driver: str) -> None:
        connections = self.registry.connections(driver)
        alive = (
            connections if not self.version.monitors_connections else [c for c in connections if c.connected]
        )
        if alive:
            self.wiper.connected(driver)
        else:
            self.wiper.disconnected(driver)
        with self._changed:
            self._changed.notify_all()

    def _health_changed(self, _driver: str) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in self._health_listeners:
            listener()

    # -- pods --------------------------------------------------------------------------------------

    def run_pod(self, pod: Json) -> RunningPod:
        """Prepare and create a pod. Raises PrepareError or CreateError."""
        return self.pods.run(pod)

    def stop_pod(self, pod: Json) -> None:
        """Stop a pod and unprepare its claims. Raises UnprepareError."""
        self.pods.stop(pod)

    def active_pods_are(self, source: Callable[[], set[str]]) -> None:
        """Say which pods count as active when claims of vanished pods are looked for."""
        self._active = source

    def reconcile(self) -> None:
        """Do one round of unpreparing the claims of vanished pods. Raises UnprepareError."""
        self.manager.reconcile(self._active())

    def _reconcile(self) -> None:
        while not self._stop.wait(self.timings.reconcile):
            try:
                self.reconcile()
            except UnprepareError as error:
                log.info("sim_reconcile_failed", error=str(error))
