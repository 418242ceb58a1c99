"""What NVML's return codes mean to a user: code, reason, remedy.

Two kinds: a `StackError` says that the node's driver stack does not answer, a `DeviceError` that one GPU (or a
call about one GPU) does not. The number NVML gave stays in the error's field `nvml`.

Source: nvmlReturn_t.
"""

from __future__ import annotations

from dataclasses import dataclass

import pynvml

from dra.errors import DeviceError, DraError, StackError


@dataclass(frozen=True, slots=True)
class Meaning:
    """One return code. `stack` codes speak about the driver as a whole whatever was asked."""

    code: str
    reason: str
    remedy: str
    stack: bool = False
    retryable: bool = False


SESSION_LOST = "DRA-NVML-SESSION-LOST"
DRIVER_NOT_LOADED = "DRA-NVML-DRIVER-NOT-LOADED"
LIBRARY_NOT_FOUND = "DRA-NVML-LIBRARY-NOT-FOUND"
VERSION_MISMATCH = "DRA-NVML-VERSION-MISMATCH"
GPU_LOST = "DRA-NVML-GPU-LOST"
NOT_SUPPORTED = "DRA-NVML-NOT-SUPPORTED"
NOT_FOUND = "DRA-NVML-NOT-FOUND"
FUNCTION_NOT_FOUND = "DRA-NVML-FUNCTION-NOT-FOUND"
INVALID_ARGUMENT = "DRA-NVML-INVALID-ARGUMENT"
HUNG = "DRA-NVML-HUNG"
RELEASED = "DRA-NVML-RELEASED"
BUSY = "DRA-NVML-BUSY"
IN_USE = "DRA-NVML-IN-USE"
INSUFFICIENT_RESOURCES = "DRA-NVML-INSUFFICIENT-RESOURCES"

# The subject of calls that are not about one GPU.
SYSTEM = "nvml"

# After these the session is worth nothing: close it and open another.
SESSION_ENDED = frozenset({SESSION_LOST, DRIVER_NOT_LOADED, VERSION_MISMATCH})

_RELOAD = (
    "Reboot the node, or drain it and reload the kernel modules (rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; "
    "modprobe nvidia). With the GPU operator: wait until its driver pod is ready."
)
_LOG = "Look for 'NVRM' in the kernel log (dmesg)."

MEANINGS: dict[int, Meaning] = {
    pynvml.NVML_ERROR_UNINITIALIZED: Meaning(
        "DRA-NVML-SESSION-LOST",
        "the NVML session is no longer initialised",
        "It is opened again at the next call.",
        stack=True,
        retryable=True,
    ),
    pynvml.NVML_ERROR_INVALID_ARGUMENT: Meaning(
        "DRA-NVML-INVALID-ARGUMENT",
        "NVML does not accept the argument; the GPU may be gone",
        "Rescan the node.",
    ),
    pynvml.NVML_ERROR_NOT_SUPPORTED: Meaning(
        "DRA-NVML-NOT-SUPPORTED", "this GPU or driver does not support it", "Nothing can be done on this GPU."
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: Meaning(
        "DRA-NVML-NO-PERMISSION",
        "this process may not do that",
        "Run the plugin as root and privileged, with access to the NVIDIA device nodes; see whether a security module "
        "or a device cgroup denies them.",
    ),
    pynvml.NVML_ERROR_NOT_FOUND: Meaning("DRA-NVML-NOT-FOUND", "there is no such object", "Rescan the node."),
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: Meaning(
        "DRA-NVML-INSUFFICIENT-SIZE", "NVML wanted a larger buffer", "Upgrade this driver; report it."
    ),
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: Meaning(
        "DRA-NVML-INSUFFICIENT-POWER",
        "the GPU's external power cables are not attached",
        "Attach the GPU's power cables.",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Meaning(
        "DRA-NVML-DRIVER-NOT-LOADED",
        "the NVIDIA kernel module is not loaded",
        "Load it (modprobe nvidia), or wait for the GPU operator's driver pod; a kernel update may need the module "
        "rebuilt (dkms status).",
        stack=True,
        retryable=True,
    ),
    pynvml.NVML_ERROR_TIMEOUT: Meaning(
        "DRA-NVML-TIMEOUT", "the driver gave up waiting", _LOG, retryable=True
    ),
    pynvml.NVML_ERROR_IRQ_ISSUE: Meaning(
        "DRA-NVML-IRQ-ISSUE", "the kernel has a problem with the GPU's interrupt", f"{_LOG} Reboot the node."
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Meaning(
        "DRA-NVML-LIBRARY-NOT-FOUND",
        "NVML or a library it needs was not found",
        "Install the NVIDIA driver's libraries, or set --nvidia-driver-root to where they are.",
        stack=True,
        retryable=True,
    ),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Meaning(
        "DRA-NVML-FUNCTION-NOT-FOUND",
        "the installed driver is too old to have this function",
        "Upgrade the NVIDIA driver.",
    ),
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: Meaning(
        "DRA-NVML-CORRUPTED-INFOROM",
        "the GPU's infoROM is corrupted",
        "Reset the GPU; if it stays, have it replaced.",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: Meaning(
        "DRA-NVML-GPU-LOST",
        "the GPU has fallen off the bus",
        f"{_LOG} Reset the GPU (nvidia-smi --gpu-reset) or reboot the node; if it comes back, check power, cooling "
        "and seating.",
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: Meaning(
        "DRA-NVML-RESET-REQUIRED",
        "the GPU must be reset before it can be used",
        "Stop its users, then nvidia-smi --gpu-reset.",
    ),
    pynvml.NVML_ERROR_OPERATING_SYSTEM: Meaning(
        "DRA-NVML-OPERATING-SYSTEM",
        "the operating system has blocked the request",
        "See whether a device cgroup or a security module denies the NVIDIA device nodes.",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Meaning(
        "DRA-NVML-VERSION-MISMATCH",
        "the driver's libraries and the loaded kernel module have different versions",
        _RELOAD,
        stack=True,
        retryable=True,
    ),
    pynvml.NVML_ERROR_IN_USE: Meaning(
        "DRA-NVML-IN-USE",
        "another process uses it",
        "Stop the process that uses it (nvidia-smi shows which).",
        retryable=True,
    ),
    pynvml.NVML_ERROR_MEMORY: Meaning(
        "DRA-NVML-MEMORY", "not enough memory", "Free memory on the node.", retryable=True
    ),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: Meaning(
        "DRA-NVML-INSUFFICIENT-RESOURCES",
        "what it needs on the GPU is taken",
        "Remove the MIG instance that holds it (nvidia-smi mig -lgi).",
        retryable=True,
    ),
    pynvml.NVML_ERROR_UNKNOWN: Meaning(
        "DRA-NVML-UNKNOWN",
        "the driver reports an internal error",
        f"{_LOG} If the device nodes were just re-created or the container's device rules reloaded (systemctl "
        "daemon-reload), restart the pod.",
    ),
}
# Newer modules know more codes; the oldest supported one (12.575) may not.
_NEWER = {
    "NVML_ERROR_NO_DATA": Meaning("DRA-NVML-NO-DATA", "there is no data", "Try again later.", retryable=True),
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": Meaning(
        "DRA-NVML-ARGUMENT-VERSION",
        "the installed driver does not know this version of the call",
        "Upgrade the NVIDIA driver.",
    ),
    "NVML_ERROR_NOT_READY": Meaning(
        "DRA-NVML-NOT-READY", "the GPU is not ready yet", "Try again later.", retryable=True
    ),
    "NVML_ERROR_GPU_NOT_FOUND": Meaning(
        "DRA-NVML-GPU-NOT-FOUND", "no such GPU is attached", "Rescan the node."
    ),
    "NVML_ERROR_INVALID_STATE": Meaning(
        "DRA-NVML-INVALID-STATE", "the GPU's state does not allow it", _LOG, retryable=True
    ),
}
MEANINGS.update({getattr(pynvml, name): meaning for name, meaning in _NEWER.items() if hasattr(pynvml, name)})


def translate(error: pynvml.NVMLError, *, doing: str, subject: str = "") -> DraError:
    """Give the error a user reads for NVML's.

    Args:
        error: what pynvml raised.
        doing: the NVML function, or what was wanted.
        subject: the GPU it was about (PCI address or UUID); empty for the library as a whole.
    """
    number = int(error.value)
    meaning = MEANINGS.get(number) or Meaning(
        "DRA-NVML-OTHER-CODE", f"NVML answered with code {number}", _LOG
    )
    whose = f"GPU {subject}" if subject else "NVML"
    kind: type[DraError] = StackError if meaning.stack or not subject else DeviceError
    return kind(
        meaning.code,
        f"{whose}: {meaning.reason} ({doing})",
        remedy=meaning.remedy,
        retryable=meaning.retryable,
        nvml=number,
        **({"gpu": subject} if subject else {}),
    )


def hung(subject: str, *, seconds: float) -> DraError:
    """Give the error for a call that does not come back from the driver."""
    whose = "NVML" if subject == SYSTEM else f"GPU {subject}"
    kind: type[DraError] = StackError if subject == SYSTEM else DeviceError
    return kind(
        HUNG,
        f"{whose}: a call into the driver has not returned for {seconds:.0f} s",
        remedy=f"{_LOG} If it does not recover by itself, drain and reboot the node.",
        retryable=True,
        gpu=subject,
    )
