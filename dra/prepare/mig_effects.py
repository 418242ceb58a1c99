"""The two effects behind a partition that is made for a claim: the GPU's MIG mode, and the partition itself.

The mode comes first and goes last, counted by claim: whoever is last on the GPU switches it off, and only where one of
ours found it off. The partition is GPU instance and compute instance together; where several claims share it, it too
goes with the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dra.errors import DeviceError, DraError
from dra.inventory.names import MigName, parse_device_name
from dra.prepare.effects import Revive
from dra.prepare.mig_marks import MarkDirectory
from dra.prepare.partitions import (
    DEVICE_KIND,
    MODE_KIND,
    MigControl,
    Partition,
    blockers,
    device_args,
)

OCCUPIED = "DRA-MIG-OCCUPIED"


class MigMode:
    """That a GPU is in MIG mode for our sake.

    Creating the first partition switches the mode on, so that applying this does nothing: what matters is that the
    journal tells, before it happens, that the mode was off.
    """

    kind: ClassVar[str] = MODE_KIND
    ends_with_boot: ClassVar[bool] = True

    def __init__(self, control: MigControl, gpu_uuid: str, *, marks: MarkDirectory | None = None) -> None:
        self._control = control
        self._gpu_uuid = gpu_uuid
        self._marks = marks

    @classmethod
    def revive(
        cls, args: Mapping[str, Any], *, control: MigControl, marks: MarkDirectory | None = None
    ) -> MigMode:
        """Make the effect that switches the mode off."""
        return cls(control, str(args["gpu"]), marks=marks)

    @property
    def shared_resource(self) -> str | None:
        """The GPU."""
        return self._gpu_uuid

    def args(self) -> Mapping[str, Any]:
        """Give the GPU."""
        return {"gpu": self._gpu_uuid}

    def apply(self) -> None:
        """Change nothing, see above; but mark the mode as ours."""
        if self._marks is not None:
            self._marks.mode_on(self._gpu_uuid)

    def verify(self) -> bool:
        """Say yes: a mode that is off is switched on with the partition."""
        return True

    def undo(self) -> None:
        """Switch the mode off unless something is left on the GPU. Raises DeviceError: DRA-MIG-IN-USE."""
        self._control.leave_mode(self._gpu_uuid)
        if self._marks is not None:
            self._marks.mode_off(self._gpu_uuid)


class CreateMig:
    """A partition that is made for a claim.

    `found` is what stands at the placement and is ours, as seen under the GPU's lock a moment ago. `size` is the
    placement's in memory slices, None where it is not known; it only serves error texts.
    """

    kind: ClassVar[str] = DEVICE_KIND
    ends_with_boot: ClassVar[bool] = True

    def __init__(
        self,
        control: MigControl,
        device: str,
        gpu_uuid: str,
        *,
        found: Partition | None = None,
        size: int | None = None,
        outcome: Mapping[str, Any] | None = None,
        marks: MarkDirectory | None = None,
    ) -> None:
        match parse_device_name(device):
            case MigName() as name:
                pass
            case _:
                raise ValueError(f"{device} is no MIG device")
        self._control, self.device, self._gpu_uuid = control, device, gpu_uuid
        self._name, self._size, self._marks = name, size, marks
        self._made = found
        # What anybody sees of the GPU changes when it is applied.
        self.was_there = found is not None
        self._outcome: Mapping[str, Any] = outcome or {}

    @classmethod
    def revive(
        cls, args: Mapping[str, Any], *, control: MigControl, marks: MarkDirectory | None = None
    ) -> CreateMig:
        """Make the effect that destroys a partition."""
        return cls(control, str(args["device"]), str(args["gpu"]), outcome=args.get("outcome"), marks=marks)

    @property
    def shared_resource(self) -> str | None:
        """The placement: claims with a share each have it in common."""
        return f"{self._gpu_uuid} {self.device}"

    @property
    def outcome(self) -> Mapping[str, Any]:
        """What was made: `gi`, `ci`, `uuid`. An empty `uuid`: it is certain that nothing was."""
        made = self._made
        if made is None:
            return self._outcome
        return {"gi": made.gpu_instance, "ci": made.compute_instance, "uuid": made.uuid}

    @property
    def partition(self) -> Partition:
        """The partition, once it is there."""
        if self._made is None:
            raise DeviceError("DRA-MIG-GONE", f"device {self.device} was not made", retryable=True)
        return self._made

    def args(self) -> Mapping[str, Any]:
        """Give device and GPU."""
        return device_args(self.device, self._gpu_uuid)

    def apply(self) -> None:
        """Make it, unless it is there.

        Raises:
            DeviceError: DRA-MIG-BLOCKED naming what is in the way.
            DraError: of NVML. Nothing is left behind, or `undo` finds it.
        """
        if self._made is not None:
            return
        name = self._name
        try:
            self._made = self._control.create(self._gpu_uuid, profile_id=name.profile_id, start=name.start)
        except DraError as error:
            if error.code != OCCUPIED:
                raise
            self._outcome = {"uuid": ""}
            raise self._blocked() from error
        if self._marks is not None:
            self._marks.partition_made(self.device, self._gpu_uuid, self._made)

    def verify(self) -> bool:
        """Whether it was there a moment ago."""
        return self._made is not None

    def undo(self) -> None:
        """Destroy it if it is there and is the one that was made.

        Raises:
            DeviceError: DRA-MIG-IN-USE.
        """
        name, outcome = self._name, self._outcome
        place = {"profile_id": name.profile_id, "start": name.start}
        if outcome and not outcome.get("uuid"):
            return
        self._destroy(outcome, place)
        if self._marks is not None:
            self._marks.partition_gone(self.device)

    def _destroy(self, outcome: Mapping[str, Any], place: Mapping[str, int]) -> None:
        if outcome:
            made = Partition(int(outcome["gi"]), int(outcome["ci"]), str(outcome["uuid"]))
            self._control.destroy(self._gpu_uuid, made, **place)
            return
        # It is not known how far creating it came; the placement was empty before.
        found = self._control.look(self._gpu_uuid, **place).partition
        if found is None:
            self._control.clear_half_made(self._gpu_uuid, **place)
        else:
            self._control.destroy(self._gpu_uuid, found, **place)

    def _blocked(self) -> DeviceError:
        try:
            others = blockers(
                self._control.neighbours(self._gpu_uuid), start=self._name.start, size=self._size
            )
        except DraError:
            others = ()
        what = ", ".join(others) or "an instance that is no MIG device yet"
        return DeviceError(
            "DRA-MIG-BLOCKED",
            f"device {self.device} cannot be made on GPU {self._gpu_uuid}: {what} is in the way, which this driver "
            "did not make",
            remedy="Partitions made by hand are left alone: destroy it (nvidia-smi mig -dci, then -dgi), and the call, "
            "which is retried by itself, succeeds; or delete the pod so that it gets another device.",
            retryable=True,
            device=self.device,
        )


def mig_effects(control: MigControl, marks: MarkDirectory | None = None) -> dict[str, Revive]:
    """Give what makes the effects of MIG from journal entries."""
    return {
        MigMode.kind: lambda args: MigMode.revive(args, control=control, marks=marks),
        CreateMig.kind: lambda args: CreateMig.revive(args, control=control, marks=marks),
    }
