"""What holds for claims of GPUs that are passed through to virtual machines, before any node is asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dra.errors import ConfigError

if TYPE_CHECKING:
    from dra.api.config import DecodedConfig
    from dra.api.config_models import IommuConfig

# A function's own node and /dev/iommu, where the kernel has them.
PREFER_IOMMUFD = "PreferIommuFD"


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


def backends_error(policies: Mapping[str, str]) -> ConfigError:
    """Give the error of a claim that asks for both of VFIO's interfaces.

    Args:
        policies: `iommu.backendPolicy` to a device, or a request, that has it.
    """
    parts = " and ".join(f"{policy} for {name}" for policy, name in sorted(policies.items()))
    return ConfigError(
        "DRA-VFIO-BACKENDS",
        f"the claim asks for two interfaces of VFIO at once, {parts}: a process can use one of them only",
        remedy="Write the same iommu.backendPolicy for all requests of the claim.",
    )


def backend_policy(config: DecodedConfig | None) -> str:
    """Give which interface a VfioDeviceConfig asks for; the default without one."""
    iommu = iommu_of(config)
    return "LegacyOnly" if iommu is None else str(iommu.backendPolicy)


def iommu_of(config: DecodedConfig | None) -> IommuConfig | None:
    """Give the block `iommu` of a VfioDeviceConfig; None for the defaults."""
    return None if config is None else getattr(config.parameters, "iommu", None)
