"""What the API server in front of us stores and understands, as far as it shapes a pool.

The version gives a first guess; what a server really keeps shows only in what it sends back, and whoever
compares that narrows the guess with `dataclasses.replace`.

Source: Kubernetes feature gates by release (KEP-4815, KEP-5055, KEP-5075, KEP-6072).
"""

from __future__ import annotations

from dataclasses import dataclass

# Counters can be turned on from here (DRAPartitionableDevices, alpha until 1.35).
COUNTERS_SINCE = (1, 33)
# The same for several claims on a device (DRAConsumableCapacity).
SHARES_SINCE = (1, 34)


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """What may be published.

    Args:
        version: the server's (major, minor).
        device_taints: taints on devices are stored (DRADeviceTaints, on from 1.36).
        taint_effect_none: the effect None is known (1.35).
        partitionable: counters are stored (DRAPartitionableDevices, on from 1.36).
        counters_apart: counter sets stand in slices of their own (1.35); before, beside their devices.
        consumable: several claims may share a device by capacity (DRAConsumableCapacity, on from 1.36).
        list_attributes: attributes may hold lists (DRAListTypeAttributes, off everywhere).
    """

    version: tuple[int, int]
    device_taints: bool
    taint_effect_none: bool
    partitionable: bool
    counters_apart: bool
    consumable: bool
    list_attributes: bool = False

    @classmethod
    def of_version(cls, major: int, minor: int) -> ServerFeatures:
        """Give what a server of this version has with its default gates."""
        version = (major, minor)
        return cls(
            version=version,
            device_taints=version >= (1, 36),
            taint_effect_none=version >= (1, 35),
            partitionable=version >= (1, 36),
            counters_apart=version >= (1, 35),
            consumable=version >= (1, 36),
        )


# What commands assume that talk to no server.
NEWEST = ServerFeatures.of_version(1, 37)
