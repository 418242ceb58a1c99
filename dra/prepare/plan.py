"""From a claim and the hardware to what has to be prepared. Pure: reads nothing, changes nothing.

A plan is complete before anything is touched: a claim that cannot be prepared fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dra.api.claim import AllocatedDevice, ClaimView
from dra.api.config import DecodedConfig, DeviceType, decode_configs, effective_config
from dra.cdi.spec import device_name
from dra.errors import ConfigError, DeviceError, StackError
from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import GpuName, MigName, parse_device_name
from dra.prepare.effects import Effect
from dra.prepare.holds import Hold, check_exclusive
from dra.prepare.model import CdiTarget, PreparedDevice


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """The devices of a claim that one configuration applies to: the unit in which they are shared."""

    config: DecodedConfig
    results: tuple[AllocatedDevice, ...]
    gpus: tuple[Gpu, ...]


# Plans the effects of one sharing strategy on one group.
StrategyPlanner = Callable[[ConfigGroup], Sequence[Effect]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What prepare has to bring about.

    `effects` come before the CDI spec, which names `targets`; `devices` is the answer to the kubelet. `warnings`
    are for the log.
    """

    effects: tuple[Effect, ...]
    targets: tuple[CdiTarget, ...]
    devices: tuple[PreparedDevice, ...]
    driver_version: str
    warnings: tuple[str, ...] = ()


def plan_prepare(
    view: ClaimView,
    *,
    inventory: Inventory,
    holds: Sequence[Hold],
    cdi_kind: str,
    strategies: Mapping[str, StrategyPlanner],
) -> Plan:
    """Plan one claim.

    Args:
        view: an admitted claim.
        inventory: the hardware as of now.
        holds: what other claims hold; holds of the claim itself are left out.
        cdi_kind: `k8s.gpu.nvidia.com/claim`.
        strategies: planners by sharing strategy; a strategy without one is refused.

    Raises:
        ConfigError: DRA-CONFIG-... for what the user wrote.
        DeviceError: DRA-DEVICE-UNKNOWN, DRA-DEVICE-LOST, DRA-DEVICE-MIG-MODE, DRA-DEVICE-TYPE, DRA-DEVICE-HELD.
        StackError: DRA-DRIVER-ABSENT.
    """
    configs = decode_configs(view.configs)
    gpus = [_find_gpu(result, inventory) for result in view.results]
    groups = _groups(view.results, gpus, configs)
    check_exclusive(view.results, holds, uid=view.ref.uid, inventory=inventory)
    effects: list[Effect] = []
    for group in groups:
        effects += _plan_group(group, strategies)
    return Plan(
        effects=tuple(effects),
        targets=_targets(view.results, gpus),
        devices=tuple(_prepared(result, view.ref.uid, cdi_kind) for result in view.results),
        driver_version=inventory.driver_version,
        warnings=tuple(text for config in configs for text in config.warnings),
    )


def lacks_device(view: ClaimView, inventory: Inventory) -> bool:
    """Whether an allocated device is not in the inventory, so that a fresh look at the hardware may help."""
    minors = {gpu.minor for gpu in inventory.gpus if not gpu.unusable}
    names = (parse_device_name(result.device) for result in view.results)
    return any(name is None or name.minor not in minors for name in names)


def _find_gpu(result: AllocatedDevice, inventory: Inventory) -> Gpu:
    name = parse_device_name(result.device)
    if isinstance(name, MigName):
        raise DeviceError(
            "DRA-DEVICE-TYPE",
            f"device {result.device} is a MIG device, which this version of the driver does not prepare yet",
            remedy="Allocate a whole GPU (device class gpu.nvidia.com).",
            device=result.device,
        )
    gpu = next((gpu for gpu in inventory.gpus if name == GpuName(gpu.minor)), None)
    if gpu is None:
        raise _unknown_device(result, inventory)
    if gpu.unusable:
        raise DeviceError(
            "DRA-DEVICE-LOST",
            f"device {result.device} ({gpu.uuid}) cannot be used: {gpu.unusable}",
            remedy="Delete the pod so that it gets another GPU; reset or replace this one.",
            retryable=True,
            device=result.device,
        )
    if gpu.mig_enabled and not result.admin_access:
        raise DeviceError(
            "DRA-DEVICE-MIG-MODE",
            f"device {result.device} is in MIG mode, a container could not use it as a whole GPU",
            remedy="Switch MIG mode off on that GPU (nvidia-smi -mig 0), or allocate MIG devices.",
            retryable=True,
            device=result.device,
        )
    return gpu


def _unknown_device(result: AllocatedDevice, inventory: Inventory) -> DeviceError | StackError:
    if not inventory.gpus:
        told = inventory.problems[0] if inventory.problems else None
        reason = f": {told.message}" if told else ""
        return StackError(
            "DRA-DRIVER-ABSENT",
            f"device {result.device} cannot be prepared, no NVIDIA driver answers on this node{reason}",
            remedy=(told and told.remedy)
            or "Install or start the NVIDIA driver; the call is retried by itself.",
            device=result.device,
        )
    return DeviceError(
        "DRA-DEVICE-UNKNOWN",
        f"device {result.device} does not exist on this node",
        remedy="It may have been removed since it was allocated; delete the pod so that it gets another one.",
        retryable=True,
        device=result.device,
    )


def _groups(
    results: Sequence[AllocatedDevice], gpus: Sequence[Gpu], configs: Sequence[DecodedConfig]
) -> list[ConfigGroup]:
    members: dict[int, list[tuple[AllocatedDevice, Gpu]]] = {}
    chosen: dict[int, DecodedConfig] = {}
    device_type: DeviceType = "gpu"
    for result, gpu in zip(results, gpus, strict=True):
        config = effective_config(result, configs, device_type=device_type)
        # Monitoring never changes how a device is shared.
        if config is None or result.admin_access:
            continue
        chosen[config.index] = config
        members.setdefault(config.index, []).append((result, gpu))
    return [
        ConfigGroup(chosen[index], tuple(result for result, _ in pairs), tuple(gpu for _, gpu in pairs))
        for index, pairs in members.items()
    ]


def _plan_group(group: ConfigGroup, strategies: Mapping[str, StrategyPlanner]) -> Sequence[Effect]:
    strategy = group.config.strategy
    if strategy is None:
        return ()
    planner = strategies.get(strategy)
    if planner is None:
        devices = ", ".join(result.device for result in group.results)
        raise ConfigError(
            "DRA-CONFIG-UNSUPPORTED",
            f"{group.config.kind} asks for sharing strategy {strategy} on {devices}, which is not supported yet "
            "by this version of the driver",
            remedy="Remove the sharing block from the configuration.",
            kind=group.config.kind,
            strategy=strategy,
        )
    return planner(group)


def _targets(results: Sequence[AllocatedDevice], gpus: Sequence[Gpu]) -> tuple[CdiTarget, ...]:
    """Give one target for each name in the spec; a device that is also taken for use is not only monitored."""
    found: dict[str, CdiTarget] = {}
    for result, gpu in zip(results, gpus, strict=True):
        key = device_name("", result.device, result.share_id)
        admin = result.admin_access and (key not in found or found[key].admin)
        found[key] = CdiTarget(
            name=result.device,
            gpu_minor=gpu.minor,
            pci_address=gpu.pci_address,
            gpu_uuid=gpu.uuid,
            share_id=result.share_id,
            admin=admin,
        )
    return tuple(found.values())


def _prepared(result: AllocatedDevice, uid: str, cdi_kind: str) -> PreparedDevice:
    return PreparedDevice(
        request_names=(result.request_name,),
        pool=result.pool,
        device=result.device,
        cdi_ids=(f"{cdi_kind}={device_name(uid, result.device, result.share_id)}",),
        share_id=result.share_id,
    )
