"""From a claim and the hardware to what has to be prepared. Pure: reads nothing, changes nothing.

A plan is complete before anything is touched: a claim that cannot be prepared fails here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dra.api.claim import AllocatedDevice, ClaimView
from dra.api.config import KIND_OF_TYPE, DecodedConfig, decode_configs, effective_config
from dra.api.gpu_settings import NO_SETTINGS, NodeSettings
from dra.cdi.spec import device_name
from dra.errors import ConfigError
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, parse_device_name
from dra.prepare.devices import NO_MIG, Found, MigView, find_device
from dra.prepare.effects import Effect, journal_entry
from dra.prepare.holds import Hold, check_exclusive
from dra.prepare.mig_effects import CreateMig
from dra.prepare.model import CdiTarget, PreparedDevice
from dra.prepare.passthrough.effect import BindVfio
from dra.prepare.passthrough.model import function_of, is_passthrough
from dra.prepare.passthrough.plan import plan_passthrough
from dra.prepare.passthrough.view import NO_PASSTHROUGH, PassthroughView
from dra.prepare.shares import check_shares
from dra.prepare.sharing.enforce import ShareEnforcer, SharePlanner, check_strategy
from dra.prepare.sharing.model import (
    ConfigGroup,
    DeviceEdits,
    SharedDevice,
    SharingContext,
    SharingPlan,
    StrategyPlanner,
    merge_plans,
)

# Where nobody plans daemons, the containers of a share are told so.
_NO_MPS = ShareEnforcer()


@dataclass(frozen=True, slots=True)
class Plan:
    """What prepare has to bring about.

    `effects` come before the CDI spec, which names `targets`; `devices` is the answer to the kubelet. `warnings`
    are for the log. `made` are the partitions among the effects, by device: their targets are complete only once
    they are applied (`complete_targets`).
    """

    effects: tuple[Effect, ...]
    targets: tuple[CdiTarget, ...]
    devices: tuple[PreparedDevice, ...]
    driver_version: str
    warnings: tuple[str, ...] = ()
    made: Mapping[str, CreateMig] = field(default_factory=dict)
    bindings: tuple[BindVfio, ...] = ()

    @property
    def changed_hardware(self) -> bool:
        """Whether applying it may have changed what the inventory shows."""
        return any(not effect.was_there for effect in self.made.values()) or any(
            effect.changed for effect in self.bindings
        )

    def complete_targets(self) -> tuple[CdiTarget, ...]:
        """Give the targets with the instances of partitions that were made. Raises DeviceError before that."""
        if not self.made:
            return self.targets
        return tuple(
            replace(target, mig_instances=self.made[target.name].partition.instances)
            if target.name in self.made
            else target
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """The node as planning sees it.

    Args:
        inventory: the hardware as of now.
        cdi_kind: `k8s.gpu.nvidia.com/claim`.
        holds: what other claims hold; holds of the claim itself are left out.
        strategies: planners by sharing strategy; a strategy without one is refused.
        mig: what is known of the claim's MIG devices.
        settings: how each GPU is shared.
        shares: plans what holds shares to their amounts.
        passthrough: what is known of the claim's functions that are passed through.
    """

    inventory: Inventory
    cdi_kind: str
    holds: Sequence[Hold] = ()
    strategies: Mapping[str, StrategyPlanner] = field(default_factory=dict)
    mig: MigView = NO_MIG
    settings: NodeSettings = NO_SETTINGS
    shares: SharePlanner = _NO_MPS
    passthrough: PassthroughView = NO_PASSTHROUGH


def plan_prepare(view: ClaimView, node: NodeView, sharing: SharingContext, *, holder: bool = False) -> Plan:
    """Plan one claim.

    Args:
        view: an admitted claim.
        node: the node it was allocated devices of.
        sharing: what planners of strategies may look at.
        holder: the claim holds these very devices already, so that nobody else is asked.

    Raises:
        ConfigError: DRA-CONFIG-... for what the user wrote.
        DeviceError: DRA-DEVICE-UNKNOWN, DRA-DEVICE-LOST, DRA-DEVICE-MIG-MODE, DRA-DEVICE-HELD, DRA-MIG-MODE-OFF,
            DRA-SHARE-OVERBOOKED.
        StackError: DRA-DRIVER-ABSENT.
    """
    configs = decode_configs(view.configs)
    # First who has it: a GPU that another claim's partitions keep in MIG mode is held, by a claim that can be named.
    if not holder:
        _check_free(view, node)
    through = plan_passthrough(view.results, configs, inventory=node.inventory, view=node.passthrough)
    results = [result for result in view.results if not is_passthrough(result)]
    found = [find_device(result, node.inventory, node.mig) for result in results]
    effects = list(_distinct(effect for each in found for effect in each.effects))
    made = {effect.device: effect for effect in effects if isinstance(effect, CreateMig)}
    groups = _groups(results, found, configs, made=made)
    shared = merge_plans(
        (
            *(_plan_group(group, node.strategies, sharing, node.settings) for group in groups),
            node.shares(_limited(results, found, groups, made), sharing, node.settings, holder=holder),
        )
    )
    return Plan(
        effects=tuple(_distinct((*through.effects, *effects, *shared.effects))),
        targets=(*_targets(results, found, shared.edits), *through.targets),
        devices=tuple(_prepared(result, view.ref.uid, node.cdi_kind) for result in view.results),
        driver_version=node.inventory.driver_version,
        warnings=(
            *(text for config in configs for text in config.warnings),
            *shared.warnings,
            *through.warnings,
        ),
        made=made,
        bindings=through.effects,
    )


def lacks_device(view: ClaimView, inventory: Inventory) -> bool:
    """Whether an allocated device is not in the inventory, or not as a whole, so that a fresh look may help."""
    gpus = {gpu.minor: gpu for gpu in inventory.gpus if not gpu.unusable}
    for result in view.results:
        if is_passthrough(result):
            if function_of(result.device, inventory) is None:
                return True
            continue
        name = parse_device_name(result.device)
        gpu = None if name is None else gpus.get(name.minor)
        if gpu is None:
            return True
        # The last partition may have gone a moment ago, and the mode with it.
        if gpu.mig_enabled and isinstance(name, GpuName) and not result.admin_access:
            return True
    return False


def _check_free(view: ClaimView, node: NodeView) -> None:
    """Refuse devices that other claims hold. Raises DeviceError: DRA-DEVICE-HELD, DRA-SHARE-OVERBOOKED."""
    uid = view.ref.uid
    check_exclusive(view.results, node.holds, uid=uid, inventory=node.inventory)
    check_shares(view.results, node.holds, uid=uid, inventory=node.inventory, settings=node.settings)


def _distinct(effects: Iterable[Effect]) -> Iterable[Effect]:
    """Give each effect once: two devices may be partitions of one GPU, or shares of one partition."""
    found: dict[str, Effect] = {}
    for effect in effects:
        found.setdefault(journal_entry(effect).key, effect)
    return found.values()


def _groups(
    results: Sequence[AllocatedDevice],
    found: Sequence[Found],
    configs: Sequence[DecodedConfig],
    *,
    made: Mapping[str, CreateMig],
) -> list[ConfigGroup]:
    members: dict[int, list[SharedDevice]] = {}
    chosen: dict[int, DecodedConfig] = {}
    for result, each in zip(results, found, strict=True):
        config = effective_config(result, configs, device_type=each.device_type)
        # Monitoring never changes how a device is shared.
        if config is None or result.admin_access:
            continue
        chosen[config.index] = config
        members.setdefault(config.index, []).append(_shared_device(result, each, made))
    return [ConfigGroup(chosen[index], tuple(devices)) for index, devices in members.items()]


def _limited(
    results: Sequence[AllocatedDevice],
    found: Sequence[Found],
    groups: Sequence[ConfigGroup],
    made: Mapping[str, CreateMig],
) -> list[SharedDevice]:
    """Give the shares that are to be held to their amounts."""
    # Who asks for a daemon of his own, on a share that is a whole card, has that one.
    served = {id(result) for group in groups if group.config.strategy == "MPS" for result in group.results}
    return [
        _shared_device(result, each, made)
        for result, each in zip(results, found, strict=True)
        if result.share_id is not None and not result.admin_access and id(result) not in served
    ]


def _shared_device(result: AllocatedDevice, found: Found, made: Mapping[str, CreateMig]) -> SharedDevice:
    maker, there = made.get(result.device), found.partition
    if maker is not None:
        return SharedDevice(result, found.gpu, lambda: maker.partition)
    return SharedDevice(result, found.gpu, None if there is None else lambda: there)


def _plan_group(
    group: ConfigGroup,
    strategies: Mapping[str, StrategyPlanner],
    context: SharingContext,
    settings: NodeSettings,
) -> SharingPlan:
    strategy = group.config.strategy
    check_strategy(group, settings)
    if strategy is None or (strategy == "TimeSlicing" and group.config.kind == KIND_OF_TYPE["mig"]):
        # The hardware has no time-slice of a partition's own; NVIDIA's driver accepts it and does nothing.
        return SharingPlan()
    planner = strategies.get(strategy)
    if planner is None:
        devices = ", ".join(result.device for result in group.results)
        raise ConfigError(
            "DRA-CONFIG-UNSUPPORTED",
            f"{group.config.kind} asks for sharing strategy {strategy} on {devices}, which this node's driver "
            "does not have",
            remedy="Remove the sharing block from the configuration.",
            kind=group.config.kind,
            strategy=strategy,
        )
    return planner(group, context)


def _targets(
    results: Sequence[AllocatedDevice], found: Sequence[Found], edits: Mapping[str, DeviceEdits]
) -> tuple[CdiTarget, ...]:
    """Give one target for each name in the spec; a device that is also taken for use is not only monitored."""
    targets: dict[str, CdiTarget] = {}
    for result, each in zip(results, found, strict=True):
        key = device_name("", result.device, result.share_id)
        admin = result.admin_access and (key not in targets or targets[key].admin)
        extra = edits.get(key, DeviceEdits())
        targets[key] = CdiTarget(
            name=result.device,
            gpu_minor=each.gpu.minor,
            pci_address=each.gpu.pci_address,
            gpu_uuid=each.gpu.uuid,
            share_id=result.share_id,
            admin=admin,
            mig_instances=None if each.partition is None else each.partition.instances,
            extra_env=extra.env,
            extra_mounts=extra.mounts,
        )
    return tuple(targets.values())


def _prepared(result: AllocatedDevice, uid: str, cdi_kind: str) -> PreparedDevice:
    return PreparedDevice(
        request_names=(result.request_name,),
        pool=result.pool,
        device=result.device,
        cdi_ids=(f"{cdi_kind}={device_name(uid, result.device, result.share_id)}",),
        share_id=result.share_id,
    )
