"""The parts of the daemon, each made from those that are there before it.

    host paths -> NVML session -> live inventory -> pool -> publisher -> API server
    kubelet -> endpoint -> engine -> CDI files;  janitor -> engine

A part that is made later is asked for at each call (`parts.policies…`), so the order in `Parts` is that of first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from dra.api.gpu_settings import GpuSettings
from dra.cdi.model import CdiOptions, Exposure
from dra.cdi.renderer import parse_capabilities
from dra.controller.publisher import Publisher
from dra.health.feed import HealthFeed
from dra.host.boot import boot_id
from dra.inventory.layout_watch import LayoutWatch
from dra.inventory.live import LiveInventory, on_bus_of
from dra.inventory.model import Inventory
from dra.inventory.ownership import scan_with_owned
from dra.inventory.scan import Scanner
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions, agent_of
from dra.kube.events import EventRecorder
from dra.nvml.kernel import mig_layouts
from dra.nvml.session import HoldPolicy, NvmlSession
from dra.plugin import passthrough_part
from dra.plugin.call_metrics import CallMetrics
from dra.plugin.claim_status import ClaimStatusWriter, claim_status_writer
from dra.plugin.counters import server_keeps_counters, server_keeps_shares
from dra.plugin.crash import crash_step
from dra.plugin.endpoint import Endpoint
from dra.plugin.health_part import HealthPart
from dra.plugin.keeper_presence import KeeperPresence
from dra.plugin.machine import Machine
from dra.plugin.mig_port import MigPort
from dra.plugin.mps_watch import MpsWatch
from dra.plugin.node_upkeep import deployment_deleter
from dra.plugin.owned import owned_by
from dra.plugin.passthrough_port import PassthroughPort
from dra.plugin.policies import Policies, default_time_slice
from dra.plugin.pool_source import PoolSource
from dra.plugin.ports import ClaimEvents, ClaimPort, GpuUsers, NodeEvents
from dra.plugin.readiness import Readiness
from dra.plugin.renderers import RendererByGpu
from dra.plugin.settings import watches_health
from dra.plugin.sharing import HeardKeeper, Sharing, sharing_of
from dra.plugin.sockets import plan_sockets
from dra.prepare.engine import Engine, EnginePorts, EngineSettings
from dra.prepare.janitor import Janitor
from dra.prepare.metadata import MetadataFiles, MetadataPlanner
from dra.prepare.sharing.mps_model import mps_folder

if TYPE_CHECKING:
    from dra.plugin.settings import PluginSettings

# So long a look at what a claim changed may wait: claims that come one after the other cost one look, and none of them
# has it beside it.
_AFTER_OWN_CHANGE_SECONDS = 0.25
# How long a prepare call waits for the hardware to be looked at again when its device is not known.
FRESH_INVENTORY_SECONDS = 5.0


class Parts:
    """What one instance of the driver consists of. Nothing runs yet."""

    def __init__(self, settings: PluginSettings, machine: Machine) -> None:
        self.settings, self.machine = settings, machine
        self.readiness = Readiness()
        self.calls = CallMetrics(settings.driver_name)
        self.client = client_of(settings)
        self.events = EventRecorder(self.client, component=settings.driver_name, host=settings.node_name)
        self.notices = ClaimEvents(self.events)
        self.session = NvmlSession(
            machine.library, hold=HoldPolicy(settings.nvml_hold), kernel_version=machine.kernel_version
        )
        # Both None unless GPUs may be passed through.
        self.pci = passthrough_part.pci_bus_of(settings, machine)
        self.passed = passthrough_part.passed_through(self.pci, self.devices_in_use)
        # Each part may ask those above it at once, and those below it from its first call on.
        self.inventory = inventory_of(self)
        self.sharing = sharing_for(self)
        self.partitions = MigPort(self.session, self.hardware)
        self.passthrough = PassthroughPort(machine.paths, self.session, kernel=machine.kernel)
        self.engine = engine_of(self)
        self.mps_watch = MpsWatch(self.sharing.keeper, self.engine, self.notices.notify)
        self.sharing.keeper.in_use = self.mps_watch.begin
        self.janitor = janitor_of(self)
        self.feed = HealthFeed()
        self.keeper_presence = KeeperPresence(
            self.sharing.keeper,
            lambda present: self.pool.mps_is(present),  # noqa: PLW0108 - the pool is made below
            folder=mps_folder(self.engine.settings.state_dir),
        )
        self.sharing.keeper.promised = self.keeper_presence.present
        self.pool = pool_of(self)
        self.publisher = publisher_of(self)
        self.pool.publish_to(self.publisher.set_desired)
        self.health = health_part_of(self) if watches_health(settings.gates) else None
        self.policies = policies_of(self)
        self.claim_status = claim_status_of(self)
        self.endpoint = endpoint_of(self)

    # -- what the parts ask of each other ----------------------------------------------------------

    def hardware(self) -> Inventory:
        """Give what the node has, as it was last looked at."""
        return self.inventory.current

    def look_again(self) -> Inventory:
        """Have the hardware looked at; waits FRESH_INVENTORY_SECONDS for it at most."""
        self.inventory.rescan_and_wait(timeout_seconds=FRESH_INVENTORY_SECONDS)
        return self.inventory.current

    def settings_of(self, gpu_uuid: str) -> GpuSettings:
        """Give what flags and policies say of a GPU."""
        return self.policies.of(gpu_uuid)

    def devices_in_use(self) -> set[str]:
        """Give the names of the devices that claims hold."""
        return {hold.device for hold in self.engine.store.holds(self.engine.settings.boot_id)}

    def kubelet_said(self, accepted: bool, error: str) -> None:
        """Take the kubelet's answer to the registration."""
        self.readiness.set("registered", "" if accepted else f"the kubelet refused the driver: {error}")


def client_of(settings: PluginSettings) -> KubeClient:
    """Give the way to the API server."""
    options = KubeOptions(
        kubeconfig=settings.kubeconfig or None,
        user_agent=agent_of(f"dra/{settings.driver_name}", settings.pod_uid),
    )
    return KubeClient(
        Connection(options),
        qps=settings.kube_qps,
        burst=settings.kube_burst,
        field_manager=settings.driver_name,
    )


def inventory_of(parts: Parts) -> LiveInventory:
    """Give the live view of the hardware."""
    paths, session = parts.machine.paths, parts.session

    def changed() -> None:
        parts.inventory.rescan("somebody changed the MIG layout or the drivers of GPUs")
        parts.pool.holds_changed()

    def layout() -> object:
        return mig_layouts(paths), parts.passed.layout() if parts.passed is not None else None

    layouts = LayoutWatch(layout, tidy=session.tidy, changed=changed)
    return LiveInventory(
        layouts.around(
            passthrough_part.scan_of(
                _scan_of(parts, Scanner(session, paths)), parts.pci, parts.machine, parts.devices_in_use
            )
        ),
        interval_seconds=parts.settings.inventory_interval_seconds,
        in_use=parts.devices_in_use,
        on_bus=on_bus_of(paths),
        tidy=layouts.tidy,
    )


def _scan_of(parts: Parts, scanner: Scanner) -> Callable[[], Inventory]:
    """Give the look at the hardware; for partitions on demand, with what could be made and what is ours."""
    if parts.settings.mig_mode != "dynamic" and not parts.settings.follow_policies:
        return scanner.scan
    return scan_with_owned(
        lambda: scanner.scan(profiles=True),
        lambda: owned_by(parts.engine.store, parts.engine.settings.boot_id, parts.engine.marks),
    )


def sharing_for(parts: Parts) -> Sharing[HeardKeeper]:
    """Give the ways of sharing."""
    return sharing_of(
        parts.machine.paths,
        driver=parts.settings.driver_name,
        session=parts.session,
        inventory=parts.hardware,
        notify=parts.notices.notify,
        settings=parts.settings,
        settings_of=parts.settings_of,
    )


def engine_of(parts: Parts) -> Engine:
    """Give what prepares claims."""
    paths, settings = parts.machine.paths, parts.settings
    engine_settings = EngineSettings(
        driver=settings.driver_name,
        pool=settings.node_name,
        state_dir=paths.state_dir(settings.driver_name),
        cdi_root=paths.cdi_root,
        boot_id=boot_id(paths),
        create_partitions=settings.mig_mode == "dynamic",
        imported_partitions_are_ours=settings.gates.get("DynamicMIG", False),
    )
    return Engine(engine_settings, _engine_ports(parts))


def _engine_ports(parts: Parts) -> EnginePorts:
    settings = parts.settings
    return EnginePorts(
        delete_deployment=deployment_deleter(parts.client, settings),
        source=ClaimPort(parts.client),
        inventory=parts.hardware,
        fresh_inventory=parts.look_again,
        renderer=_renderer_of(parts),
        notify=parts.notices.notify,
        conflict=lambda holder_uid: parts.janitor.request(holder_uid),  # noqa: PLW0108 - it is made later
        step=crash_step(settings.crash_at),
        strategies=parts.sharing.strategies,
        effects=parts.sharing.effects,
        shares=parts.sharing.shares,
        mig=parts.partitions,
        layout_changed=lambda: parts.inventory.rescan(
            "partitions or kernel drivers changed", within_seconds=_AFTER_OWN_CHANGE_SECONDS
        ),
        settings=lambda: parts.policies.settings,
        timing=parts.calls.step,
        metadata=_metadata_of(parts),
        # Also where passthrough is switched off now: what was bound while it was on is given back.
        passthrough=parts.passthrough,
    )


def _renderer_of(parts: Parts) -> RendererByGpu:
    settings = parts.settings
    options = CdiOptions(
        driver=settings.driver_name,
        exposure=cast("Exposure", settings.cdi_exposure),
        capabilities=parse_capabilities(settings.driver_capabilities),
        hook_path=settings.cdi_hook_path,
    )
    return RendererByGpu(parts.machine.paths, options, parts.hardware, lambda: parts.policies.settings)


def _metadata_of(parts: Parts) -> MetadataPlanner:
    paths, driver = parts.machine.paths, parts.settings.driver_name
    files = MetadataFiles(
        driver, state_dir=paths.state_dir(driver), cdi_root=paths.cdi_root, host_path=paths.host_spelling
    )
    return MetadataPlanner(
        files,
        lambda device: parts.pool.attributes_of(device),  # noqa: PLW0108 - it is made later
        enabled=parts.settings.device_metadata,
    )


def janitor_of(parts: Parts) -> Janitor:
    """Give what tidies up after claims that are gone."""
    return Janitor(
        parts.engine,
        ClaimPort(parts.client),
        device_in_use=GpuUsers(parts.session, parts.hardware, holders=parts.passthrough.holders).in_use,
        notify=parts.notices.notify,
    )


def pool_of(parts: Parts) -> PoolSource:
    """Give what says how the node's pool should look."""
    settings, client = parts.settings, parts.client
    names = {"driver": settings.driver_name, "node_name": settings.node_name}
    return PoolSource(
        settings.driver_name,
        settings.node_name,
        feed=parts.feed,
        mig_mode=settings.mig_mode,
        keeps_counters=lambda version: server_keeps_counters(client, version, **names),
        keeps_shares=lambda version: server_keeps_shares(client, version, **names),
        passthrough=parts.pci is not None,
        in_use=parts.devices_in_use,
        settings=settings.gpus,
        mps=parts.keeper_presence.present(),
        on_problem=NodeEvents(parts.events, settings.node_name).problem,
        on_shared=parts.keeper_presence.begin,
    )


def publisher_of(parts: Parts) -> Publisher:
    """Give what writes the pool to the API."""
    settings = parts.settings
    return Publisher(
        parts.client,
        settings.node_name,
        settings.driver_name,
        lock_path=parts.machine.paths.state_dir(settings.driver_name) / "publisher.lock",
        start_jitter_seconds=settings.start_jitter_seconds,
        on_server_version=parts.pool.server_is,
        on_dropped=lambda dropped: parts.pool.server_dropped(dropped.gates),
        on_lead=lambda: parts.policies.recall(),  # noqa: PLW0108 - they are made later
    )


def health_part_of(parts: Parts) -> HealthPart:
    """Give what watches the devices' health."""
    return HealthPart(
        parts.settings,
        parts.machine,
        parts.session,
        boot_id=parts.engine.settings.boot_id,
        pool=parts.pool,
        inventory=parts.hardware,
        rescan=parts.inventory.rescan,
        held=parts.devices_in_use,
        records=parts.engine.store.records,
        events=parts.events,
        speaks=lambda: parts.publisher.status().state != "waiting",
        settings_of=parts.settings_of,
        away=(lambda _uuid: False) if parts.passed is None else parts.passed.__contains__,
    )


def policies_of(parts: Parts) -> Policies:
    """Give what follows the policies of the cluster."""
    return Policies(
        parts.settings,
        client=parts.client,
        events=parts.events,
        engine=parts.engine,
        pool=parts.pool,
        publisher=parts.publisher,
        control=parts.partitions,
        inventory=parts.hardware,
        look_again=parts.look_again,
        time_slice=default_time_slice(parts.machine.paths),
        step=crash_step(parts.settings.crash_at),
    )


def claim_status_of(parts: Parts) -> ClaimStatusWriter:
    """Give what writes the hardware behind a claim into its status."""
    return claim_status_writer(
        parts.client,
        driver=parts.settings.driver_name,
        boot_id=parts.engine.settings.boot_id,
        records=parts.engine.store.records,
        conditions=lambda: parts.feed.current()[1],
        inventory=parts.hardware,
    )


def endpoint_of(parts: Parts) -> Endpoint:
    """Give the kubelet's side."""
    settings, paths = parts.settings, parts.machine.paths
    sockets = plan_sockets(
        settings.driver_name,
        plugins_dir=paths.kubelet_plugins_dir,
        registry_dir=paths.kubelet_registry_dir,
        pod_uid=settings.pod_uid,
    )
    return Endpoint(
        settings.driver_name,
        sockets=sockets,
        engine=parts.engine,
        feed=parts.feed,
        on_status=parts.kubelet_said,
        on_failure=parts.notices.failed,
        measure=passthrough_part.measure_of(
            parts.calls.call,
            parts.pci,
            lambda: parts.pool.holds_changed(),  # noqa: PLW0108 - it is made later
        ),
    )
