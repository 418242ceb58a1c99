"""Marks of functions that this driver bound to vfio, in files that outlive a lost claim record.

A claim's record says it first. Were it lost, the function would look like one that an administrator had bound, and would
never come back. So each has a small file of its own, `vfio/<device>.json`.

A reboot undoes what they tell of, so that nothing is fsynced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.prepare.mark_files import MarkFiles
from dra.prepare.passthrough.model import Before
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.host.pci_binding import PciFunction

FOLDER = "vfio"


@dataclass(frozen=True, slots=True)
class PassthroughMark:
    """A function of this boot that this driver bound to vfio, and how it was before.

    `hanging`: the kernel was told to take it from its driver and did not answer; it may do so at any time.
    """

    device: str
    address: PciAddress
    before: Before
    hanging: bool = False

    def may_still_go(self, function: PciFunction) -> bool:
        """Whether the kernel may still take the function from the driver that it was to be taken from."""
        return self.hanging and function.driver == self.before.driver


def mark_of(args: Mapping[str, Any], outcome: Mapping[str, Any]) -> PassthroughMark:
    """Read what a journal says: the effect's arguments, and what came of it. Raises KeyError, ValueError."""
    return PassthroughMark(str(args["device"]), PciAddress.parse(str(args["pci"])), Before.of(outcome))


class PassthroughMarks:
    """The marks of one node. Thread-safe; written under the lock of the device only. Never raises: the records tell too.

    Args:
        state_dir: the driver's directory.
        boot_id: of this boot; marks of others mean nothing.
    """

    def __init__(self, state_dir: Path, *, boot_id: str) -> None:
        self._files = MarkFiles(state_dir / FOLDER, boot_id=boot_id)

    def note(self, device: str, address: PciAddress, before: Before, *, hanging: bool = False) -> None:
        """Note a function that is about to be bound, or whose kernel did not answer."""
        more = {"hanging": True} if hanging else {}
        self._files.write(device, {"device": device, "pci": str(address), **before.outcome, **more})

    def forget(self, device: str) -> None:
        """Forget a function that was given back."""
        self._files.remove(device)

    def read(self, devices: Iterable[str] | None = None) -> Mapping[str, PassthroughMark]:
        """Give the marks of this boot by device name: of these devices, or all."""
        found: dict[str, PassthroughMark] = {}
        for name, content in self._files.read(devices):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                if content["device"] == name:
                    mark = mark_of(content, content)
                    found[name] = replace(mark, hanging=bool(content.get("hanging")))
        return found

    def clear_old(self) -> int:
        """Remove what another boot left; how many."""
        return self._files.clear_old()

    def leftovers(self) -> list[Path]:
        """Give the temporary files of writes that never ended, or have not yet."""
        return self._files.leftovers()
