"""What the soak believes to be true: the claims, what they hold, and where there is room."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

GPUS = 8
# GPUs from here on are divided: 1g.10gb at seven places, memory slice by memory slice.
FIRST_DIVIDED = 6
PLACES = 7


@dataclass
class Held:
    """A claim that is prepared: its devices, and whether it takes them."""

    claim: dict[str, Any]
    devices: tuple[str, ...]
    admin: bool = False

    @property
    def uid(self) -> str:
        """The claim's UID."""
        return str(self.claim["metadata"]["uid"])


@dataclass
class World:
    """The claims that are prepared, by UID."""

    rng: random.Random
    held: dict[str, Held] = field(default_factory=dict)
    made: int = 0

    def taken(self) -> set[str]:
        """Give the devices that claims take."""
        return {device for each in self.held.values() if not each.admin for device in each.devices}

    def whole(self) -> list[str]:
        """Give the GPUs that are handed out whole."""
        return [f"gpu-{minor}" for minor in range(FIRST_DIVIDED)]

    def places(self) -> list[str]:
        """Give the partitions that are handed out."""
        return [
            f"gpu-{minor}-mig-1g10gb-19-{start}"
            for minor in range(FIRST_DIVIDED, GPUS)
            for start in range(PLACES)
        ]

    def free(self) -> list[str]:
        """Give what a claim could have."""
        taken = self.taken()
        return [device for device in (*self.whole(), *self.places()) if device not in taken]

    def partitions(self) -> dict[int, int]:
        """Give how many partitions claims hold, by GPU."""
        found: dict[int, int] = {}
        for device in self.taken():
            if "-mig-" in device:
                minor = int(device.split("-")[1])
                found[minor] = found.get(minor, 0) + 1
        return found

    def next_name(self) -> str:
        """Give a name for a claim."""
        self.made += 1
        return f"soak-{self.made}"
