"""From a claim's functions to what has to be bound and what its containers get. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dra.api.claim import AllocatedDevice
from dra.api.config import DecodedConfig, effective_config
from dra.api.passthrough import PREFER_IOMMUFD, backend_policy, backends_error, iommu_of, mixed_error
from dra.cdi.model import VfioAccess
from dra.errors import DeviceError
from dra.inventory.model import Inventory, VfioFunction
from dra.prepare.model import CdiTarget
from dra.prepare.passthrough.effect import BindVfio
from dra.prepare.passthrough.model import Before, function_of, is_passthrough
from dra.prepare.passthrough.view import PassthroughView


@dataclass(frozen=True, slots=True)
class PassthroughPlan:
    """What the functions of a claim need: effects, and targets of the CDI spec."""

    effects: tuple[BindVfio, ...] = ()
    targets: tuple[CdiTarget, ...] = ()
    warnings: tuple[str, ...] = ()


def plan_passthrough(
    results: Sequence[AllocatedDevice],
    configs: Sequence[DecodedConfig],
    *,
    inventory: Inventory,
    view: PassthroughView,
) -> PassthroughPlan:
    """Plan the functions among the devices of a claim; access for monitoring binds nothing and opens nothing.

    Raises:
        ConfigError: DRA-VFIO-MIXED, DRA-VFIO-BACKENDS, DRA-CONFIG-KIND-MISMATCH.
        DeviceError: DRA-DEVICE-UNKNOWN.
    """
    own = [result for result in results if is_passthrough(result)]
    if not own:
        return PassthroughPlan()
    _check_alone(results)
    chosen = [(result, effective_config(result, configs, device_type="vfio")) for result in own]
    used = [(result, config) for result, config in chosen if not result.admin_access]
    _check_one_backend(used)
    effects: dict[str, BindVfio] = {}
    targets: dict[str, CdiTarget] = {}
    for result, config in used:
        function = _function(result, inventory)
        effects[result.device] = _binding(result, function, view)
        targets[result.device] = _target(result, function, _access(function, config))
    watched = [result for result in own if result.admin_access and result.device not in targets]
    for result in watched:
        targets[result.device] = _target(result, _function(result, inventory), VfioAccess(None))
    warnings = tuple(
        f"access for monitoring to {result.device} opens no node: a function that is passed through has one user"
        for result in watched
    )
    return PassthroughPlan(tuple(effects.values()), tuple(targets.values()), warnings)


def _target(result: AllocatedDevice, function: VfioFunction, access: VfioAccess) -> CdiTarget:
    return CdiTarget(
        name=result.device,
        gpu_minor=None,
        pci_address=function.pci_address,
        gpu_uuid="",
        admin=result.admin_access,
        vfio=access,
    )


def _binding(result: AllocatedDevice, function: VfioFunction, view: PassthroughView) -> BindVfio:
    if view.node is None:
        raise _unknown(
            result, "this driver changes no kernel drivers here", "Report it with the plugin's log."
        )
    before = view.before.get(result.device, Before(function.driver))
    return BindVfio(
        view.node,
        result.device,
        function.pci_address,
        before=before,
        marks=view.marks,
        patience=view.patience,
    )


def _access(function: VfioFunction, config: DecodedConfig | None) -> VfioAccess:
    iommu = iommu_of(config)
    return VfioAccess(
        function.iommu_group,
        iommufd=backend_policy(config) == PREFER_IOMMUFD,
        api_device=iommu is not None and iommu.enableAPIDevice,
    )


def _check_alone(results: Sequence[AllocatedDevice]) -> None:
    used = [result for result in results if not result.admin_access]
    through = [result.device for result in used if is_passthrough(result)]
    others = [result.device for result in used if not is_passthrough(result)]
    if through and others:
        raise mixed_error(through, others)


def _check_one_backend(chosen: Sequence[tuple[AllocatedDevice, DecodedConfig | None]]) -> None:
    """Refuse two interfaces in one claim: a process cannot mix them. NVIDIA's driver expects one configuration too."""
    policies = {backend_policy(config): result.device for result, config in chosen}
    if len(policies) > 1:
        raise backends_error(policies)


def _function(result: AllocatedDevice, inventory: Inventory) -> VfioFunction:
    found = function_of(result.device, inventory)
    if found is None and not inventory.vfio:
        raise _unknown(
            result,
            "no GPU of this node can be passed through",
            "Switch the feature gate PassthroughSupport on and the IOMMU (dra doctor tells what is missing), or delete the "
            "pod so that it gets another device.",
        )
    if found is None:
        raise _unknown(
            result,
            "no GPU at this place of the PCI bus can be passed through",
            "It was removed, is cut into partitions or has another driver (dra doctor tells); delete the pod so that it "
            "gets another device.",
        )
    return found


def _unknown(result: AllocatedDevice, why: str, remedy: str) -> DeviceError:
    return DeviceError(
        "DRA-DEVICE-UNKNOWN",
        f"device {result.device} cannot be prepared: {why}",
        remedy=remedy,
        retryable=True,
        device=result.device,
    )
