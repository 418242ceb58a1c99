"""The daemon's wiring of GpuNodePolicies: what follows them, keeps to them and tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dra.api.gpu_settings import GpuSettings, NodeSettings
from dra.controller.policy_keeper import PolicyKeeper
from dra.controller.policy_model import PolicyPorts, PolicyTimings
from dra.controller.policy_report import PolicyReporter
from dra.controller.policy_state import AppliedFile
from dra.controller.policy_watch import PolicyWatch
from dra.controller.publisher import Publisher
from dra.host.paths import HostPaths
from dra.inventory.model import Gpu, Inventory
from dra.kube.client import KubeClient
from dra.kube.events import EventRecorder
from dra.kube.resources import RESOURCE_CLAIMS
from dra.plugin.pool_source import PoolSource
from dra.plugin.settings import PluginSettings
from dra.plugin.sharing_ports import SmiTimeSlices
from dra.prepare.engine import Engine
from dra.prepare.layouts import LayoutChanger
from dra.prepare.partitions import MigControl
from dra.prepare.sharing.time_slice import INTERVALS, interval_of
from dra.slices.sharing import identity_of

SOURCE = "policy"


def default_time_slice(paths: HostPaths) -> Callable[[Gpu, str], None]:
    """Give what sets the time-slice of a GPU that no claim asks another of; raises DraError."""

    def set_slice(gpu: Gpu, interval: str) -> None:
        SmiTimeSlices(paths).set(gpu.uuid, INTERVALS.index(interval_of(interval)))

    return set_slice


class Policies:
    """All parts together. With the flag off it says what the flags say, and does nothing.

    Args:
        control: changes partitions.
        inventory, look_again: the hardware, as last seen and newly looked at.
        time_slice: sets the default time-slice of a GPU.
        changed: hears of settings that hold from now on.
    """

    def __init__(
        self,
        settings: PluginSettings,
        *,
        client: KubeClient,
        events: EventRecorder,
        engine: Engine,
        pool: PoolSource,
        publisher: Publisher,
        control: MigControl,
        inventory: Callable[[], Inventory],
        look_again: Callable[[], Inventory],
        time_slice: Callable[[Gpu, str], None],
        step: Callable[[str], None],
        changed: Callable[[NodeSettings], None] = lambda _settings: None,
    ) -> None:
        self._flags = settings.gpus
        self._engine, self._pool = engine, pool
        self._changed = changed
        self._enabled = settings.follow_policies
        self._begun = False
        self._inventory = inventory
        state_dir = engine.settings.state_dir
        self.reporter = PolicyReporter(client, events, settings.node_name, enabled=lambda: self.watch.served)
        self.keeper = PolicyKeeper(
            base=settings.gpus,
            driver=settings.driver_name,
            pool=settings.node_name,
            state=AppliedFile(state_dir / "policy.json"),
            ports=PolicyPorts(
                inventory=inventory,
                look_again=look_again,
                claims=lambda: client.list(RESOURCE_CLAIMS).items,
                holds=self._holds,
                publish=self._publish,
                taint=lambda taints: pool.set_taints(SOURCE, taints),
                stored=lambda: publisher.status().ready,
                leads=lambda: publisher.status().state == "publishing",
                changer=LayoutChanger(
                    control,
                    locks=engine.locks,
                    directory=state_dir / "layouts",
                    boot_id=engine.settings.boot_id,
                    holds=self._holds,
                    step=step,
                ),
                tell=self.reporter.tell,
                report=self.reporter.report,
                time_slice=time_slice,
            ),
            timings=PolicyTimings(),
            step=step,
        )
        self.watch = PolicyWatch(client, settings.node_name, policies=self._policies_are, node=self._node_is)

    @property
    def settings(self) -> NodeSettings:
        """What holds for each GPU now."""
        return self.keeper.settings if self._enabled else self._flags

    def of(self, gpu_uuid: str) -> GpuSettings:
        """Give what holds for a GPU, by its UUID; for one that is not there what holds for all."""
        settings = self.settings
        found = next((gpu for gpu in self._inventory().gpus if gpu.uuid == gpu_uuid), None)
        return settings.base if found is None else settings.of(identity_of(found))

    def telemetry_interval(self) -> float:
        """Give the seconds between two readings of the GPUs' counters, which are read together: the longest of any."""
        settings = self.settings
        if not settings.layers:
            return settings.base.telemetry_interval_seconds or 0.0
        gpus = self._inventory().gpus
        return max(
            (settings.of(identity_of(gpu)).telemetry_interval_seconds or 0.0 for gpu in gpus), default=0.0
        )

    def start(self) -> None:
        """Begin with what held when the last instance ended. Raises HostError: DRA-HOST-NO-THREADS."""
        if not self._enabled:
            return
        self._publish(self.keeper.settings)
        if self.keeper.has_state:
            self._begin()
        self.watch.start()

    def _begin(self) -> None:
        """Start what works only where there are policies, or were: most clusters have none, and spare the threads."""
        if not self._begun:
            self._begun = True
            self.keeper.start()
            self.reporter.start()

    def stop(self) -> None:
        """End."""
        if self._enabled:
            self.watch.stop(timeout_seconds=1.0)
            self.keeper.stop(timeout_seconds=1.0)
            self.reporter.stop()

    def recall(self) -> None:
        """Take what the last instance wrote down: call before this one publishes for the first time."""
        if self._enabled:
            self.keeper.recall()

    def inventory_changed(self, inventory: Inventory, _difference: object) -> None:
        """Look at the GPUs again (a subscriber of the live inventory, before the pool is one)."""
        if self._enabled:
            self.keeper.hold_back(inventory)
            self.keeper.look()

    def _policies_are(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        listed = tuple(bodies)
        metadata = [body.get("metadata") or {} for body in listed]
        self.reporter.policies_are({str(each.get("name")): str(each.get("uid")) for each in metadata})
        self.keeper.policies_are(listed)
        if self.watch.served:
            self._begin()

    def _node_is(self, node: Mapping[str, Any]) -> None:
        self.reporter.node_is(node)
        self.keeper.labels_are((node.get("metadata") or {}).get("labels") or {})

    def _publish(self, settings: NodeSettings) -> None:
        self._pool.settings_changed(settings)
        self._changed(settings)

    def _holds(self) -> Iterable[Any]:
        self._engine.store.refresh()
        return self._engine.store.holds(self._engine.settings.boot_id)
