"""What becomes of a GPU when its settings change: at once, once nobody has it, or not at all. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dra.api.gpu_settings import IDLE_BLOCKS, GpuSettings
from dra.errors import DraError
from dra.inventory.mig_layout import Place, place_layout
from dra.inventory.model import Gpu
from dra.prepare.layouts import LayoutRecord, check_mode, is_rest_of, matches

Step = Literal["none", "at-once", "when-idle", "refused"]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What is to be done with one GPU.

    Args:
        step: `at-once` may be done while the GPU is in use.
        now: what holds at once: what may change under a claim is changed, the rest is as it was.
        wanted: what holds when all is done.
        blocks: what waits until nobody has the GPU.
        places: the partitions that are wanted; None: they are not ours to say.
        refused: why it stays as it is.
    """

    step: Step
    now: GpuSettings
    wanted: GpuSettings
    blocks: tuple[str, ...] = ()
    places: tuple[Place, ...] | None = None
    refused: DraError | None = None


def plan_gpu(gpu: Gpu, *, current: GpuSettings, wanted: GpuSettings, record: LayoutRecord | None) -> GpuPlan:
    """Say what is to be done.

    Args:
        gpu: as it is.
        current: what holds.
        wanted: what the policies and flags say.
        record: the layout that this driver made of it.
    """
    now = replace(wanted, **{name: getattr(current, name) for name in IDLE_BLOCKS})
    try:
        places = wanted_places(gpu, wanted, record)
    except DraError as error:
        return GpuPlan("refused", now, wanted, ("mig",), refused=error)
    blocks = [name for name in IDLE_BLOCKS if getattr(current, name) != getattr(wanted, name)]
    if places is not None and not matches(gpu, places):
        if blocks in ([], ["mig"]) and is_rest_of(gpu, record) and _same_places(record, places):
            # A reboot took partitions away; making them again is in nobody's way.
            return GpuPlan("at-once", now, wanted, (), places)
        if "mig" not in blocks:
            blocks.append("mig")
    elif places == () and record is not None and "mig" not in blocks:
        blocks.append("mig")
    if not blocks:
        return GpuPlan("none", now, wanted, (), places)
    return GpuPlan("when-idle", now, wanted, tuple(blocks), places)


def wanted_places(gpu: Gpu, wanted: GpuSettings, record: LayoutRecord | None) -> tuple[Place, ...] | None:
    """Give the partitions that are to stand on a GPU; () to take ours away; None where it stays as it is.

    Raises:
        ConfigError: DRA-MIG-PROFILE, DRA-MIG-LAYOUT.
        DeviceError: DRA-MIG-MODE-NEEDS-RESET.
    """
    if not wanted.mig.layout:
        return None if record is None else ()
    keep = [(mig.profile, mig.start, mig.size) for mig in gpu.mig_devices]
    if record is not None:
        known = {each.profile_id: each for each in gpu.mig_profiles}
        keep += [(known[profile], start, 0) for profile, start in record.wanted if profile in known]
    places = place_layout(gpu, wanted.mig.layout, keep=keep)
    check_mode(gpu, places)
    return places


def _same_places(record: LayoutRecord | None, places: Iterable[Place]) -> bool:
    return record is not None and set(record.wanted) == {
        (profile.profile_id, start) for profile, start, _ in places
    }
