"""What health is said about, what was seen, and what is held against a device. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dra.health.policy import Grade
from dra.nvml.health_facts import HealthReading as Reading

__all__ = ["Change", "Condition", "Finding", "Reading", "Scope", "XidEvent"]


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """A GPU, or one MIG device of it by its instances; `ci` is None where only the GPU instance is known."""

    gpu: str
    gi: int | None = None
    ci: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the whole GPU, with all that is on it."""
        return self.gi is None


@dataclass(frozen=True, slots=True)
class XidEvent:
    """An XID as NVML or the kernel log told it."""

    scope: Scope
    xid: int
    source: str = "nvml"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong at this moment, as one check sees it."""

    key: str
    grade: Grade
    value: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """What is held against a scope: one for each key.

    Args:
        since: seconds since 1970 at which it began with this value and grade: the taint's `timeAdded`.
        seen: when it was last confirmed.
        since_up, seen_up: the same in seconds since boot, by which durations are measured: the time of day can be set.
        times: how often it came back soon after it had been cleared.
        energy_mj: the GPU's energy counter when it began; a lower one later means that the GPU was reset.
        action: the recovery action that came with it.
        data: fields of other versions, kept.
    """

    scope: Scope
    key: str
    grade: Grade
    value: str
    message: str
    remedy: str
    since: float
    seen: float
    times: int = 0
    energy_mj: int | None = None
    action: int | None = None
    data: Mapping[str, object] = field(default_factory=dict)
    since_up: float | None = None
    seen_up: float | None = None

    @property
    def is_ill(self) -> bool:
        """Whether new pods should not get the device."""
        return self.grade >= Grade.ILL


@dataclass(frozen=True, slots=True)
class Change:
    """A condition that came (`before` None), changed, or was cleared (`after` None)."""

    before: Condition | None
    after: Condition | None

    @property
    def condition(self) -> Condition:
        """The newer one."""
        found = self.after or self.before
        assert found is not None
        return found
