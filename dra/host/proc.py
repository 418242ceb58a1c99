"""What /proc says about the NVIDIA kernel modules: device majors, the loaded driver's version, MIG capability nodes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

from dra.errors import HostError
from dra.host.paths import HostPaths

# The majors of everything but nvidia and drm are handed out at module load and change when it is loaded again.
FRONTEND_NAMES = ("nvidia", "nvidia-frontend", "nvidiactl")
_VERSION = re.compile(r"(?:Kernel Module(?:\s+for\s+\S+)?)\s+(\d+(?:\.\d+)+)", re.ASCII)


def device_majors(paths: HostPaths) -> Mapping[str, int]:
    """Give the character-device majors of this moment by driver name, from /proc/devices.

    Several names may share a major. Never keep the answer: a module reload changes it.

    Raises:
        HostError: DRA-HOST-PROC-DEVICES.

    Source: proc(5).
    """
    path = paths.proc / "devices"
    try:
        # Without a buffer, which would ask the kernel three more things: this is read at each prepare.
        with path.open("rb", buffering=0) as file:
            data = file.read()
    except OSError as error:
        raise HostError(
            "DRA-HOST-PROC-DEVICES",
            f"{path} cannot be read: {error.strerror}",
            remedy="Mount the host's /proc, or run the plugin in a container that has one.",
            path=str(path),
        ) from error
    return parse_device_majors(data.decode("ascii", "replace"))


@functools.lru_cache(maxsize=4)
def parse_device_majors(text: str) -> Mapping[str, int]:
    """Read the text of /proc/devices; block devices are left out."""
    majors: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("Block devices"):
            break
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and name.strip():
            majors.setdefault(name.strip(), int(number))
    return MappingProxyType(majors)


def frontend_major(majors: Mapping[str, int]) -> int | None:
    """Give the major of /dev/nvidia<N>, nvidiactl and nvidia-modeset; None if the module is not loaded.

    Source: NVIDIA's open kernel modules: `nvidia` from 550.40, `nvidia-frontend` before.
    """
    return next((majors[name] for name in FRONTEND_NAMES if name in majors), None)


def kernel_driver_version(paths: HostPaths) -> str:
    """Give the version of the loaded kernel module (`580.95.05`), empty if none is loaded or it does not say.

    Source: /proc/driver/nvidia/version, first line.
    """
    try:
        text = (paths.proc / "driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    match = _VERSION.search(text)
    return match[1] if match else ""
