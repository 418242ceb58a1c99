"""Device taints: why a device must not be given out, or only to those who tolerate it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from dra.inventory.model import Gpu

Effect = Literal["NoSchedule", "NoExecute", "None"]

# Source: resource.k8s.io/v1 DeviceTaintsMaxLength.
MAX_TAINTS = 16
GPU_LOST = "gpu.nvidia.com/gpu-lost"
# The one illness for which NVIDIA's driver sets the taint, without a value.
_LOST_CODE = "DRA-NVML-GPU-LOST"
_STRENGTH: dict[str, int] = {"NoExecute": 0, "NoSchedule": 1, "None": 2}


@dataclass(frozen=True, slots=True)
class Taint:
    """One taint of a device. `time_added` is RFC 3339 in whole seconds; None lets the server set it.

    A taint that stays must be sent with the time it has, or the eviction timer starts again.
    """

    key: str
    effect: Effect
    value: str = ""
    time_added: str | None = None

    @property
    def keeps_away(self) -> bool:
        """Whether a request that does not tolerate it does not get the device."""
        return self.effect != "None"

    def as_json(self) -> dict[str, Any]:
        """Give the API's form."""
        taint: dict[str, Any] = {"key": self.key, "effect": self.effect}
        if self.value:
            taint["value"] = self.value
        if self.time_added is not None:
            taint["timeAdded"] = self.time_added
        return taint


def taint_of_unusable(gpu: Gpu) -> tuple[Taint, ...]:
    """Give the taint of a GPU that the inventory calls unusable."""
    if not gpu.unusable:
        return ()
    return (Taint(GPU_LOST, "NoSchedule", "" if gpu.unusable == _LOST_CODE else gpu.unusable),)


def merge_taints(*groups: Iterable[Taint]) -> tuple[tuple[Taint, ...], tuple[Taint, ...]]:
    """Give (the taints of a device, those there is no room for).

    One for each key and effect; the earlier group wins. Ordered by key and effect, so that the same taints give
    the same device. Where there are too many, those that keep away go first.
    """
    by_key: dict[tuple[str, str], Taint] = {}
    for group in groups:
        for taint in group:
            by_key.setdefault((taint.key, taint.effect), taint)
    ranked = sorted(by_key.values(), key=lambda taint: (_STRENGTH.get(taint.effect, 3), taint.key))
    kept, dropped = ranked[:MAX_TAINTS], ranked[MAX_TAINTS:]
    return tuple(sorted(kept, key=lambda taint: (taint.key, taint.effect))), tuple(dropped)
