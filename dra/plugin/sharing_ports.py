"""The hardware's side of sharing on this machine: compute modes through NVML, time-slices through nvidia-smi."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from dra.errors import DeviceError, StackError
from dra.host.paths import HostPaths
from dra.host.programs import ProgramEnd, find_program
from dra.inventory.model import Inventory
from dra.nvml.compute_mode import get_compute_mode, set_compute_mode
from dra.nvml.session import NvmlSession
from dra.prepare.sharing.compute_mode import ComputeModeName
from dra.prepare.sharing.time_slice import GONE, INTERVALS, UNSUPPORTED
from dra.values import PciAddress

# nvidia-smi takes a second or two on a machine with eight GPUs that sleep.
SMI_SECONDS = 15.0

# Source: nvidia-smi(1), return value. 6: no such GPU; 9: driver not loaded; 12: no NVML; 15: the GPU fell off the bus.
_NOT_SUPPORTED = frozenset({3, 13})
_GONE = frozenset({6, 9, 12, 15})


class ComputeModePort:
    """Compute modes. Thread-safe."""

    def __init__(self, session: NvmlSession, inventory: Callable[[], Inventory]) -> None:
        self._session, self._inventory = session, inventory

    def get(self, gpu_uuid: str) -> ComputeModeName:
        """Give the mode of a GPU. Raises DraError."""
        return cast("ComputeModeName", get_compute_mode(self._session, self._address(gpu_uuid)))

    def set(self, gpu_uuid: str, mode: ComputeModeName) -> None:
        """Set it. Raises DraError."""
        set_compute_mode(self._session, self._address(gpu_uuid), mode)

    def _address(self, gpu_uuid: str) -> PciAddress:
        for gpu in self._inventory().gpus:
            if gpu.uuid == gpu_uuid:
                return gpu.pci_address
        raise DeviceError(
            "DRA-DEVICE-UNKNOWN",
            f"GPU {gpu_uuid} is not on this node any more",
            remedy="The call is retried by itself.",
            retryable=True,
            gpu=gpu_uuid,
        )


class SmiTimeSlices:
    """Time-slices, set by the driver's nvidia-smi. Thread-safe."""

    def __init__(self, paths: HostPaths, *, seconds: float = SMI_SECONDS) -> None:
        self._paths, self._seconds = paths, seconds

    def set(self, gpu_uuid: str, interval: int) -> None:
        """Set the time-slice of a GPU.

        Raises:
            DeviceError: DRA-TIME-SLICE-UNSUPPORTED; DRA-TIME-SLICE-FAILED: retryable.
            StackError: DRA-TIME-SLICE-GONE: no such GPU, no driver; DRA-TIME-SLICE-PROGRAM: no nvidia-smi.
        """
        program = find_program(self._paths, "nvidia-smi")
        if program is None:
            raise StackError(
                "DRA-TIME-SLICE-PROGRAM",
                f"the time-slice of GPU {gpu_uuid} cannot be set: there is no nvidia-smi under {self._paths.driver_root}",
                remedy="Install the NVIDIA driver's programs, or set --nvidia-driver-root to where they are.",
                gpu=gpu_uuid,
            )
        end = program.run(
            "compute-policy", "-i", gpu_uuid, "--set-timeslice", str(interval), seconds=self._seconds
        )
        if end.status != 0 or _says_unsupported(end):
            raise _error(end, gpu_uuid, INTERVALS[interval])


def _says_unsupported(end: ProgramEnd) -> bool:
    return "not supported" in end.output.lower()


def _error(end: ProgramEnd, gpu_uuid: str, interval: str) -> DeviceError | StackError:
    said = end.words or f"it ended with status {end.status}"
    if not end.timed_out and (end.status in _NOT_SUPPORTED or _says_unsupported(end)):
        return DeviceError(
            UNSUPPORTED,
            f"GPU {gpu_uuid} has no time-slice that could be set to {interval} (nvidia-smi: {said})",
            remedy="Remove timeSlicingConfig, or select other GPUs: time-slices exist from Volta on.",
            gpu=gpu_uuid,
        )
    if end.status in _GONE:
        return StackError(
            GONE,
            f"the time-slice of GPU {gpu_uuid} cannot be set: no GPU or no driver answers (nvidia-smi: {said})",
            remedy="The call is retried by itself.",
            gpu=gpu_uuid,
        )
    return DeviceError(
        "DRA-TIME-SLICE-FAILED",
        f"the time-slice of GPU {gpu_uuid} could not be set to {interval} (nvidia-smi: {said})",
        remedy="Look for 'NVRM' in the kernel log (dmesg); try nvidia-smi compute-policy on the node by hand. The call "
        "is retried by itself.",
        retryable=True,
        gpu=gpu_uuid,
    )
