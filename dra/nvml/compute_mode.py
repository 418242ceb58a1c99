"""The compute mode of a GPU: who may have a context on it."""

from __future__ import annotations

import pynvml

from dra.nvml.api import NvmlApi
from dra.nvml.session import NvmlSession
from dra.values import PciAddress

# By the name nvidia-smi takes. Source: nvmlComputeMode_t.
_NUMBERS = {
    "DEFAULT": pynvml.NVML_COMPUTEMODE_DEFAULT,
    "PROHIBITED": pynvml.NVML_COMPUTEMODE_PROHIBITED,
    "EXCLUSIVE_PROCESS": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_CALL_SECONDS = 20.0


def get_compute_mode(session: NvmlSession, address: PciAddress) -> str:
    """Give the mode by name; `DEFAULT` for one that no longer exists (exclusive thread).

    Raises:
        DeviceError, StackError: DRA-NVML-…
    """
    subject = str(address)

    def ask(api: NvmlApi) -> str:
        number = api.call("nvmlDeviceGetComputeMode", api.handle(address), subject=subject)
        return _NAMES.get(int(number), "DEFAULT")

    return session.run(ask, subject=subject, deadline_seconds=_CALL_SECONDS)


def set_compute_mode(session: NvmlSession, address: PciAddress, mode: str) -> None:
    """Set the mode by name.

    Raises:
        DeviceError, StackError: DRA-NVML-…
        KeyError: no such mode.
    """
    subject, number = str(address), _NUMBERS[mode]

    def change(api: NvmlApi) -> None:
        api.call("nvmlDeviceSetComputeMode", api.handle(address), number, subject=subject)

    session.run(change, subject=subject, deadline_seconds=_CALL_SECONDS)
