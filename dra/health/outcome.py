"""Which published devices the conditions concern, and what is said of them. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dra.health.model import Condition, Scope
from dra.health.policy import UNMONITORED, XID, Effect, HealthPolicy
from dra.inventory.model import Gpu, Inventory, MigDevice
from dra.inventory.names import GpuName, MigName, profile_slug

DOMAIN = "gpu.nvidia.com"


@dataclass(frozen=True, slots=True)
class Mark:
    """A taint as health wants it; `time_added` is RFC 3339 in whole seconds."""

    key: str
    effect: Effect
    value: str
    time_added: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of each device that anything is held against, by device name.

    `unhealthy` and `unknown` are messages for the health stream; a device may have marks and be healthy.
    """

    marks: Mapping[str, tuple[Mark, ...]]
    unhealthy: Mapping[str, str]
    unknown: Mapping[str, str]


def devices_of(scope: Scope, inventory: Inventory) -> tuple[str, ...]:
    """Give the names of the devices that a scope is; a GPU's name stands for its partitions too."""
    gpu = next((each for each in inventory.gpus if each.uuid == scope.gpu), None)
    if gpu is None:
        return ()
    if scope.gi is None:
        return (str(GpuName(gpu.minor)),)
    return tuple(mig_name(gpu, each) for each in gpu.mig_devices if is_instance(scope, each))


def is_instance(scope: Scope, device: MigDevice) -> bool:
    """Whether a scope means this MIG device."""
    return device.gpu_instance_id == scope.gi and scope.ci in (None, device.compute_instance_id)


def mig_name(gpu: Gpu, device: MigDevice) -> str:
    """Give the name of a MIG device."""
    slug = profile_slug(device.profile.name)
    return str(MigName(gpu.minor, slug, device.profile.profile_id, device.start))


def plan_verdict(conditions: Iterable[Condition], inventory: Inventory, policy: HealthPolicy) -> Verdict:
    """Give what to publish for some conditions. A device that is not there (any more) is left out."""
    marks: dict[str, list[Mark]] = {}
    unhealthy: dict[str, list[str]] = {}
    unknown: dict[str, str] = {}
    # The XID says most about the cause: it comes first.
    for condition in sorted(conditions, key=lambda each: each.key != XID):
        for device in devices_of(condition.scope, inventory):
            effect = policy.effect(
                condition.key, condition.grade, gpu=condition.scope.gpu, value=condition.value
            )
            added = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(condition.since))
            mark = Mark(f"{DOMAIN}/{condition.key}", effect, condition.value, added)
            marks.setdefault(device, []).append(mark)
            if condition.is_ill:
                unhealthy.setdefault(device, []).append(sentence(condition))
            elif condition.key == UNMONITORED:
                unknown[device] = condition.message
    return Verdict(
        {device: tuple(each) for device, each in marks.items()},
        {device: " ".join(each) for device, each in unhealthy.items()},
        unknown,
    )


def sentence(condition: Condition) -> str:
    """Give a condition as people read it, with what to do."""
    text = condition.message
    if condition.remedy:
        text = f"{text}. {condition.remedy}"
    return text if text.endswith(".") else f"{text}."
