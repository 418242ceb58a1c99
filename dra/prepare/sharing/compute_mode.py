"""The compute mode of a GPU for as long as claims need it; it is given back by the last of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, get_args

from dra.errors import DraError
from dra.inventory.model import Gpu
from dra.prepare.sharing.model import SharingContext, Tell, conflict, tell_nobody

ComputeModeName = Literal["DEFAULT", "EXCLUSIVE_PROCESS", "PROHIBITED"]
MODES: tuple[ComputeModeName, ...] = get_args(ComputeModeName)
KIND = "compute-mode"
NOT_SUPPORTED = "DRA-NVML-NOT-SUPPORTED"

# With these there is no GPU, or no driver, that could still have the mode: it ends with both.
GONE = frozenset({
    "DRA-NVML-DRIVER-NOT-LOADED", "DRA-NVML-LIBRARY-NOT-FOUND", "DRA-NVML-GPU-LOST", "DRA-NVML-NOT-FOUND",
    "DRA-NVML-GPU-NOT-FOUND", "DRA-DEVICE-UNKNOWN",
})  # fmt: skip


class ComputeModes(Protocol):
    """The hardware's side. Raises DraError: DRA-NVML-…, DRA-DEVICE-UNKNOWN."""

    def get(self, gpu_uuid: str) -> ComputeModeName:
        """Give the mode of a GPU."""
        ...

    def set(self, gpu_uuid: str, mode: ComputeModeName) -> None:
        """Set it."""
        ...


class ComputeMode:
    """That a GPU has a compute mode for a claim's sake.

    Args:
        modes: the hardware.
        gpu_uuid: the GPU.
        mode: what is wanted.
        before: what it had before any claim wanted something.
        tell: hears where the GPU has no such modes.
    """

    kind: ClassVar[str] = KIND
    ends_with_boot: ClassVar[bool] = True
    # Written down before the mode is set: whatever happens then, it can be given back.
    knows_outcome: ClassVar[bool] = True

    def __init__(
        self,
        modes: ComputeModes,
        gpu_uuid: str,
        mode: ComputeModeName,
        *,
        before: ComputeModeName = "DEFAULT",
        tell: Tell = tell_nobody,
    ) -> None:
        self._modes, self._gpu_uuid, self._mode = modes, gpu_uuid, mode
        self._before = before
        self._tell = tell

    @classmethod
    def revive(cls, args: Mapping[str, Any], *, modes: ComputeModes) -> ComputeMode:
        """Make the effect that gives the mode back."""
        before = (args.get("outcome") or {}).get("before", "DEFAULT")
        return cls(modes, str(args["gpu"]), _mode(args["mode"]), before=_mode(before))

    @property
    def shared_resource(self) -> str | None:
        """The GPU."""
        return self._gpu_uuid

    @property
    def outcome(self) -> Mapping[str, Any]:
        """What the GPU had before."""
        return {"before": self._before}

    def args(self) -> Mapping[str, Any]:
        """Give GPU and mode."""
        return {"gpu": self._gpu_uuid, "mode": self._mode}

    def apply(self) -> None:
        """Set it. Raises DraError; a GPU without compute modes is told of and left as it is."""
        try:
            if self._modes.get(self._gpu_uuid) != self._mode:
                self._modes.set(self._gpu_uuid, self._mode)
        except DraError as error:
            if error.code != NOT_SUPPORTED:
                raise
            self._tell(
                "ComputeModeNotSupported",
                f"GPU {self._gpu_uuid} has no compute modes: {self._mode} was not set, sharing works without it",
            )

    def verify(self) -> bool:
        """Whether the GPU has it; one without compute modes counts as if it had. Raises DraError."""
        try:
            return self._modes.get(self._gpu_uuid) == self._mode
        except DraError as error:
            if error.code != NOT_SUPPORTED:
                raise
            return True

    def undo(self) -> None:
        """Give the mode back. Raises DraError, not where GPU or driver are gone."""
        try:
            if self._modes.get(self._gpu_uuid) != self._before:
                self._modes.set(self._gpu_uuid, self._before)
        except DraError as error:
            if error.code not in GONE and error.code != NOT_SUPPORTED:
                raise


def plan_compute_mode(
    modes: ComputeModes, gpu: Gpu, mode: ComputeModeName, context: SharingContext, *, tell: Tell = tell_nobody
) -> ComputeMode:
    """Plan the mode of one GPU.

    Raises:
        DeviceError: DRA-SHARING-CONFLICT: another claim has the GPU in another mode; retryable.
        DraError: the GPU does not say what it has now.
    """
    for other in context.others(KIND):
        if other.entry.args.get("gpu") == gpu.uuid and other.entry.args.get("mode") != mode:
            raise conflict(
                f"GPU {gpu.uuid} cannot have compute mode {mode}: claim {other.ref} (UID {other.ref.uid}) uses it "
                f"with {other.entry.args.get('mode')}",
                gpu=gpu.uuid,
            )
    before = next(
        (
            _mode(each.entry.outcome.get("before", "DEFAULT"))
            for each in context.of(KIND)
            if each.entry.args.get("gpu") == gpu.uuid
        ),
        None,
    )
    if before is None:
        before = _now(modes, gpu.uuid)
    return ComputeMode(modes, gpu.uuid, mode, before=before, tell=tell)


def _now(modes: ComputeModes, gpu_uuid: str) -> ComputeModeName:
    try:
        return modes.get(gpu_uuid)
    except DraError as error:
        if error.code != NOT_SUPPORTED:
            raise
        return "DEFAULT"


def _mode(text: object) -> ComputeModeName:
    for mode in MODES:
        if mode == text:
            return mode
    raise ValueError(f"{text!r} is no compute mode")
