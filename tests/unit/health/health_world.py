"""A book of health with a clock that the test turns."""

from __future__ import annotations

from dra.health.book import HealthBook
from dra.health.model import Reading, Scope, XidEvent
from dra.health.policy import HealthPolicy
from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile
from dra.values import PciAddress

GPU = "GPU-0"
PROFILE = MigProfile("1g.10gb", 19, 9984, 16, 1, 1, 0, 1, 0, ((0, 1), (1, 1)))


class World:
    """The book of one GPU (or more); `good` and `bad` are readings."""

    def __init__(self, **policy):
        self.now = 1_000_000.0
        options = {key: policy.pop(key) for key in ("note_seconds",) if key in policy}
        self.book = HealthBook(
            HealthPolicy(**policy), wall=lambda: self.now, clock=lambda: self.now - 5, **options
        )

    def xid(self, xid, *, action=0, gpu=GPU, gi=None, ci=None, read=True, **reading):
        answer = Reading(recovery_action=action, **reading) if read else None
        self.book.take_xid(XidEvent(Scope(gpu, gi, ci), xid), answer)
        if answer is not None:
            self.book.take_reading(gpu, answer)

    def look(self, times=1, *, every=2.0, gpu=GPU, **reading):
        reading.setdefault("recovery_action", 0)
        for _ in range(times):
            self.now += every
            self.book.take_reading(gpu, Reading(**reading))

    @property
    def held(self):
        """What is held against whom: {(gi or None, key): (grade, value)}."""
        return {(c.scope.gi, c.key): (c.grade.name, c.value) for c in self.book.conditions}

    def changes(self):
        return [
            (c.condition.key, None if c.after is None else c.after.grade.name)
            for c in self.book.take_changes()
        ]


def gpu(minor, *, uuid=None, **fields):
    return Gpu(
        minor=minor,
        uuid=uuid or f"GPU-{minor}",
        pci_address=PciAddress.parse(f"0000:{minor + 16:02x}:00.0"),
        product_name="NVIDIA H100 80GB HBM3",
        brand="Nvidia",
        architecture="Hopper",
        compute_capability=(9, 0),
        memory_bytes=80 << 30,
        **fields,
    )


def mig(start, *, gi, ci=0):
    return MigDevice(f"MIG-{gi}", PROFILE, gi, ci, start, 1)


def inventory(*gpus):
    return Inventory("580.95.05", (13, 0), gpus)
