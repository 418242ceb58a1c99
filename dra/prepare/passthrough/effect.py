"""The effect behind a function that is passed through: it is bound to a driver of the vfio family.

What it was bound to stands in the journal before anything is touched, and exactly that is given back: a function that an
administrator had bound to vfio-pci stays there. A process that has the GPU open would make the kernel wait inside
`unbind`, where nothing ends it; so nothing is written before nobody has it open any more, which is waited for only so
long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dra.errors import DraError
from dra.prepare.passthrough import errors
from dra.prepare.passthrough.marks import PassthroughMarks, mark_of
from dra.prepare.passthrough.model import KIND, NVIDIA, Before, PassthroughNode, Patience
from dra.telemetry.log import error_fields, get_logger
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.host.pci_binding import PciFunction

# A look goes through the open files of all processes: the longer one of them has it open, the less often.
_LOOK_SECONDS = 0.1
_LONGEST_LOOK_SECONDS = 1.0
NO_DRIVER = "DRA-VFIO-NO-DRIVER"

log = get_logger()


class BindVfio:
    """That a function is bound to a driver of the vfio family.

    Args:
        node: the node's side.
        device: `gpu-vfio-0`.
        address: the function.
        before: how it was before this claim.
        marks: where it is noted for the case that the record is lost.
    """

    kind: ClassVar[str] = KIND
    ends_with_boot: ClassVar[bool] = True
    # Written down before anything is touched.
    knows_outcome: ClassVar[bool] = True
    shared_resource: str | None = None

    def __init__(
        self,
        node: PassthroughNode,
        device: str,
        address: PciAddress,
        *,
        before: Before,
        marks: PassthroughMarks | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._node, self.device, self.address = node, device, address
        self._before, self._marks = before, marks
        self._patience = patience or Patience()
        # Whether applying it changed what anybody sees of the GPU.
        self.changed = False

    @classmethod
    def revive(
        cls,
        args: Mapping[str, Any],
        *,
        node: PassthroughNode,
        marks: PassthroughMarks | None = None,
        patience: Patience | None = None,
    ) -> BindVfio:
        """Make the effect that gives the function back."""
        told = mark_of(args, args.get("outcome") or {})
        return cls(node, told.device, told.address, before=told.before, marks=marks, patience=patience)

    @property
    def outcome(self) -> Mapping[str, Any]:
        """How it was before."""
        return self._before.outcome

    def args(self) -> Mapping[str, Any]:
        """Give device and address."""
        return {"device": self.device, "pci": str(self.address)}

    def apply(self) -> None:
        """Bind it, unless it is bound.

        Raises:
            DeviceError: DRA-VFIO-IN-USE naming who has it open; DRA-VFIO-DRIVER, DRA-VFIO-NO-GROUP, DRA-VFIO-GROUP,
                DRA-VFIO-SRIOV: nothing was done.
            HostError: DRA-VFIO-MODULE, DRA-VFIO-BIND: of the kernel.
        """
        function = self._node.function(self.address)
        self._check(function)
        if function.on_vfio:
            return
        driver = self._node.vfio_driver(self.address)
        self._node.load(driver)
        if self._marks is not None:
            self._marks.note(self.device, self.address, self._before)
        if self._before.persistence:
            # The daemon that keeps a GPU awake has it open.
            self._set_persistence(on=False)
        self._wait_until_free()
        self.changed = True
        self._bind(driver, away_from=function.driver)
        log.info(
            "gpu_bound", device=self.device, pci=str(self.address), driver=driver, before=function.driver
        )

    def verify(self) -> bool:
        """Whether it is bound to a driver of the vfio family."""
        return self._node.function(self.address).on_vfio

    def undo(self) -> None:
        """Give the function back to the driver that it had, if it is still there.

        Without that driver (it was removed meanwhile) it is left free for the next that is loaded.

        Raises:
            DeviceError: DRA-VFIO-IN-USE: a virtual machine runs on it.
            HostError: DRA-VFIO-BIND.
        """
        function = self._node.function(self.address)
        if function.driver or function.iommu_group is not None:
            self._give_back(function)
        if self._marks is not None:
            mark = self._marks.read([self.device]).get(self.device)
            if mark is None or not mark.may_still_go(function):
                self._marks.forget(self.device)

    def _tell_kernel(self, driver: str) -> None:
        try:
            self._node.bind(self.address, driver)
        except DraError:
            # The kernel may still take it away once the one whom it waits for is gone, and then nobody would have it.
            if self._marks is not None and self._node.function(self.address).driver == self._before.driver:
                self._marks.note(self.device, self.address, self._before, hanging=True)
            raise

    def _give_back(self, function: PciFunction) -> None:
        wanted = self._before.driver
        if function.driver != wanted and function.driver:
            self._wait_until_free()
        try:
            # Also where it is bound so: a crash may have left the override that holds it there.
            self._bind(wanted, away_from=function.driver)
        except DraError as error:
            if error.code != NO_DRIVER:
                raise
            self._node.unbind(self.address)
            log.warning("gpu_left_without_driver", device=self.device, **error_fields(error))
            return
        if self._before.persistence and wanted == NVIDIA:
            self._set_persistence(on=True)
        if function.driver != wanted:
            log.info(
                "gpu_bound", device=self.device, pci=str(self.address), driver=wanted, before=function.driver
            )

    def _bind(self, driver: str, *, away_from: str) -> None:
        """Bind it; what this process has open through NVIDIA's driver is let go of for that."""
        if away_from != NVIDIA or driver == NVIDIA:
            self._tell_kernel(driver)
            return
        with self._node.let_go(self.address):
            self._check_free(seconds=0)
            self._tell_kernel(driver)

    def _check(self, function: PciFunction) -> None:
        if function.iommu_group is None:
            raise errors.no_iommu_group(self.device, function)
        members = [each for each in function.group_members if each.in_the_way]
        if members:
            raise errors.group_in_the_way(self.device, function, members)
        if function.sriov_vfs:
            raise errors.cut_into_vfs(self.device, function)
        # Without a driver it is what a crash between two drivers leaves.
        if function.driver and function.driver != NVIDIA and not function.on_vfio:
            raise errors.wrong_driver(self.device, function)

    def _wait_until_free(self) -> None:
        """Wait until nobody has the function open. Raises DeviceError: DRA-VFIO-IN-USE."""
        patience = self._patience
        end, pause = patience.clock() + patience.seconds, _LOOK_SECONDS
        while self._node.holders(self.address):
            if patience.clock() >= end:
                self._check_free(seconds=patience.seconds)
                return
            patience.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)

    def _check_free(self, *, seconds: float) -> None:
        if holders := self._node.holders(self.address):
            raise errors.in_use(self.device, self.address, holders, seconds=seconds)

    def _set_persistence(self, *, on: bool) -> None:
        # A GPU that sleeps when nobody uses it works too; one that is kept awake shows among the holders.
        try:
            self._node.set_persistence(self.address, on=on)
        except DraError as error:
            log.warning("persistence_not_set", device=self.device, wanted=on, **error_fields(error))
