"""Field values: one call that reads many numbers, each with a status of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.functions.telemetry import ECC_BUS_WIDTH, ecc_errors
from dra.sim.nvml.memory import Status, number, target
from dra.sim.nvml.models import HOPPER
from dra.sim.nvml.registry import nvml

if TYPE_CHECKING:
    from dra.sim.nvml.library import Device, SimulatedNvml

_UINT, _ULL = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_MEMBER = {_UINT: "uiVal", _ULL: "ullVal"}

Reader = Callable[["Device"], int]


def _remapper(read: Reader) -> Reader:
    def reader(device: Device) -> int:
        if not device.model.row_remapping:
            raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return read(device)

    return reader


def _pages(read: Reader) -> Reader:
    def reader(device: Device) -> int:
        if device.model.row_remapping:
            raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return read(device)

    return reader


def _links(read: Reader) -> Reader:
    def reader(device: Device) -> int:
        if not device.model.nvlinks:
            raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return read(device)

    return reader


def _ecc(kind: int, counter: int) -> Reader:
    def reader(device: Device) -> int:
        if device.model.bus_width < ECC_BUS_WIDTH:
            raise Status(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return ecc_errors(device, kind, counter)

    return reader


_FIELDS: dict[int, tuple[int, Reader]] = {
    pynvml.NVML_FI_DEV_ECC_CURRENT: (_UINT, lambda device: device.gpu.ecc_current),
    pynvml.NVML_FI_DEV_ECC_PENDING: (_UINT, lambda device: device.gpu.ecc_pending),
    pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL: (_ULL, _ecc(0, 0)),
    pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL: (_ULL, _ecc(1, 0)),
    pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL: (_ULL, _ecc(0, 1)),
    pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL: (_ULL, _ecc(1, 1)),
    pynvml.NVML_FI_DEV_RETIRED_SBE: (_UINT, _pages(lambda device: len(device.gpu.retired_single))),
    pynvml.NVML_FI_DEV_RETIRED_DBE: (_UINT, _pages(lambda device: len(device.gpu.retired_double))),
    pynvml.NVML_FI_DEV_RETIRED_PENDING: (_UINT, _pages(lambda device: device.gpu.retired_pending)),
    pynvml.NVML_FI_DEV_MEMORY_TEMP: (_UINT, lambda device: device.gpu.memory_temperature),
    pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: (_ULL, lambda device: device.gpu.energy_mj),
    pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: (_UINT, _links(lambda device: device.model.nvlinks)),
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: (
        _ULL, _links(lambda device: device.gpu.nvlink_crc_flit),
    ),
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL: (
        _ULL, _links(lambda device: device.gpu.nvlink_crc_data),
    ),
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: (
        _ULL, _links(lambda device: device.gpu.nvlink_replays),
    ),
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: (
        _ULL, _links(lambda device: device.gpu.nvlink_recoveries + len(device.gpu.nvlinks_down)),
    ),
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: (_ULL, _links(lambda device: device.gpu.nvlink_tx_kib)),
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: (_ULL, _links(lambda device: device.gpu.nvlink_rx_kib)),
    pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: (_UINT, lambda device: device.gpu.pcie_replays),
    pynvml.NVML_FI_DEV_REMAPPED_COR: (_UINT, _remapper(lambda device: device.gpu.remapped_corrected)),
    pynvml.NVML_FI_DEV_REMAPPED_UNC: (_UINT, _remapper(lambda device: device.gpu.remapped_uncorrected)),
    pynvml.NVML_FI_DEV_REMAPPED_PENDING: (_UINT, _remapper(lambda device: device.gpu.remap_pending)),
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE: (_UINT, _remapper(lambda device: device.gpu.remap_failed)),
    pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED: (
        _UINT, lambda device: int(device.model.mig_table is not None and device.model.architecture >= HOPPER),
    ),
    pynvml.NVML_FI_DEV_POWER_AVERAGE: (_UINT, lambda device: device.gpu.power_mw),
    pynvml.NVML_FI_DEV_POWER_INSTANT: (_UINT, lambda device: device.gpu.power_mw),
    pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT: (_UINT, lambda device: device.model.power_limit_mw),
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: (_UINT, lambda device: device.gpu.recovery_action),
}  # fmt: skip

# The recovery action came with the 570 branch.
_SINCE = {pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: 570}


@nvml()
def nvmlDeviceGetFieldValues(lib: SimulatedNvml, device: Device, count: Any, values: Any) -> None:
    """Read fields; one that the GPU does not have says so in its own status."""
    elements = target(values)
    branch = int(lib.version.split(".", 1)[0])
    now = time.time_ns() // 1000
    for position in range(number(count)):
        element = elements[position]
        element.timestamp = now
        try:
            kind, read = _FIELDS[element.fieldId]
            if branch < _SINCE.get(element.fieldId, 0):
                raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            value = read(device)
        except KeyError:
            known = 0 < element.fieldId < pynvml.NVML_FI_MAX
            element.nvmlReturn = (
                pynvml.NVML_ERROR_NOT_SUPPORTED if known else pynvml.NVML_ERROR_INVALID_ARGUMENT
            )
        except Status as status:
            element.nvmlReturn = status.code
        else:
            element.valueType = kind
            element.nvmlReturn = pynvml.NVML_SUCCESS
            setattr(element.value, _MEMBER[kind], value)
            # `value` is a union inside the element: the attribute is a view, so this stores in place.
