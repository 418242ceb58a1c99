"""Turns each new inventory into the pool to publish and into the health that is streamed.

The shape of the pool depends on what the API server stores; the publisher tells, first its version and then what
it left out. Until it does, the newest server is assumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from dra.api.gpu_settings import NO_SETTINGS, NodeSettings
from dra.health.feed import HealthFeed, plan_conditions
from dra.inventory.diff import InventoryDiff
from dra.inventory.model import Gpu, Inventory
from dra.slices.devices import SliceProblem
from dra.slices.features import NEWEST, ServerFeatures
from dra.slices.partitions import as_published
from dra.slices.pool import MigMode, PoolContent, build_pool
from dra.slices.sharing import identity_of
from dra.slices.taints import Taint
from dra.telemetry.log import get_logger

log = get_logger()


class PoolSource:
    """Builds on the thread that brings the news and hands on at once. Safe from several threads.

    Args:
        driver: name of the driver.
        node_name: the node, whose name the pool has too.
        feed: takes the health of the pool's devices.
        mig_mode: which partitions are published; `dynamic` needs a server that keeps counters.
        keeps_counters: asks a server of this version whether it does; None if it did not say.
        keeps_shares: the same for devices that several claims share; asked where the settings want any.
        passthrough: GPUs may also be published as `gpu-vfio-<index>`; then it is asked about counters too.
        in_use: names of devices that claims hold; asked where GPUs may be passed through.
        settings: what holds for each GPU.
        mps: whether MPS daemons can be had on this node, as far as is known at the start; see `mps_is`.
        on_problem: hears once of each device that could not be published as it should be.
        on_shared: hears that something is shared, each time a pool is built so.
    """

    def __init__(
        self,
        driver: str,
        node_name: str,
        *,
        feed: HealthFeed,
        mig_mode: MigMode = "static",
        keeps_counters: Callable[[tuple[int, int]], bool | None] = lambda _version: None,
        keeps_shares: Callable[[tuple[int, int]], bool | None] = lambda _version: None,
        passthrough: bool = False,
        in_use: Callable[[], Collection[str]] = tuple,
        settings: NodeSettings = NO_SETTINGS,
        mps: bool = False,
        on_problem: Callable[[SliceProblem], None] = lambda _problem: None,
        on_shared: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver, self._node_name, self._feed, self._mig_mode = driver, node_name, feed, mig_mode
        self._keeps_counters, self._keeps_shares = keeps_counters, keeps_shares
        self._passthrough, self._in_use = passthrough, in_use
        # What claims held when the last pool was built; empty where it makes no difference.
        self._held: frozenset[str] = frozenset()
        # The version for which it was asked; None: not yet.
        self._shares_asked: tuple[int, int] | None = None
        self._settings, self._mps, self._on_problem = settings, mps, on_problem
        self._on_shared = on_shared
        self._lock = threading.Lock()
        self._inventory: Inventory | None = None
        self._features = NEWEST
        self._version: tuple[int, int] | None = None
        self._attributes: dict[str, Mapping[str, Any]] = {}
        self._problems: tuple[object, ...] = ()
        # By source; the order in which sources first spoke decides between equal keys.
        self._taints: dict[str, dict[str, tuple[Taint, ...]]] = {}
        # By source: what is unhealthy, what is unknown.
        self._messages: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        self._publish: Callable[[PoolContent], None] = lambda _pool: None

    def publish_to(self, publish: Callable[[PoolContent], None]) -> None:
        """Say who takes the pools."""
        self._publish = publish

    def attributes_of(self, device: str) -> Mapping[str, Any]:
        """Give the published attributes of a device; empty if it is not published."""
        return self._attributes.get(device, {})

    @property
    def looked(self) -> bool:
        """Whether there was an inventory yet."""
        return self._inventory is not None

    def inventory_changed(self, inventory: Inventory, _difference: InventoryDiff) -> None:
        """Take a new inventory (a subscriber of the live inventory)."""
        with self._lock:
            before, self._inventory = self._inventory, inventory
            # A partition that is made or destroyed for a claim is no news, and a large pool is no small work.
            if before is None or self._shown(before) != self._shown(inventory) or self._holds() != self._held:
                self._build()

    def holds_changed(self) -> None:
        """Take that claims hold other devices: where the server keeps no counters, what they hold hides its siblings."""
        with self._lock:
            if self._inventory is not None and self._holds() != self._held:
                self._build()

    def _holds(self) -> frozenset[str]:
        return frozenset(self._in_use()) if self._passthrough else frozenset()

    def set_taints(
        self,
        source: str,
        taints: Mapping[str, tuple[Taint, ...]],
        *,
        unhealthy: Mapping[str, str] | None = None,
        unknown: Mapping[str, str] | None = None,
    ) -> None:
        """Replace all taints that one source (`health`, `policy`) has set; published at once if anything differs.

        Args:
            source: who says it. Where two sources have a taint of the same key and effect, the one that spoke first
                after the start is kept.
            taints: by device name; those of a GPU (`gpu-3`) hold for its partitions too. A device that is not
                published (yet) is no error. A taint without `time_added` keeps the time that the API has for it.
            unhealthy: by device name, what the health stream says of it, with or without a taint.
            unknown: the same for devices that nobody watches.
        """
        wanted = {device: tuple(each) for device, each in sorted(taints.items()) if each}
        messages = (dict(unhealthy or {}), dict(unknown or {}))
        with self._lock:
            if wanted == self._taints.get(source, {}) and messages == self._messages.get(source, ({}, {})):
                return
            self._taints[source], self._messages[source] = wanted, messages
            self._build()

    def settings_changed(self, settings: NodeSettings) -> None:
        """Take what holds for each GPU from now on. May ask the server whether it keeps shares."""
        version = self._version
        kept = None if version is None else self._ask_about_shares(version, settings)
        with self._lock:
            if kept is not None and self._version == version:
                self._features = replace(self._features, consumable=kept)
            if settings != self._settings:
                self._settings = settings
                self._build()

    def mps_is(self, available: bool) -> None:
        """Take whether MPS daemons can be had on this node: only then do shares have limits."""
        with self._lock:
            if available != self._mps:
                self._mps = available
                self._build()

    def server_is(self, version: tuple[int, int]) -> None:
        """Take the API server's version; asks it about counters if partitions are offered on demand."""
        features = ServerFeatures.of_version(*version)
        if self._mig_mode == "dynamic" or self._passthrough:
            kept = self._keeps_counters(version)
            features = replace(features, partitionable=features.partitionable if kept is None else kept)
        self._shares_asked = None
        shares = self._ask_about_shares(version, self._settings)
        if shares is not None:
            features = replace(features, consumable=shares)
        with self._lock:
            self._version = version
            before, self._features = self._features, features
            log.info("server_version_known", version=".".join(str(part) for part in version))
            if replace(before, version=version) != features:
                self._build()

    def _ask_about_shares(self, version: tuple[int, int], settings: NodeSettings) -> bool | None:
        """Ask once for a version, where something is shared; None if it was asked or is of no interest."""
        if not settings.share_something or self._shares_asked == version:
            return None
        kept = self._keeps_shares(version)
        if kept is not None:
            self._shares_asked = version
        return kept

    def server_dropped(self, gates: Collection[str]) -> None:
        """Take the gates whose fields the server did not store. They stay out until its version changes."""
        with self._lock:
            narrowed = narrow(self._features, gates)
            if narrowed != self._features:
                self._features = narrowed
                self._build()

    def _shown(self, inventory: Inventory) -> Inventory:
        def mode_of(gpu: Gpu) -> MigMode:
            return self._settings.of(identity_of(gpu)).mig.mode or self._mig_mode

        return as_published(inventory, mode_of=mode_of, features=self._features)

    def _build(self) -> None:
        if self._inventory is None:
            return
        if self._settings.share_something:
            self._on_shared()
        self._held = self._holds()
        pool = build_pool(
            self._inventory,
            node_name=self._node_name,
            driver=self._driver,
            features=self._features,
            mig_mode=self._mig_mode,
            taints=self._all_taints(),
            settings=self._settings,
            mps=self._mps,
            in_use=self._held,
        )
        self._attributes = {str(device["name"]): device.get("attributes") or {} for device in pool.devices}
        names = list(self._attributes)
        unhealthy, unknown = (
            {name: text for each in self._messages.values() for name, text in each[kind].items()}
            for kind in (0, 1)
        )
        self._feed.publish(
            plan_conditions(
                self._inventory, pool=pool.pool_name, devices=names, unhealthy=unhealthy, unknown=unknown
            )
        )
        for problem in pool.problems:
            if problem not in self._problems:
                log.warning("device_published_with_problem", problem=str(problem))
                self._on_problem(problem)
        self._problems = pool.problems
        self._publish(pool)

    def _all_taints(self) -> dict[str, tuple[Taint, ...]]:
        together: dict[str, tuple[Taint, ...]] = {}
        for taints in self._taints.values():
            for device, each in taints.items():
                together[device] = (*together.get(device, ()), *each)
        return together


def narrow(features: ServerFeatures, gates: Collection[str]) -> ServerFeatures:
    """Give the features of a server on which these gates are off."""
    return replace(
        features,
        device_taints=features.device_taints and "DRADeviceTaints" not in gates,
        partitionable=features.partitionable and "DRAPartitionableDevices" not in gates,
        consumable=features.consumable and "DRAConsumableCapacity" not in gates,
        list_attributes=features.list_attributes and "DRAListTypeAttributes" not in gates,
    )
