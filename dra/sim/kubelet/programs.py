"""What the program of a simulated container does: whether it ends, with which code, and what it prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dra.sim.runtime import ContainerView

_LASTING = re.compile(r"\b(sleep|wait|tail -f|while|serve|pause)\b")

# 128 + SIGTERM.
_TERMINATED = 143


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """A program that has ended, or that goes on (`exit_code` None), and its output so far."""

    exit_code: int | None
    output: str = ""


Program = Callable[[Mapping[str, Any], ContainerView], ProgramEnd]


def run_program(container: Mapping[str, Any], view: ContainerView) -> ProgramEnd:
    """Play a container's command.

    Without a command the image's own is taken to be a server. `nvidia-smi` in the command prints the GPUs that
    the container can open and fails as the real one does without its library or a device.
    """
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    text = " ".join(str(word) for word in words)
    code, output = _nvidia_smi(view) if "nvidia-smi" in text else (0, "")
    lasts = not words or _LASTING.search(text) is not None
    return ProgramEnd(None if lasts and code == 0 else code, output)


def code_when_stopped(container: Mapping[str, Any]) -> int:
    """Give the exit code of a program that is asked to stop: 0 if its shell traps the signal, else the signal's."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    return 0 if any("trap " in str(word) for word in words) else _TERMINATED


def _nvidia_smi(view: ContainerView) -> tuple[int, str]:
    if "nvidia-smi" not in view.binaries:
        return 127, "nvidia-smi: command not found\n"
    if "libnvidia-ml.so.1" not in view.libraries:
        return 12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n"
    if not view.gpus:
        return 6, "No devices were found\n"
    return 0, "".join(f"GPU {index}: /dev/nvidia{minor}\n" for index, minor in enumerate(view.gpus))
