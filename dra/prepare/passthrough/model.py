"""What passing a function through needs of the node, and what is remembered of how the function was before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dra.api.claim import AllocatedDevice
from dra.inventory.model import Inventory, VfioFunction
from dra.inventory.names import parse_vfio_name
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.host.pci_binding import Holder, PciFunction

# The effect's name in journals.
KIND = "vfio"
# NVIDIA's kernel driver, as /sys/bus/pci/drivers names it.
NVIDIA = "nvidia"
# Of the 45 s that the kubelet gives a call; what monitors a GPU looks at it for a second or two and lets go.
FREE_SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class Before:
    """How a function was before a claim took it, which is what it is given back to.

    `driver` is the kernel's. `gpu` is the device that it was with NVIDIA's driver (`gpu-0`), empty if that is not known;
    `persistence`: that GPU's persistence mode was on.
    """

    driver: str
    gpu: str = ""
    persistence: bool = False

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The same for a journal."""
        return {"driver": self.driver, "gpu": self.gpu, "persistence": self.persistence}

    @classmethod
    def of(cls, outcome: Mapping[str, Any]) -> Before:
        """Read it from a journal or a mark. What is missing is as NVIDIA's own driver takes it."""
        return cls(
            str(outcome.get("driver", NVIDIA)),
            str(outcome.get("gpu", "")),
            bool(outcome.get("persistence", False)),
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """How long it is waited until nobody has a function open."""

    seconds: float = FREE_SECONDS
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class PassthroughNode(Protocol):
    """The node's side. What changes something raises DraError."""

    def function(self, address: PciAddress) -> PciFunction:
        """Give a function as it is now; without driver and IOMMU group if it is not there."""
        ...

    def gpus(self) -> tuple[PciAddress, ...]:
        """Give the addresses of all GPUs on the bus; a place in this list is the index in `gpu-vfio-<index>`."""
        ...

    def vfio_driver(self, address: PciAddress) -> str:
        """Give the driver of the vfio family that fits a function best."""
        ...

    def load(self, driver: str) -> None:
        """Have the kernel load a driver's module."""
        ...

    def bind(self, address: PciAddress, driver: str) -> None:
        """Bind a function to a loaded driver, away from the one that has it; fine if it is bound so."""
        ...

    def unbind(self, address: PciAddress) -> None:
        """Leave a function without a driver, free for the next that is loaded."""
        ...

    def holders(self, address: PciAddress) -> tuple[Holder, ...]:
        """Give the processes that have the function open, through whatever driver; this one is none of them."""
        ...

    def let_go(self, address: PciAddress) -> AbstractContextManager[None]:
        """Have this process let go of the GPU while the block runs.

        Raises:
            DraError: it cannot.
        """
        ...

    def set_persistence(self, address: PciAddress, *, on: bool) -> None:
        """Switch a GPU's persistence mode."""
        ...


def is_passthrough(result: AllocatedDevice) -> bool:
    """Whether an allocated device is a function that is passed through."""
    return parse_vfio_name(result.device) is not None


def function_of(device: str, inventory: Inventory) -> VfioFunction | None:
    """Give the function that a device's name stands for; None if none can be passed through under that name."""
    name = parse_vfio_name(device)
    if name is None:
        return None
    return next((each for each in inventory.vfio if each.index == name.index), None)
