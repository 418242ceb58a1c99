"""What a reading of a GPU says is wrong with it. Pure.

Each finding stands for the moment; whether it becomes a condition, and when that is cleared, is the book's.
"""

from __future__ import annotations

from collections.abc import Iterator

from dra.health.model import Finding, Reading
from dra.health.policy import (
    ECC,
    FABRIC,
    LOST,
    NO_ACTION,
    PCIE,
    RESET_REMEDY,
    ROW_REMAP,
    THERMAL,
    Grade,
)

# The value of the taint of a GPU that does not come back from a call; it may by itself.
HUNG = "hung"
# The driver's codes that mean that the GPU itself is gone or must be reset. Others (a driver that is being replaced,
# a session that was let go of) say nothing about one GPU.
_GONE = {
    "DRA-NVML-GPU-LOST": "",
    "DRA-GPU-GONE": "gone",
    "DRA-NVML-HUNG": HUNG,
    "DRA-NVML-RESET-REQUIRED": "reset-required",
    "DRA-NVML-IRQ-ISSUE": "irq-issue",
    "DRA-NVML-CORRUPTED-INFOROM": "corrupted-inforom",
    "DRA-NVML-INSUFFICIENT-POWER": "insufficient-power",
}
# Degrees below the limit at which a hot GPU counts as cool again.
COOL_MARGIN = 5

# NVML_GPU_FABRIC_STATE_*, NVML_GPU_FABRIC_HEALTH_SUMMARY_*.
_NOT_STARTED, _IN_PROGRESS, _COMPLETED = 1, 2, 3
_UNHEALTHY, _LIMITED = 2, 3


def speaks_of_gpu(error: str) -> bool:
    """Whether a code with which a GPU did not answer is about this GPU, and not about the driver as a whole."""
    return error in _GONE


def findings(reading: Reading, *, hot: bool = False) -> Iterator[Finding]:
    """Give what is wrong, at most one finding for each key.

    Args:
        reading: what a check read.
        hot: the GPU is held to be too hot already, so that it has to become cooler by some degrees.
    """
    if reading.error:
        if speaks_of_gpu(reading.error):
            yield Finding(LOST, Grade.LOST, _GONE[reading.error], reading.message, RESET_REMEDY)
        return
    yield from _memory(reading)
    yield from _thermal(reading, hot=hot)
    yield from _pcie(reading)
    yield from _fabric(reading)


def _memory(reading: Reading) -> Iterator[Finding]:
    count = reading.ecc_uncorrected or 0
    if count:
        # With a driver that tells what to do, the errors alone are nothing to do: they stay in the count until a reset.
        settled = reading.recovery_action == NO_ACTION
        yield Finding(
            ECC,
            Grade.NOTE if settled else Grade.ILL,
            "uncorrected",
            f"{count} uncorrected memory errors since the driver was loaded",
            "" if settled else RESET_REMEDY,
        )
    if reading.remap_failed:
        yield Finding(
            ROW_REMAP, Grade.ILL, "failed", "a bad memory row could not be remapped",
            "Reset the GPU; if it stays, have the board replaced.",
        )  # fmt: skip
    elif reading.remap_pending:
        yield Finding(
            ROW_REMAP, Grade.ILL, "pending", "a bad memory row is remapped at the next reset", RESET_REMEDY
        )
    elif reading.retire_pending:
        yield Finding(
            ROW_REMAP, Grade.ILL, "pending", "a bad memory page is retired at the next reset", RESET_REMEDY
        )


def _thermal(reading: Reading, *, hot: bool) -> Iterator[Finding]:
    limit, now = reading.slowdown_temperature, reading.temperature
    over = limit is not None and now is not None and now >= limit - (COOL_MARGIN if hot else 0)
    if not over and not reading.hardware_slowdown:
        return
    degrees = f"{now} °C" if now is not None else "too hot"
    at = f", the limit is {limit} °C" if limit is not None else ""
    yield Finding(
        THERMAL, Grade.ILL, "slowdown", f"the GPU is slowed down by its temperature ({degrees}{at})",
        "Check the node's cooling.",
    )  # fmt: skip


def _pcie(reading: Reading) -> Iterator[Finding]:
    width, most = reading.pcie_width, reading.pcie_width_max
    # The generation falls while a GPU is idle; lanes do not come and go.
    if width and most and width < most:
        yield Finding(
            PCIE, Grade.NOTE, f"x{width}", f"the PCIe link has {width} of {most} lanes",
            "Check the seating of the board and its riser.",
        )  # fmt: skip


def _fabric(reading: Reading) -> Iterator[Finding]:
    manager = "Check nvidia-fabricmanager on the node (or the fabric's subnet manager) and its log."
    if reading.fabric_state == _NOT_STARTED:
        yield Finding(
            FABRIC,
            Grade.ILL,
            "not-started",
            "the GPU has not joined the NVLink fabric: no program can use it yet",
            manager,
        )
    elif reading.fabric_state == _IN_PROGRESS:
        yield Finding(FABRIC, Grade.ILL, "in-progress", "the GPU is still joining the NVLink fabric", manager)
    elif reading.fabric_state == _COMPLETED and reading.fabric_status:
        yield Finding(
            FABRIC, Grade.ILL, "failed",
            f"the GPU could not join the NVLink fabric (status {reading.fabric_status})", manager,
        )  # fmt: skip
    elif reading.fabric_health == _UNHEALTHY:
        yield Finding(FABRIC, Grade.ILL, "unhealthy", "the GPU's NVLink fabric is unhealthy", manager)
    elif reading.fabric_health == _LIMITED:
        yield Finding(
            FABRIC, Grade.NOTE, "limited", "the GPU's NVLink fabric works with limited capacity", manager
        )
