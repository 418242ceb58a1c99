"""What an engine is made with: the settings of the node, and the ports to the rest of the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dra.api.gpu_settings import NO_SETTINGS, NodeSettings
from dra.prepare.effects import Revive
from dra.prepare.fetch import API_DEADLINE_SECONDS, RECORD_WAIT_SECONDS
from dra.prepare.locks import LOCK_WAIT_SECONDS
from dra.prepare.metadata import MetadataPlanner
from dra.prepare.model import (
    CdiRenderer,
    ClaimSource,
    InventorySource,
    Notify,
    Step,
    do_nothing,
    no_notice,
    no_step,
)
from dra.prepare.partitions import MigControl
from dra.prepare.passthrough.model import FREE_SECONDS, PassthroughNode, Patience
from dra.prepare.sharing.enforce import ShareEnforcer, SharePlanner
from dra.prepare.sharing.model import StrategyPlanner
from dra.prepare.timing import Timing, no_timing

# Partitions of one GPU are made one after the other, up to seven; the kubelet gives up after 45 s.
MIG_LOCK_WAIT_SECONDS = 33.0
# What a claim takes once it has its locks, so that one that would come too late is refused in time.
WORK_SECONDS = 1.0
MIG_WORK_SECONDS = 6.0
# Modules, processes that are waited for, and the kernel.
VFIO_WORK_SECONDS = FREE_SECONDS + 8.0
# How often a record may change under a call before that is an error.
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What does not change while the process runs.

    `pool` is this node's pool, `state_dir` the driver's directory among the kubelet's plugins. `create_partitions`:
    a MIG device that is allocated and does not exist is made. `parallel_claims` counts those that wait for the lock of
    a GPU too. `imported_partitions_are_ours`: MIG devices in NVIDIA's checkpoint were made by its driver, not by hand.
    """

    driver: str
    pool: str
    state_dir: Path
    cdi_root: Path
    boot_id: str
    api_deadline_seconds: float = API_DEADLINE_SECONDS
    record_wait_seconds: float = RECORD_WAIT_SECONDS
    lock_wait_seconds: float = LOCK_WAIT_SECONDS
    mig_lock_wait_seconds: float = MIG_LOCK_WAIT_SECONDS
    create_partitions: bool = False
    imported_partitions_are_ours: bool = False
    parallel_claims: int = 64


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """What the engine sees of the rest of the driver.

    `inventory` answers at once. `fresh_inventory` looks at the hardware again, within a few seconds; it is asked
    when a device is not in the inventory. `conflict` hears the UID of the claim that holds a wanted device.
    `strategies` and `effects` are how sharing plugs in. `delete_deployment` removes what NVIDIA's driver left of an MPS
    daemon, by name; None: it is left. `mig` changes partitions; None: MIG devices are taken as the inventory has them.
    `layout_changed` hears that partitions were made or destroyed, or GPUs passed through or given back. `settings` says
    how each GPU is shared at this moment.
    `timing` hears how long each step of a prepare took. `passthrough` changes kernel drivers of GPUs, also back where
    passthrough was switched off since; None: nothing is passed through. `patience`: how long it is waited for processes
    that have such a GPU open.
    """

    source: ClaimSource
    inventory: InventorySource
    renderer: CdiRenderer
    fresh_inventory: InventorySource | None = None
    notify: Notify = no_notice
    conflict: Callable[[str], None] = no_step
    step: Step = no_step
    strategies: Mapping[str, StrategyPlanner] = field(default_factory=dict)
    effects: Mapping[str, Revive] = field(default_factory=dict)
    delete_deployment: Callable[[str], None] | None = None
    mig: MigControl | None = None
    layout_changed: Callable[[], None] = do_nothing
    settings: Callable[[], NodeSettings] = lambda: NO_SETTINGS
    shares: SharePlanner = field(default_factory=ShareEnforcer)
    timing: Timing = no_timing
    metadata: MetadataPlanner | None = None
    passthrough: PassthroughNode | None = None
    patience: Patience = field(default_factory=Patience)
