"""Changes of MIG partitions between two looks at the hardware: seen in /proc, which asks no GPU anything.

Somebody who cuts a GPU by hand should see it published within seconds, and a look through NVML that often would cost
more than it tells. The kernel lists the instances of each GPU; that list is compared every two seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from dra.inventory.model import Inventory

LOOK_SECONDS = 2.0


class LayoutWatch:
    """Stands in the loop of the live inventory: around its scan, and in its pauses. One thread only.

    Args:
        layouts: gives what the kernel lists; only compared.
        tidy: the pause's other work, as `LiveInventory` takes it.
        changed: called when the list is another one than at the last look.
    """

    def __init__(
        self,
        layouts: Callable[[], object],
        *,
        tidy: Callable[[], float | None],
        changed: Callable[[], None],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._layouts, self._tidy, self._changed = layouts, tidy, changed
        self._look_seconds = look_seconds
        self._seen: object = None

    def around(self, scan: Callable[[], Inventory]) -> Callable[[], Inventory]:
        """Give the scan that notes what the kernel listed when it began: what comes later is news."""

        def look() -> Inventory:
            self._seen = self._layouts()
            return scan()

        return look

    def tidy(self) -> float:
        """Do the other work, compare, and give the seconds until this is to be called again."""
        pause = self._tidy()
        if self._layouts() != self._seen:
            self._changed()
        return self._look_seconds if pause is None else min(pause, self._look_seconds)
