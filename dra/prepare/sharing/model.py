"""What a sharing strategy sees of a claim, and what it gives: effects, and additions to the CDI spec. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.api.config import DecodedConfig
from dra.cdi.model import Mount
from dra.cdi.spec import device_name
from dra.errors import BugError, DeviceError
from dra.inventory.model import Gpu
from dra.prepare.effects import Effect
from dra.prepare.partitions import Partition
from dra.prepare.record import JournalEntry, Record


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """One allocated device of a claim. `partition` gives that of a MIG device, None for a whole GPU."""

    result: AllocatedDevice
    gpu: Gpu
    partition: Callable[[], Partition] | None = None

    @property
    def key(self) -> str:
        """Its name in the claim's CDI spec, without the claim's UID."""
        return device_name("", self.result.device, self.result.share_id)

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG device."""
        return self.partition is not None

    def uuid(self) -> str:
        """Give NVML's UUID (`GPU-…`, `MIG-…`).

        Raises:
            DeviceError: a MIG device that was not made yet: ask while an effect is applied, not while planning.
        """
        return self.gpu.uuid if self.partition is None else self.partition().uuid


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """The devices of a claim that one configuration applies to: the unit in which they are shared."""

    config: DecodedConfig
    devices: tuple[SharedDevice, ...]

    @property
    def results(self) -> tuple[AllocatedDevice, ...]:
        """The allocation's results, in its order."""
        return tuple(device.result for device in self.devices)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The whole GPUs among the devices, each once."""
        return tuple({d.gpu.uuid: d.gpu for d in self.devices if not d.is_mig}.values())


@dataclass(frozen=True, slots=True)
class OpenEffect:
    """An effect in the journal of some claim of this boot; `devices` are those that the claim has for use."""

    ref: ClaimRef
    entry: JournalEntry
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SharingContext:
    """What a planner may know beside the group: whose claim it is, and the effects of all claims of this node.

    `look` reads the journals; the claim's own effects are among them. `cuda_version` is the newest that the node's
    driver knows.
    """

    claim: ClaimRef
    look: Callable[[], Sequence[OpenEffect]] = tuple
    cuda_version: tuple[int, int] | None = None

    def others(self, kind: str) -> tuple[OpenEffect, ...]:
        """Give the effects of a kind that other claims have."""
        return tuple(each for each in self.of(kind) if each.ref.uid != self.claim.uid)

    def of(self, kind: str) -> tuple[OpenEffect, ...]:
        """Give the effects of a kind, the claim's own first."""
        found = [each for each in self.look() if each.entry.kind == kind]
        return tuple(sorted(found, key=lambda each: each.ref.uid != self.claim.uid))


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """What a strategy adds to a device in the CDI spec."""

    env: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """What a strategy wants: effects in the order of applying, edits by `SharedDevice.key`, warnings for the log."""

    effects: tuple[Effect, ...] = ()
    edits: Mapping[str, DeviceEdits] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


# Says something to the owner of a claim: (reason, message).
Tell = Callable[[str, str], None]
# Plans one sharing strategy for one group.
StrategyPlanner = Callable[[ConfigGroup, SharingContext], SharingPlan]


def open_effects(records: Iterable[Record], boot_id: str) -> tuple[OpenEffect, ...]:
    """Give the effects of all records that hold something in this boot."""
    return tuple(
        OpenEffect(record.ref, entry, devices)
        for record in records
        if record.holds(boot_id)
        for devices in (frozenset(each.device for each in record.results if not each.admin_access),)
        for entry in record.journal
    )


def merge_plans(plans: Iterable[SharingPlan]) -> SharingPlan:
    """Give one plan for several groups.

    Raises:
        DeviceError: DRA-SHARING-CONFLICT: one GPU would have to be two things at once.
        BugError: DRA-SHARING-TWICE: two of them edit one device.
    """
    effects: list[Effect] = []
    seen: dict[tuple[str, str], Mapping[str, Any]] = {}
    edits: dict[str, DeviceEdits] = {}
    warnings: list[str] = []
    for plan in plans:
        for effect in plan.effects:
            effects.append(effect)
            if effect.shared_resource is None:
                continue
            first = seen.setdefault((effect.kind, effect.shared_resource), effect.args())
            if dict(first) != dict(effect.args()):
                raise conflict(
                    f"the claim's own configurations ask for two things of {effect.shared_resource}: {dict(first)} "
                    f"and {dict(effect.args())}",
                    gpu=effect.shared_resource,
                )
        warnings += plan.warnings
        for key, each in plan.edits.items():
            if edits.setdefault(key, each) != each:
                raise BugError("DRA-SHARING-TWICE", f"two ways of sharing edit {key.removeprefix('-')}")
    return SharingPlan(tuple(effects), edits, tuple(warnings))


def conflict(message: str, *, gpu: str) -> DeviceError:
    """Give the error of two claims that want a GPU to be two things at once."""
    return DeviceError(
        "DRA-SHARING-CONFLICT",
        message,
        remedy="Give both claims the same sharing configuration, or let one of them have another GPU; it is prepared "
        "once the other claim is unprepared.",
        retryable=True,
        gpu=gpu,
    )


def tell_nobody(_reason: str, _message: str) -> None:
    """Say nothing."""
