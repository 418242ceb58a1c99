"""What an XID or a reading means for new pods: nothing, keep away, or evict. Pure.

NVML's recovery action decides where the driver has one (570 and later); the list of XIDs is for older drivers. A
condition has a *grade*: a note is worth knowing and keeps nobody away, an illness does, and a loss is an illness that
no pod survives.

Source: NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors); NVML_GPU_RECOVERY_ACTION_*; the skip list of NVIDIA's
device plugin and DRA driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from dra.api.gpu_settings import HealthSettings
from dra.errors import ConfigError

Effect = Literal["NoSchedule", "NoExecute", "None"]

# Keys of taints, without the domain `gpu.nvidia.com/`. The first three are NVIDIA's.
XID, LOST, UNMONITORED = "xid", "gpu-lost", "unmonitored"
ECC, ROW_REMAP, THERMAL, PCIE, FABRIC = "ecc", "row-remap", "thermal", "pcie", "fabric"
KEYS = (XID, LOST, UNMONITORED, ECC, ROW_REMAP, THERMAL, PCIE, FABRIC)


class Grade(IntEnum):
    """How bad it is; higher is worse."""

    NOTE = 1
    ILL = 2
    LOST = 3


# A program's own fault: memory access, assertion, preemption, its end. NVIDIA's skip list.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
# Reports about something that has an entry of its own here, or that concerns no later program.
# 63 and 94: a row was remapped, an error was contained (what is left to do shows in the remapper's state and in the
# recovery action); 92: many corrected errors; 154: the recovery action changed, which is read.
REPORT_XIDS = frozenset({63, 92, 94, 154})
# The GPU does not answer any more.
LOST_XIDS = frozenset({79})

# Names that users meet for XIDs that are seen often.
XID_TEXTS: Mapping[int, str] = {
    13: "graphics engine exception (usually the program's fault)",
    31: "memory access fault (usually the program's fault)",
    32: "corrupted push buffer",
    38: "driver firmware error",
    43: "the program's work was stopped (usually the program's fault)",
    45: "preempted clean-up of a program that ended",
    48: "double bit ECC error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
    121: "chip-to-chip link error",
    140: "unrecovered ECC error",
    143: "GPU initialisation error",
    154: "the recovery action changed",
}

# NVML_GPU_RECOVERY_ACTION_*: (word for the taint, what to do).
NO_ACTION = 0
ACTIONS: Mapping[int, tuple[str, str]] = {
    1: ("gpu-reset", "Stop the GPU's users, then reset it (nvidia-smi --gpu-reset)."),
    2: ("node-reboot", "Drain the node and reboot it."),
    3: ("drain-p2p", "Stop the programs that exchange data with this GPU over NVLink."),
    4: ("drain-and-reset", "Let the GPU's users end, then reset it (nvidia-smi --gpu-reset)."),
    5: ("recover-imex-domain", "Restart the IMEX domain's programs."),
    6: ("bus-reset", "Drain the node and reset the GPU's bus, or power-cycle it."),
    7: ("system-reboot", "Drain the node and power-cycle it."),
}
RESET_REMEDY = "Stop the GPU's users, then reset it (nvidia-smi --gpu-reset) or reboot the node."

_DEFAULT_EFFECTS: Mapping[str, Effect] = {
    XID: "NoSchedule", LOST: "NoSchedule", UNMONITORED: "None", ECC: "NoSchedule", ROW_REMAP: "NoSchedule",
    THERMAL: "NoSchedule", PCIE: "None", FABRIC: "NoSchedule",
}  # fmt: skip
_EFFECTS: tuple[Effect, ...] = ("NoSchedule", "NoExecute", "None")


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """What the administrator wants to differ from the defaults.

    Args:
        ignored_xids: XIDs that are never more than a note, beside NVIDIA's skip list.
        effects: by key, the effect of an illness; a note has the effect None whatever this says.
        of_gpu: what a GpuNodePolicy says of a GPU, by its UUID.
    """

    ignored_xids: frozenset[int] = frozenset()
    effects: Mapping[str, Effect] = field(default_factory=dict)
    of_gpu: Callable[[str], HealthSettings] = lambda _uuid: HealthSettings()

    def effect(self, key: str, grade: Grade, *, gpu: str = "", value: str = "") -> Effect:
        """Give the effect of the taint; `value` is the number of the XID where it is one."""
        if grade is Grade.NOTE:
            return "None"
        rule = self.of_gpu(gpu).xids.get(int(value)) if key == XID and value.isdecimal() else None
        if rule is not None and rule != "Ignore":
            return rule
        return self.effects.get(key, _DEFAULT_EFFECTS.get(key, "NoSchedule"))

    def ignores(self, xid: int, gpu: str) -> bool:
        """Whether an XID is never more than a note on a GPU."""
        rule = self.of_gpu(gpu).xids.get(xid)
        return xid in self.ignored_xids if rule is None else rule in ("Ignore", "None")

    def insists(self, xid: int, gpu: str) -> bool:
        """Whether a GpuNodePolicy makes an XID an illness of a GPU, whatever NVML asks for."""
        return self.of_gpu(gpu).xids.get(xid) in ("NoSchedule", "NoExecute")

    def grade_xid(self, xid: int, *, action: int | None, gpu: str = "") -> Grade:
        """Say how bad an XID is. A rule of a GpuNodePolicy decides before NVML's recovery action.

        Args:
            xid: its number.
            gpu: UUID of the GPU.
            action: NVML's recovery action as read after it; None where the driver has none or does not answer.
        """
        if self.ignores(xid, gpu):
            return Grade.NOTE
        if self.insists(xid, gpu):
            return Grade.LOST if xid in LOST_XIDS else Grade.ILL
        if action is not None:
            return Grade.NOTE if action == NO_ACTION else Grade.ILL
        if xid in APPLICATION_XIDS or xid in REPORT_XIDS:
            return Grade.NOTE
        return Grade.LOST if xid in LOST_XIDS else Grade.ILL


def describe_xid(xid: int) -> str:
    """Give `XID 79 (the GPU has fallen off the bus)`."""
    text = XID_TEXTS.get(xid)
    return f"XID {xid} ({text})" if text else f"XID {xid}"


def action_word(action: int) -> str:
    """Give a recovery action as it stands in a taint's value."""
    return ACTIONS.get(action, (f"recovery-action-{action}", ""))[0]


def action_remedy(action: int) -> str:
    """Give what to do about a recovery action."""
    return ACTIONS.get(action, ("", RESET_REMEDY))[1]


def parse_effects(text: str) -> dict[str, Effect]:
    """Read `--health-effects`: `gpu-lost=NoExecute,thermal=None`.

    Raises:
        ConfigError: DRA-FLAG-HEALTH-EFFECTS: an unknown key or effect.
    """
    found: dict[str, Effect] = {}
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        key, equals, value = entry.partition("=")
        key = key.strip().removeprefix("gpu.nvidia.com/")
        effect = next((each for each in _EFFECTS if each.lower() == value.strip().lower()), None)
        if not equals or key not in KEYS or effect is None:
            raise ConfigError(
                "DRA-FLAG-HEALTH-EFFECTS",
                f"{entry[:100]!r} in --health-effects is not KEY=EFFECT",
                remedy=f"Keys are {', '.join(KEYS)}; effects {', '.join(_EFFECTS)}.",
            )
        found[key] = effect
    return found
