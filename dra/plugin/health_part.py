"""The health of the node's devices in this process: from the monitor to taints, the stream and Events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from dra.api.gpu_settings import GpuSettings
from dra.health.model import Change
from dra.health.monitor import HealthMonitor, HealthPorts
from dra.health.outcome import Verdict, devices_of, sentence
from dra.health.policy import XID, Grade, HealthPolicy
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, parse_device_name
from dra.nvml.session import NvmlSession
from dra.plugin.machine import Machine
from dra.plugin.pool_source import PoolSource
from dra.plugin.settings import PluginSettings
from dra.prepare.record import Record
from dra.slices.taints import Taint

if TYPE_CHECKING:
    from dra.kube.events import EventRecorder

SOURCE = "health"


class HealthPart:
    """Owns the monitor; tells its verdicts to the pool, and what changed to those whom it concerns.

    Args:
        settings, machine, session: of the daemon.
        pool: takes taints and the messages of the health stream.
        inventory: what the node has.
        rescan: have the hardware looked at again.
        held: names of the devices that claims hold.
        records: what is prepared on this node.
        events: writes Events.
        speaks: whether this instance writes them; of two of a rolling update only one does.
        away: whether a GPU is passed through.
    """

    def __init__(
        self,
        settings: PluginSettings,
        machine: Machine,
        session: NvmlSession,
        *,
        boot_id: str,
        pool: PoolSource,
        inventory: Callable[[], Inventory],
        rescan: Callable[[str], None],
        held: Callable[[], Collection[str]],
        records: Callable[[], Iterable[Record]],
        events: EventRecorder,
        speaks: Callable[[], bool] = lambda: True,
        settings_of: Callable[[str], GpuSettings] = lambda _uuid: GpuSettings(),
        away: Callable[[str], bool] = lambda _uuid: False,
    ) -> None:
        self._pool, self._inventory, self._records, self._events = pool, inventory, records, events
        self._node_name, self._speaks = settings.node_name, speaks
        self.monitor = HealthMonitor(
            session,
            HealthPorts(inventory=inventory, held=held, rescan=rescan, told=self._told, away=away),
            policy=HealthPolicy(
                frozenset(settings.ignored_xids),
                dict(settings.health_effects),
                of_gpu=lambda uuid: settings_of(uuid).health,
            ),
            state_path=machine.paths.state_dir(settings.driver_name) / "health.json",
            kernel_log_path=machine.paths.dev / "kmsg",
            boot_id=boot_id,
        )

    def _told(self, verdict: Verdict, changes: tuple[Change, ...]) -> None:
        self._pool.set_taints(
            SOURCE,
            {
                device: tuple(Taint(each.key, each.effect, each.value, each.time_added) for each in marks)
                for device, marks in verdict.marks.items()
            },
            unhealthy=verdict.unhealthy,
            unknown=verdict.unknown,
        )
        if self._speaks():
            for change in changes:
                self._say(change)

    def _say(self, change: Change) -> None:
        """Write Events on the node, on the claims that hold the device, and on their pods."""
        told = describe(change)
        if told is None:
            return
        reason, text, warning = told
        from dra.kube.events import ObjectReference

        inventory, kind = self._inventory(), "Warning" if warning else "Normal"
        scope = change.condition.scope
        devices = devices_of(scope, inventory)
        name = ", ".join(devices) or scope.gpu
        node = ObjectReference("v1", "Node", self._node_name, self._node_name)
        message = f"{name} ({scope.gpu}): {text}"
        self._events.emit(node, kind, reason, message)  # type: ignore[arg-type]
        for record in self._records():
            if not any(is_part(result.device, devices) for result in record.results):
                continue
            ref = record.ref
            about = [ObjectReference("resource.k8s.io/v1", "ResourceClaim", ref.name, ref.uid, ref.namespace)]
            about += [
                ObjectReference("v1", "Pod", each.name, each.uid, ref.namespace)
                for each in record.consumers
                if each.resource == "pods"
            ]
            for each in about:
                self._events.emit(each, kind, reason, message)  # type: ignore[arg-type]


def describe(change: Change) -> tuple[str, str, bool] | None:
    """Give reason, text and whether it is a warning; None for what is not worth an Event.

    The text of a recovery has no duration: the same Event again counts instead of adding one.
    """
    before, after = change.before, change.after
    if after is not None and after.is_ill:
        return "DeviceUnhealthy", sentence(after), True
    if before is not None and before.is_ill:
        return "DeviceRecovered", f"well again after: {before.message}", False
    if after is not None and after.grade is Grade.NOTE:
        return ("DeviceXid" if after.key == XID else "DeviceNote"), sentence(after), after.key == XID
    return None


def is_part(device: str, devices: Collection[str]) -> bool:
    """Whether a device is one of these, or a partition of a GPU among them."""
    if device in devices:
        return True
    parsed = parse_device_name(device)
    return parsed is not None and str(GpuName(parsed.minor)) in devices
