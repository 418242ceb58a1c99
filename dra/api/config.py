"""Which opaque configuration applies to an allocated device, and what is wrong with one that cannot.

Pure. Precedence is NVIDIA's: class entries first, then claim entries, the last that matches wins and replaces the
others as a whole. Unlike there, an entry that names the parent of a `firstAvailable` request matches the chosen
subrequest, as the Kubernetes API says. Source: resource.k8s.io/v1 DeviceAllocationConfiguration.requests;
NVIDIA's DRA driver, resource.nvidia.com/v1beta1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dra.api.claim import AllocatedDevice, OpaqueConfig
from dra.api.imports import PYDANTIC
from dra.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

GROUP_VERSION = "resource.nvidia.com/v1beta1"
DeviceType = Literal["gpu", "mig", "vfio"]

# The kind that configures each type of device.
KIND_OF_TYPE: Mapping[DeviceType, str] = {
    "gpu": "GpuConfig",
    "mig": "MigDeviceConfig",
    "vfio": "VfioDeviceConfig",
}
KNOWN_KINDS = (
    "GpuConfig", "MigDeviceConfig", "VfioDeviceConfig", "ComputeDomainChannelConfig", "ComputeDomainDaemonConfig",
)  # fmt: skip

# MPS counts memory in whole MiB; quantities count in billionths.
MIB_NANO = (1 << 20) * 10**9
_LIMITS_MAP = "defaultPerDevicePinnedMemoryLimit"


@dataclass(frozen=True, slots=True)
class DecodedConfig:
    """One valid opaque configuration.

    `index` is its place among the driver's entries: results that got the same index share one group. `parameters`
    is the pydantic model of `dra.api.config_models` named by `kind`.
    """

    kind: str
    index: int
    source: str
    requests: tuple[str, ...]
    parameters: BaseModel
    warnings: tuple[str, ...] = ()

    @property
    def strategy(self) -> str | None:
        """The sharing strategy that is asked for; None if there is none."""
        sharing = getattr(self.parameters, "sharing", None)
        return None if sharing is None else str(sharing.strategy)

    def names(self, result: AllocatedDevice) -> bool:
        """Whether the entry lists the result's request, or the request it is a subrequest of."""
        return result.request in self.requests or result.request_name in self.requests


def decode_configs(configs: Sequence[OpaqueConfig]) -> tuple[DecodedConfig, ...]:
    """Decode every entry of one driver, class entries first, each source in its own order.

    Raises:
        ConfigError: as `decode_config`; an entry that no device uses is checked too, as in NVIDIA's driver.
    """
    ordered = sorted(enumerate(configs), key=lambda pair: pair[1].source != "FromClass")
    found = []
    for index, entry in ordered:
        model = decode_config(entry.parameters)
        found.append(
            DecodedConfig(type(model).__name__, index, entry.source, entry.requests, model, _warnings(model))
        )
    return tuple(found)


def effective_config(
    result: AllocatedDevice, configs: Sequence[DecodedConfig], *, device_type: DeviceType
) -> DecodedConfig | None:
    """Give the one configuration that applies to an allocated device; None: the built-in default.

    Raises:
        ConfigError: DRA-CONFIG-KIND-MISMATCH where an entry names the request but is of another kind.
    """
    wanted = KIND_OF_TYPE[device_type]
    for config in reversed(configs):
        if config.names(result):
            if config.kind != wanted:
                raise ConfigError(
                    "DRA-CONFIG-KIND-MISMATCH",
                    f"cannot apply {config.kind} to device {result.device} of request {result.request}: "
                    f"a device of type {device_type} takes {wanted}",
                    remedy=f"Write kind {wanted}, or list another request in the configuration.",
                    device=result.device,
                )
            return config
        if not config.requests and config.kind == wanted:
            return config
    return None


def decode_config(parameters: Mapping[str, Any]) -> BaseModel:
    """Decode the parameters of one opaque configuration strictly.

    Raises:
        ConfigError: DRA-CONFIG-API-VERSION, DRA-CONFIG-KIND, DRA-CONFIG-FIELD (all wrong fields, with paths).
    """
    with PYDANTIC:
        from pydantic import ValidationError

        from dra.api.config_models import KINDS

    version, kind = parameters.get("apiVersion"), parameters.get("kind")
    if version != GROUP_VERSION:
        raise ConfigError(
            "DRA-CONFIG-API-VERSION",
            f"opaque configuration has apiVersion {_shown(version)}, known is {GROUP_VERSION}",
            remedy=f"Write apiVersion: {GROUP_VERSION}.",
            field="apiVersion",
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            "DRA-CONFIG-KIND",
            f"opaque configuration has kind {_shown(kind)}, known are {', '.join(KNOWN_KINDS[:3])}",
            remedy="Write the kind that fits the device, with this spelling.",
            field="kind",
        )
    try:
        model = KINDS[kind].model_validate(_without_nulls(dict(parameters)))
    except ValidationError as error:
        raise _field_error(kind, error) from error
    except RecursionError as error:
        raise ConfigError(
            "DRA-CONFIG-FIELD",
            f"{kind} is nested too deeply",
            remedy="Remove what is nested; no field needs more than three levels.",
            field="sharing",
        ) from error
    _check_meaning(kind, model)
    return model


def limit_key_kind(key: str) -> Literal["index", "uuid", ""]:
    """Say what a key of `defaultPerDevicePinnedMemoryLimit` can be; empty: it can never name a device.

    Source: NVIDIA's driver takes Go's strconv.Atoi for an index and a UUID of the group as it is.
    """
    if re.fullmatch(r"[+-]?[0-9]{1,19}", key, re.ASCII):
        return "" if int(key) < 0 else "index"
    return "uuid" if re.fullmatch(r"(?:GPU|MIG)-\S{1,120}", key) else ""


def _check_meaning(kind: str, model: BaseModel) -> None:
    # What NVIDIA's driver accepts here and fails on at prepare is refused at once.
    sharing: Any = getattr(model, "sharing", None)
    if sharing is None:
        return
    if sharing.strategy == "MPS" and getattr(sharing, "timeSlicingConfig", None) is not None:
        raise ConfigError(
            "DRA-CONFIG-FIELD",
            f"{kind}: sharing.timeSlicingConfig does not go with strategy MPS",
            remedy="Remove timeSlicingConfig, or write strategy: TimeSlicing.",
            field="sharing.timeSlicingConfig",
        )
    # NVIDIA's driver never looks at the limits of a block that the strategy does not use.
    if sharing.mpsConfig is not None and sharing.strategy == "MPS":
        _check_limits(kind, sharing.mpsConfig)


def _check_limits(kind: str, mps: Any) -> None:
    limits = {"defaultPinnedDeviceMemoryLimit": mps.defaultPinnedDeviceMemoryLimit}
    for key, limit in (mps.defaultPerDevicePinnedMemoryLimit or {}).items():
        limits[f"{_LIMITS_MAP}[{key}]"] = limit
        if not limit_key_kind(key):
            raise ConfigError(
                "DRA-CONFIG-DEVICE",
                f"{kind}: sharing.mpsConfig.{_LIMITS_MAP}[{_shown_key(key)}] can name no device",
                remedy="Write the index of a device of the group, counted from 0 in the order of their UUIDs, or its "
                "UUID.",
                field=f"sharing.mpsConfig.{_LIMITS_MAP}[{key}]",
            )
    for name, limit in limits.items():
        if limit is not None and limit.nano < MIB_NANO:
            raise ConfigError(
                "DRA-CONFIG-FIELD",
                f"{kind}: sharing.mpsConfig.{name} is {limit}, which is less than 1Mi",
                remedy="Write at least 1Mi; MPS counts in whole MiB.",
                field=f"sharing.mpsConfig.{name}",
            )


def _warnings(model: BaseModel) -> tuple[str, ...]:
    sharing: Any = getattr(model, "sharing", None)
    if sharing is None:
        return ()
    found = []
    if sharing.strategy == "TimeSlicing":
        if sharing.mpsConfig is not None:
            found.append("sharing.mpsConfig does nothing with strategy TimeSlicing")
        if type(model).__name__ == "MigDeviceConfig":
            found.append(
                "strategy TimeSlicing does nothing on MIG devices: they have no time-slice of their own"
            )
    elif sharing.mpsConfig is not None and sharing.mpsConfig.defaultActiveThreadPercentage == 0:
        found.append(
            "sharing.mpsConfig.defaultActiveThreadPercentage 0 is no share that MPS can give: clients get all of it"
        )
    return tuple(found)


def _field_error(kind: str, error: ValidationError) -> ConfigError:
    problems = []
    items = error.errors(include_url=False, include_context=False, include_input=True)
    for item in items[:8]:
        path = _path(item["loc"]) or "the configuration"
        if item["type"] == "extra_forbidden":
            problems.append(f"{path} is an unknown field{_meant(item['loc'])}")
        elif item["type"] == "missing":
            problems.append(f"{path} is required")
        else:
            problems.append(
                f"{path}: {item['msg'].removeprefix('Value error, ')} (got {_shown(item['input'])})"
            )
    return ConfigError(
        "DRA-CONFIG-FIELD",
        f"{kind}: {'; '.join(problems)}",
        remedy=f"Correct the field; names are case-sensitive and as {GROUP_VERSION} spells them.",
        field=_path(items[0]["loc"]),
    )


def _path(parts: Sequence[int | str]) -> str:
    """Give `sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[0]`: keys of users stand in brackets."""
    text, before = "", ""
    for part in parts:
        if before == _LIMITS_MAP:
            text += f"[{_shown_key(str(part))}]"
        else:
            text += f".{_shown_key(str(part))}" if text else _shown_key(str(part))
        before = str(part)
    return text


def _shown_key(key: str) -> str:
    return key if len(key) <= 80 else key[:77] + "..."


def _meant(parts: Sequence[int | str]) -> str:
    """Name the field that was probably meant: one that differs by case only."""
    with PYDANTIC:
        from dra.api.config_models import FIELDS
    wrong = str(parts[-1])
    right = next((name for name in FIELDS if name.lower() == wrong.lower() and name != wrong), "")
    return f"; {right} is one" if right else ""


def _without_nulls(value: Any, *, keep: bool = False) -> Any:
    # Go decodes null to the zero value of any field. Values of the limits' map are no fields.
    if isinstance(value, Mapping):
        return {
            key: _without_nulls(item, keep=key == "defaultPerDevicePinnedMemoryLimit")
            for key, item in value.items()
            if keep or item is not None
        }
    return value


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number that is too long"
    return text if len(text) <= 60 else text[:57] + "..."
