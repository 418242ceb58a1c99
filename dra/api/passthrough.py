"""What holds for claims of GPUs that are passed through to virtual machines, before any node is asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dra.errors import ConfigError


def mixed_error(through: Sequence[str], others: Sequence[str]) -> ConfigError:
    """Give the error of a claim that has functions that are passed through, and GPUs or partitions too.

    Args:
        through: names of the devices that are passed through, or of the requests for them.
        others: names of the others.
    """
    return ConfigError(
        "DRA-VFIO-MIXED",
        f"one claim cannot have both GPUs that are passed through ({', '.join(through)}) and GPUs or partitions for "
        f"containers ({', '.join(others)}): its containers would get NVIDIA's driver beside the bare device",
        remedy="Make two claims of it; one pod may use both.",
    )
