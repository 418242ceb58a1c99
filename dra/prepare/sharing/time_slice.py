"""The time-slice of a GPU for as long as claims ask for one; the last of them puts it back.

NVML has no call for it, neither to set nor to ask: the driver's own nvidia-smi sets it, and to be sure it is set again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, get_args

from dra.errors import DraError
from dra.prepare.effects import Effect
from dra.prepare.sharing.compute_mode import ComputeModes, plan_compute_mode
from dra.prepare.sharing.model import ConfigGroup, SharingContext, SharingPlan, Tell, conflict, tell_nobody

Interval = Literal["Default", "Short", "Medium", "Long"]
INTERVALS: tuple[Interval, ...] = get_args(Interval)
KIND = "time-slice"
UNSUPPORTED = "DRA-TIME-SLICE-UNSUPPORTED"
# The GPU or the driver is gone, and the time-slice with it.
GONE = "DRA-TIME-SLICE-GONE"


class TimeSlices(Protocol):
    """The hardware's side.

    Raises DraError: DRA-TIME-SLICE-UNSUPPORTED where the GPU has none, DRA-TIME-SLICE-GONE where GPU or driver are not
    there, DRA-TIME-SLICE-….
    """

    def set(self, gpu_uuid: str, interval: int) -> None:
        """Set the time-slice: 0 default, 1 short, 2 medium, 3 long."""
        ...


class TimeSlice:
    """That a GPU has a time-slice for a claim's sake.

    Args:
        slices: the hardware.
        gpu_uuid: the GPU.
        interval: what is wanted.
        back_to: what it gets when nobody wants one any more.
        tell: hears that a GPU has no time-slices, where that is no error: the default was asked for, which it has.
    """

    kind: ClassVar[str] = KIND
    ends_with_boot: ClassVar[bool] = True

    def __init__(
        self,
        slices: TimeSlices,
        gpu_uuid: str,
        interval: Interval,
        *,
        back_to: Interval = "Default",
        tell: Tell = tell_nobody,
    ) -> None:
        self._slices, self._gpu_uuid, self._interval = slices, gpu_uuid, interval
        self._back_to = back_to
        self._tell = tell

    @classmethod
    def revive(
        cls, args: Mapping[str, Any], *, slices: TimeSlices, base: Callable[[str], Interval]
    ) -> TimeSlice:
        """Make the effect that puts the time-slice back."""
        gpu = str(args["gpu"])
        return cls(slices, gpu, interval_of(args["interval"]), back_to=base(gpu))

    @property
    def shared_resource(self) -> str | None:
        """The GPU."""
        return self._gpu_uuid

    def args(self) -> Mapping[str, Any]:
        """Give GPU and interval."""
        return {"gpu": self._gpu_uuid, "interval": self._interval}

    def apply(self) -> None:
        """Set it. Raises DraError; that a GPU has none is an error where another than the default was asked for."""
        try:
            self._slices.set(self._gpu_uuid, INTERVALS.index(self._interval))
        except DraError as error:
            if error.code != UNSUPPORTED or self._interval != "Default":
                raise
            self._tell(
                "TimeSliceNotSupported",
                f"GPU {self._gpu_uuid} has no time-slice that could be set; its containers share it with the driver's own",
            )

    def verify(self) -> bool:
        """Set it again: nobody can say what a GPU has. Raises DraError."""
        self.apply()
        return True

    def undo(self) -> None:
        """Put it back. Raises DraError, not where there is nothing to put back."""
        try:
            self._slices.set(self._gpu_uuid, INTERVALS.index(self._back_to))
        except DraError as error:
            if error.code not in (UNSUPPORTED, GONE):
                raise


class TimeSlicingPlanner:
    """Plans the strategy TimeSlicing for whole GPUs.

    Args:
        slices, modes: the hardware.
        base: the interval a GPU has while no claim asks for one.
        tell: gives who hears news about a claim.
    """

    def __init__(
        self,
        slices: TimeSlices,
        modes: ComputeModes,
        *,
        base: Callable[[str], Interval] = lambda _uuid: "Default",
        tell: Callable[[SharingContext], Tell] = lambda _context: tell_nobody,
    ) -> None:
        self._slices, self._modes, self._base, self._tell = slices, modes, base, tell

    def __call__(self, group: ConfigGroup, context: SharingContext) -> SharingPlan:
        """Plan one group.

        Raises:
            DeviceError: DRA-SHARING-CONFLICT.
        """
        interval = asked_interval(group)
        tell = self._tell(context)
        effects: list[Effect] = []
        for gpu in group.gpus:
            for other in context.others(KIND):
                if other.entry.args.get("gpu") == gpu.uuid and other.entry.args.get("interval") != interval:
                    raise conflict(
                        f"GPU {gpu.uuid} cannot have the time-slice {interval}: claim {other.ref} (UID {other.ref.uid}) "
                        f"has it at {other.entry.args.get('interval')}",
                        gpu=gpu.uuid,
                    )
            # As NVIDIA's: several processes must be able to use it.
            effects.append(plan_compute_mode(self._modes, gpu, "DEFAULT", context, tell=tell))
            effects.append(
                TimeSlice(self._slices, gpu.uuid, interval, back_to=self._base(gpu.uuid), tell=tell)
            )
        return SharingPlan(tuple(effects))


def asked_interval(group: ConfigGroup) -> Interval:
    """Give the interval that a configuration asks for."""
    sharing: Any = getattr(group.config.parameters, "sharing", None)
    block = getattr(sharing, "timeSlicingConfig", None)
    return "Default" if block is None else interval_of(block.interval)


def interval_of(text: object) -> Interval:
    """Give an interval by its name. Raises ValueError."""
    for interval in INTERVALS:
        if interval == text:
            return interval
    raise ValueError(f"{text!r} is no interval")
