"""The parts of the daemon, each made from those that are there before it.

A part that is made later is asked for at each call (`daemon.policies…`), so the order in `Daemon` is that of first use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

from dra.cdi.model import CdiOptions, Exposure
from dra.cdi.renderer import parse_capabilities
from dra.controller.publisher import Publisher
from dra.host.boot import boot_id
from dra.inventory.layout_watch import LayoutWatch
from dra.inventory.live import LiveInventory, on_bus_of
from dra.inventory.model import Inventory
from dra.inventory.ownership import scan_with_owned
from dra.inventory.scan import Scanner
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions, agent_of
from dra.nvml.kernel import mig_layouts
from dra.plugin.claim_status import ClaimStatusWriter, claim_status_writer
from dra.plugin.counters import server_keeps_counters, server_keeps_shares
from dra.plugin.crash import crash_step
from dra.plugin.endpoint import Endpoint
from dra.plugin.health_part import HealthPart
from dra.plugin.node_upkeep import deployment_deleter
from dra.plugin.owned import owned_by
from dra.plugin.policies import Policies, default_time_slice
from dra.plugin.pool_source import PoolSource
from dra.plugin.ports import ClaimPort, GpuUsers, NodeEvents
from dra.plugin.renderers import RendererByGpu
from dra.plugin.settings import offers_passthrough
from dra.plugin.sharing import HeardKeeper, Sharing, sharing_of
from dra.plugin.sockets import plan_sockets
from dra.prepare.engine import Engine, EnginePorts, EngineSettings
from dra.prepare.janitor import Janitor
from dra.prepare.metadata import MetadataFiles, MetadataPlanner

if TYPE_CHECKING:
    from dra.errors import DraError
    from dra.host.pci_binding import PciBus
    from dra.plugin.daemon import Daemon
    from dra.plugin.passthrough import PassedThrough
    from dra.plugin.settings import PluginSettings

# So long a look at what a claim changed may wait: claims that come one after the other cost one look, and none of them
# has it beside it.
_AFTER_OWN_CHANGE_SECONDS = 0.25


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


def pci_bus_of(daemon: Daemon) -> PciBus | None:
    """Give the way to bind PCI functions, where GPUs may be passed through."""
    if not offers_passthrough(daemon.settings.gates):
        return None
    # Not loaded by the many daemons that never pass anything through.
    from dra.host.pci_binding import PciBus

    return PciBus(daemon.machine.paths, daemon.machine.kernel)


def passed_through(daemon: Daemon) -> PassedThrough | None:
    """Give what knows which GPUs are passed through, where they may be."""
    if daemon.pci is None:
        return None
    from dra.plugin.passthrough import PassedThrough

    return PassedThrough(daemon.pci, daemon.devices_in_use)


def measure_of(daemon: Daemon) -> Callable[[str], AbstractContextManager[list[DraError]]]:
    """Give what runs around each call; where GPUs may be passed through, the pool hears afterwards what claims hold."""
    if daemon.pci is None:
        return daemon.calls.call
    from dra.plugin.passthrough import telling

    return telling(daemon.calls.call, lambda: daemon.pool.holds_changed())  # noqa: PLW0108 - it is made later


def inventory_of(daemon: Daemon) -> LiveInventory:
    """Give the live view of the hardware."""
    paths, session = daemon.machine.paths, daemon.session

    def changed() -> None:
        daemon.inventory.rescan("somebody changed the MIG layout or the drivers of GPUs")
        daemon.pool.holds_changed()

    def layout() -> object:
        return mig_layouts(paths), daemon.passed.layout() if daemon.passed is not None else None

    layouts = LayoutWatch(layout, tidy=session.tidy, changed=changed)
    return LiveInventory(
        layouts.around(_scan_with_passthrough(daemon, _scan_of(daemon, Scanner(session, paths)))),
        interval_seconds=daemon.settings.inventory_interval_seconds,
        in_use=daemon.devices_in_use,
        on_bus=on_bus_of(paths),
        tidy=layouts.tidy,
    )


def _scan_of(daemon: Daemon, scanner: Scanner) -> Callable[[], Inventory]:
    """Give the look at the hardware; for partitions on demand, with what could be made and what is ours."""
    if daemon.settings.mig_mode != "dynamic" and not daemon.settings.follow_policies:
        return scanner.scan
    return scan_with_owned(
        lambda: scanner.scan(profiles=True),
        lambda: owned_by(daemon.engine.store, daemon.engine.settings.boot_id, daemon.engine.marks),
    )


def _scan_with_passthrough(daemon: Daemon, scan: Callable[[], Inventory]) -> Callable[[], Inventory]:
    if daemon.pci is None:
        return scan
    from dra.inventory.passthrough import scan_with_passthrough

    return scan_with_passthrough(scan, daemon.pci, daemon.machine.paths)


def sharing_for(daemon: Daemon) -> Sharing[HeardKeeper]:
    """Give the ways of sharing."""
    return sharing_of(
        daemon.machine.paths,
        driver=daemon.settings.driver_name,
        session=daemon.session,
        inventory=daemon.hardware,
        notify=daemon.notices.notify,
        settings=daemon.settings,
        settings_of=daemon.settings_of,
    )


def engine_of(daemon: Daemon) -> Engine:
    """Give what prepares claims."""
    paths, settings = daemon.machine.paths, daemon.settings
    engine_settings = EngineSettings(
        driver=settings.driver_name,
        pool=settings.node_name,
        state_dir=paths.state_dir(settings.driver_name),
        cdi_root=paths.cdi_root,
        boot_id=boot_id(paths),
        create_partitions=settings.mig_mode == "dynamic",
        imported_partitions_are_ours=settings.gates.get("DynamicMIG", False),
    )
    return Engine(engine_settings, _engine_ports(daemon))


def _engine_ports(daemon: Daemon) -> EnginePorts:
    settings = daemon.settings
    return EnginePorts(
        delete_deployment=deployment_deleter(daemon.client, settings),
        source=ClaimPort(daemon.client),
        inventory=daemon.hardware,
        fresh_inventory=daemon.look_again,
        renderer=_renderer_of(daemon),
        notify=daemon.notices.notify,
        conflict=lambda holder_uid: daemon.janitor.request(holder_uid),  # noqa: PLW0108 - it is made later
        step=crash_step(settings.crash_at),
        strategies=daemon.sharing.strategies,
        effects=daemon.sharing.effects,
        shares=daemon.sharing.shares,
        mig=daemon.partitions,
        layout_changed=lambda: daemon.inventory.rescan(
            "partitions or kernel drivers changed", within_seconds=_AFTER_OWN_CHANGE_SECONDS
        ),
        settings=lambda: daemon.policies.settings,
        timing=daemon.calls.step,
        metadata=_metadata_of(daemon),
        # Also where passthrough is switched off now: what was bound while it was on is given back.
        passthrough=daemon.passthrough,
    )


def _renderer_of(daemon: Daemon) -> RendererByGpu:
    settings = daemon.settings
    options = CdiOptions(
        driver=settings.driver_name,
        exposure=cast("Exposure", settings.cdi_exposure),
        capabilities=parse_capabilities(settings.driver_capabilities),
        hook_path=settings.cdi_hook_path,
    )
    return RendererByGpu(daemon.machine.paths, options, daemon.hardware, lambda: daemon.policies.settings)


def _metadata_of(daemon: Daemon) -> MetadataPlanner:
    paths, driver = daemon.machine.paths, daemon.settings.driver_name
    files = MetadataFiles(
        driver, state_dir=paths.state_dir(driver), cdi_root=paths.cdi_root, host_path=paths.host_spelling
    )
    return MetadataPlanner(
        files,
        lambda device: daemon.pool.attributes_of(device),  # noqa: PLW0108 - it is made later
        enabled=daemon.settings.device_metadata,
    )


def janitor_of(daemon: Daemon) -> Janitor:
    """Give what tidies up after claims that are gone."""
    return Janitor(
        daemon.engine,
        ClaimPort(daemon.client),
        device_in_use=GpuUsers(daemon.session, daemon.hardware, holders=daemon.passthrough.holders).in_use,
        notify=daemon.notices.notify,
    )


def pool_of(daemon: Daemon) -> PoolSource:
    """Give what says how the node's pool should look."""
    settings, client = daemon.settings, daemon.client
    names = {"driver": settings.driver_name, "node_name": settings.node_name}
    return PoolSource(
        settings.driver_name,
        settings.node_name,
        feed=daemon.feed,
        mig_mode=settings.mig_mode,
        keeps_counters=lambda version: server_keeps_counters(client, version, **names),
        keeps_shares=lambda version: server_keeps_shares(client, version, **names),
        passthrough=daemon.pci is not None,
        in_use=daemon.devices_in_use,
        settings=settings.gpus,
        mps=daemon.keeper_presence.present(),
        on_problem=NodeEvents(daemon.events, settings.node_name).problem,
        on_shared=daemon.keeper_presence.begin,
    )


def publisher_of(daemon: Daemon) -> Publisher:
    """Give what writes the pool to the API."""
    settings = daemon.settings
    return Publisher(
        daemon.client,
        settings.node_name,
        settings.driver_name,
        lock_path=daemon.machine.paths.state_dir(settings.driver_name) / "publisher.lock",
        start_jitter_seconds=settings.start_jitter_seconds,
        on_server_version=daemon.pool.server_is,
        on_dropped=lambda dropped: daemon.pool.server_dropped(dropped.gates),
        on_lead=lambda: daemon.policies.recall(),  # noqa: PLW0108 - they are made later
    )


def health_part_of(daemon: Daemon) -> HealthPart:
    """Give what watches the devices' health."""
    return HealthPart(
        daemon.settings,
        daemon.machine,
        daemon.session,
        boot_id=daemon.engine.settings.boot_id,
        pool=daemon.pool,
        inventory=daemon.hardware,
        rescan=daemon.inventory.rescan,
        held=daemon.devices_in_use,
        records=daemon.engine.store.records,
        events=daemon.events,
        speaks=lambda: daemon.publisher.status().state != "waiting",
        settings_of=daemon.settings_of,
        away=(lambda _uuid: False) if daemon.passed is None else daemon.passed.__contains__,
    )


def policies_of(daemon: Daemon) -> Policies:
    """Give what follows the policies of the cluster."""
    return Policies(
        daemon.settings,
        client=daemon.client,
        events=daemon.events,
        engine=daemon.engine,
        pool=daemon.pool,
        publisher=daemon.publisher,
        control=daemon.partitions,
        inventory=daemon.hardware,
        look_again=daemon.look_again,
        time_slice=default_time_slice(daemon.machine.paths),
        step=crash_step(daemon.settings.crash_at),
    )


def claim_status_of(daemon: Daemon) -> ClaimStatusWriter:
    """Give what writes the hardware behind a claim into its status."""
    return claim_status_writer(
        daemon.client,
        driver=daemon.settings.driver_name,
        boot_id=daemon.engine.settings.boot_id,
        records=daemon.engine.store.records,
        conditions=lambda: daemon.feed.current()[1],
        inventory=daemon.hardware,
    )


def endpoint_of(daemon: Daemon) -> Endpoint:
    """Give the kubelet's side."""
    settings, paths = daemon.settings, daemon.machine.paths
    sockets = plan_sockets(
        settings.driver_name,
        plugins_dir=paths.kubelet_plugins_dir,
        registry_dir=paths.kubelet_registry_dir,
        pod_uid=settings.pod_uid,
    )
    return Endpoint(
        settings.driver_name,
        sockets=sockets,
        engine=daemon.engine,
        feed=daemon.feed,
        on_status=daemon.kubelet_said,
        on_failure=daemon.notices.failed,
        measure=measure_of(daemon),
    )
