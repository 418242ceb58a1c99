"""The opaque configuration kinds of `resource.nvidia.com/v1beta1`, field by field.

These models are the grammar; what a combination of values means is decided in `dra.api.config`. Strict: an
unknown or wrongly-cased field is an error. Source: NVIDIA's DRA driver, API group resource.nvidia.com/v1beta1
(decoded there by a strict JSON decoder, for which null means absent).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from dra.errors import ValueFormatError
from dra.values import Quantity


def _quantity(value: Any) -> Quantity:
    # Kubernetes takes a quantity as a string or as a bare number.
    if isinstance(value, Quantity):
        return value
    if value is None or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("is not a quantity")
    try:
        return Quantity.parse(str(value))
    except ValueFormatError as error:
        raise ValueError(f"{error.message}") from error


# Kubernetes' grammar of quantities. Source: apimachinery, pkg/api/resource.
_QUANTITY_SCHEMA = {
    "description": "A Kubernetes quantity of bytes, at least 1Mi; whole MiB count.",
    "anyOf": [
        {
            "type": "string",
            "pattern": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
        },
        {"type": "number"},
    ],
}
Limit = Annotated[Quantity, BeforeValidator(_quantity), WithJsonSchema(_QUANTITY_SCHEMA)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class _Kind(_Strict):
    apiVersion: Literal["resource.nvidia.com/v1beta1"]  # noqa: N815 - the API's spelling


class TimeSlicingConfig(_Strict):
    """How long a time slice is. An absent interval is `Default`."""

    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


class MpsConfig(_Strict):
    """What an MPS control daemon is started with.

    `defaultActiveThreadPercentage`: how much of the multiprocessors a client may use; absent: all of them.
    `defaultPinnedDeviceMemoryLimit`: how much memory of each device each process of a client may take; absent: no limit.
    `defaultPerDevicePinnedMemoryLimit`: the same for single devices, by UUID or by index in the order of the UUIDs of
    the group; it goes before the one for all. `multiUser`: clients of several users may be connected at once.
    """

    defaultActiveThreadPercentage: Annotated[int, Field(ge=0, le=100)] | None = None  # noqa: N815
    defaultPinnedDeviceMemoryLimit: Limit | None = None  # noqa: N815
    # Keys are indices or UUIDs of the devices of the group.
    defaultPerDevicePinnedMemoryLimit: dict[str, Limit] | None = None  # noqa: N815
    multiUser: bool = False  # noqa: N815


class GpuSharing(_Strict):
    """How the containers of a claim share whole GPUs."""

    strategy: Literal["TimeSlicing", "MPS"]
    timeSlicingConfig: TimeSlicingConfig | None = None  # noqa: N815
    mpsConfig: MpsConfig | None = None  # noqa: N815


class MigSharing(_Strict):
    """How the containers of a claim share MIG devices."""

    strategy: Literal["TimeSlicing", "MPS"]
    mpsConfig: MpsConfig | None = None  # noqa: N815


class GpuConfig(_Kind):
    """Configuration of whole GPUs."""

    kind: Literal["GpuConfig"]
    sharing: GpuSharing | None = None


class MigDeviceConfig(_Kind):
    """Configuration of MIG devices."""

    kind: Literal["MigDeviceConfig"]
    sharing: MigSharing | None = None


class IommuConfig(_Strict):
    """Which IOMMU interface a passed-through function is used with."""

    backendPolicy: Literal["LegacyOnly", "PreferIommuFD"] = "LegacyOnly"  # noqa: N815
    enableAPIDevice: bool = False  # noqa: N815


class VfioDeviceConfig(_Kind):
    """Configuration of GPUs passed through with VFIO."""

    kind: Literal["VfioDeviceConfig"]
    iommu: IommuConfig | None = None


class ComputeDomainChannelConfig(_Kind):
    """Configuration of another driver of the same API group; never fits a GPU."""

    kind: Literal["ComputeDomainChannelConfig"]
    domainID: Annotated[str, Field(min_length=1)]  # noqa: N815
    allocationMode: str = ""  # noqa: N815


class ComputeDomainDaemonConfig(_Kind):
    """Configuration of another driver of the same API group; never fits a GPU."""

    kind: Literal["ComputeDomainDaemonConfig"]
    domainID: Annotated[str, Field(min_length=1)]  # noqa: N815


KINDS: dict[str, type[_Kind]] = {
    model.__name__: model
    for model in (
        GpuConfig, MigDeviceConfig, VfioDeviceConfig, ComputeDomainChannelConfig, ComputeDomainDaemonConfig,
    )
}  # fmt: skip

_BLOCKS: tuple[type[_Strict], ...] = (GpuSharing, MigSharing, TimeSlicingConfig, MpsConfig, IommuConfig)
# All names of fields there are, for hints.
FIELDS: frozenset[str] = frozenset(
    name for model in (*KINDS.values(), *_BLOCKS) for name in model.model_fields
)
