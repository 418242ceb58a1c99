"""One check of a GPU's health: a handful of calls, each of which a GPU may not have."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import pynvml

from dra.errors import DraError
from dra.nvml.api import NvmlApi
from dra.nvml.errors import HUNG, SESSION_ENDED
from dra.nvml.health_facts import HealthReading
from dra.values import PciAddress

_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, since 570; older bindings do not name it
_FIELDS = (
    _ACTION,
    pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    pynvml.NVML_FI_DEV_RETIRED_PENDING,
    pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
)
_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
}
# Hardware slowdown by temperature. Source: nvmlClocksEventReasonHwThermalSlowdown.
_HW_THERMAL = 0x40
_SLOWDOWN_THRESHOLD = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN


def read_health(api: NvmlApi, address: PciAddress, *, fabric: bool = True) -> HealthReading:
    """Give what a GPU says about itself.

    Args:
        api: the open session.
        address: which GPU.
        fabric: ask for its NVLink fabric too.

    Raises:
        StackError: the session is worth nothing any more.
        DeviceError: DRA-NVML-HUNG; any other answer of the GPU is in the reading.
    """
    subject = str(address)
    try:
        handle = api.handle(address)
        values = _fields(api, handle, subject)
        reasons = api.optional("nvmlDeviceGetCurrentClocksEventReasons", handle, subject=subject)
        if reasons is None:
            # The name before driver 535.
            reasons = api.optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle, subject=subject)
        state, status, health = _fabric(api, handle, subject) if fabric else (None, None, None)
        return HealthReading(
            recovery_action=values.get(_ACTION),
            energy_mj=values.get(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION),
            ecc_uncorrected=values.get(pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
            remap_pending=_flag(values.get(pynvml.NVML_FI_DEV_REMAPPED_PENDING)),
            remap_failed=_flag(values.get(pynvml.NVML_FI_DEV_REMAPPED_FAILURE)),
            retire_pending=_flag(values.get(pynvml.NVML_FI_DEV_RETIRED_PENDING)),
            temperature=_number(
                api.optional("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU, subject=subject)
            ),
            slowdown_temperature=_remembered(
                api, "nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN_THRESHOLD, subject=subject
            ),
            hardware_slowdown=None if reasons is None else bool(int(reasons) & _HW_THERMAL),
            pcie_width=_number(api.optional("nvmlDeviceGetCurrPcieLinkWidth", handle, subject=subject)),
            pcie_width_max=_remembered(api, "nvmlDeviceGetMaxPcieLinkWidth", handle, subject=subject),
            fabric_state=state,
            fabric_status=status,
            fabric_health=health,
        )
    except DraError as error:
        if error.code == HUNG or error.code in SESSION_ENDED:
            raise
        return HealthReading(error=error.code, message=error.message)


def _fields(api: NvmlApi, handle: Any, subject: str) -> dict[int, int]:
    """Read all fields in one call; those that the GPU does not have are left out."""
    answer = api.optional("nvmlDeviceGetFieldValues", handle, list(_FIELDS), subject=subject)
    found: dict[int, int] = {}
    for entry in answer or ():
        if entry.nvmlReturn != pynvml.NVML_SUCCESS:
            if entry.nvmlReturn == pynvml.NVML_ERROR_GPU_IS_LOST:
                # The call as a whole succeeded; ask in a way that says so.
                api.call("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU, subject=subject)
            continue
        member = _MEMBERS.get(entry.valueType)
        if member is not None:
            found[int(entry.fieldId)] = int(getattr(entry.value, member))
    return found


def _fabric(api: NvmlApi, handle: Any, subject: str) -> tuple[int | None, int | None, int | None]:
    """Give state, status and health summary of the GPU in its fabric; nothing where it has none."""
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        kind = getattr(pynvml, name, None)
        if kind is None:
            continue
        info = kind()
        try:
            answer = api.optional("nvmlDeviceGetGpuFabricInfoV", handle, byref(info), subject=subject)
        except DraError as error:
            if error.code in ("DRA-NVML-ARGUMENT-VERSION", "DRA-NVML-INVALID-ARGUMENT"):
                continue  # a driver that knows older versions only
            raise
        if answer is None:
            return None, None, None
        if not info.state:
            return None, None, None
        summary = getattr(info, "healthSummary", None)
        return int(info.state), int(info.status), None if summary is None else int(summary)
    return None, None, None


def _remembered(api: NvmlApi, name: str, handle: Any, *args: object, subject: str) -> int | None:
    return api.remembered(
        (name, subject), lambda: _number(api.optional(name, handle, *args, subject=subject))
    )


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)
