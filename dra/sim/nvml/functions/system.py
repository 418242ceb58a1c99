"""Library, driver and look-ups of devices."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from dra.sim.nvml.memory import Status, number, put, put_handle, put_text, target
from dra.sim.nvml.registry import Subject, also_as, nvml

if TYPE_CHECKING:
    from dra.sim.nvml.library import SimulatedNvml

# The texts of the C library; pynvml has its own for most.
_ERROR_TEXTS = {
    pynvml.NVML_SUCCESS: "Success",
    pynvml.NVML_ERROR_UNINITIALIZED: "Uninitialized",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "Not Supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "Insufficient Permissions",
    pynvml.NVML_ERROR_NOT_FOUND: "Not Found",
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: "Insufficient Size",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
    pynvml.NVML_ERROR_TIMEOUT: "Timeout",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "Function Not Found",
    pynvml.NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "GPU requires reset",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "Driver/library version mismatch",
    pynvml.NVML_ERROR_IN_USE: "In use by another client",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "Insufficient Resources",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "Argument version mismatch",
    pynvml.NVML_ERROR_UNKNOWN: "Unknown Error",
}


@nvml(Subject.NONE, initialised=False)
def nvmlInitWithFlags(lib: SimulatedNvml, _: None, flags: Any) -> int | None:
    """Open a session. Without NO_GPUS a node without any GPU refuses; with which status is not confirmed."""
    lib.initialise()
    if not lib.enumerated and not number(flags) & pynvml.NVML_INIT_FLAG_NO_GPUS:
        lib.finish()
        return int(pynvml.NVML_ERROR_NOT_FOUND)
    return None


@nvml(Subject.NONE, initialised=False)
def nvmlInit_v2(lib: SimulatedNvml, _: None) -> int | None:
    """Open a session."""
    return nvmlInitWithFlags(lib, None, 0)


@nvml(Subject.NONE, driver=False)
def nvmlShutdown(lib: SimulatedNvml, _: None) -> None:
    """Close a session."""
    lib.finish()


@nvml(Subject.NONE, initialised=False, driver=False)
def nvmlErrorString(lib: SimulatedNvml, _: None, code: Any) -> bytes:
    """Give the text of a status; the only function that does not return one."""
    return _ERROR_TEXTS.get(number(code), f"NVML Error {number(code)}").encode()


@nvml(Subject.NONE, initialised=False, driver=False)
def nvmlSystemGetNVMLVersion(lib: SimulatedNvml, _: None, buffer: Any, length: Any) -> None:
    """Give the library's own version, which needs no driver."""
    put_text(buffer, length, f"{lib.machine.cuda_version // 1000}.{lib.version}")


@nvml(Subject.NONE)
def nvmlSystemGetDriverVersion(lib: SimulatedNvml, _: None, buffer: Any, length: Any) -> None:
    """Give the kernel module's version."""
    put_text(buffer, length, lib.store.read().module_version)


@also_as("nvmlSystemGetCudaDriverVersion_v2")
@nvml(Subject.NONE)
def nvmlSystemGetCudaDriverVersion(lib: SimulatedNvml, _: None, version: Any) -> None:
    """Give the CUDA version of libcuda, 13000 for 13.0."""
    from dra.sim.profiles import cuda_version_of

    put(version, cuda_version_of(lib.version))


@nvml(Subject.NONE, since=570)
def nvmlSystemGetDriverBranch(lib: SimulatedNvml, _: None, info: Any, length: Any) -> None:
    """Give the driver branch, `r580_00`."""
    branch = int(lib.version.split(".", 1)[0])
    target(info).branch = f"r{branch // 5 * 5}_00".encode()


@nvml(Subject.NONE)
def nvmlSystemGetProcessName(lib: SimulatedNvml, _: None, pid: Any, buffer: Any, length: Any) -> None:
    """Give the name of a process that uses a GPU, or that of a real process of this machine."""
    wanted = number(pid)
    for gpu in lib.store.read().gpus:
        for process in gpu.processes:
            if process.pid == wanted:
                return put_text(buffer, length, process.name)
    try:
        command = Path(f"/proc/{wanted}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        raise Status(pynvml.NVML_ERROR_NOT_FOUND) from None
    return put_text(buffer, length, command)


@nvml(Subject.NONE)
def nvmlDeviceGetCount_v2(lib: SimulatedNvml, _: None, count: Any) -> None:
    """Give how many GPUs there were at initialisation."""
    put(count, len(lib.enumerated))


@nvml(Subject.INDEX)
def nvmlDeviceGetHandleByIndex_v2(lib: SimulatedNvml, index: int, handle: Any) -> None:
    """Give a GPU by its position on the bus."""
    if not 0 <= index < len(lib.enumerated):
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    put_handle(handle, lib.attach(lib.enumerated[index]))


@nvml(Subject.PCI)
def nvmlDeviceGetHandleByPciBusId_v2(lib: SimulatedNvml, address: str, handle: Any) -> None:
    """Give a GPU by its address; wakes no other."""
    slot = lib._find_slot(Subject.PCI, address)
    if slot is None:
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)
    put_handle(handle, lib.attach(slot.uuid))


@nvml(Subject.SERIAL)
def nvmlDeviceGetHandleBySerial(lib: SimulatedNvml, serial: str, handle: Any) -> None:
    """Give a GPU by its board's serial number."""
    slot = lib._find_slot(Subject.SERIAL, serial)
    if slot is None:
        raise Status(pynvml.NVML_ERROR_NOT_FOUND)
    put_handle(handle, lib.attach(slot.uuid))


@nvml(Subject.UUID)
def nvmlDeviceGetHandleByUUID(lib: SimulatedNvml, wanted: str, handle: Any) -> None:
    """Give a GPU or a MIG device by UUID. Asks the GPUs one after the other, so it wakes those before it."""
    from dra.sim.nvml.library import mig_uuid

    for candidate in lib.enumerated:
        try:
            address = lib.attach(candidate)
        except Status:
            if candidate == wanted:
                raise
            continue
        if candidate == wanted:
            return put_handle(handle, address)
        gpu = lib.store.read().gpu(candidate)
        for instance in gpu.instances if gpu else ():
            for compute in instance.computes:
                if mig_uuid(candidate, instance.gi, compute.ci) == wanted:
                    return put_handle(handle, lib.handle("mig", candidate, instance.serial, compute.serial))
    raise Status(pynvml.NVML_ERROR_NOT_FOUND)


@nvml(Subject.NONE, since=570)
def nvmlDeviceGetHandleByUUIDV(lib: SimulatedNvml, _: None, wanted: Any, handle: Any) -> None:
    """Give a GPU by UUID as text or as 16 bytes."""
    import uuid

    union = target(wanted)
    if union.type == pynvml.NVML_UUID_TYPE_BINARY:
        data = bytes(union.value.bytes[: pynvml.NVML_DEVICE_UUID_BINARY_LEN])
        text = f"GPU-{uuid.UUID(bytes=data)}"
    else:
        text = ctypes.string_at(ctypes.addressof(union.value)).decode()
    nvmlDeviceGetHandleByUUID(lib, text, handle)
