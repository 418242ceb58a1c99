"""The two capability nodes that open a MIG device: of its GPU instance and of its compute instance.

They often do not exist on the host and need not: with type and numbers in the spec the engine makes them. The numbers
are the kernel's to give; they are read, never computed from a formula.
"""

from __future__ import annotations

from collections.abc import Mapping

from dra.cdi.model import DeviceNode
from dra.errors import DeviceError, StackError
from dra.host.paths import HostPaths
from dra.host.proc import device_majors

_DRIVER = "nvidia-caps"
_DEFAULT_MODE = 0o444


def mig_capability_nodes(
    paths: HostPaths,
    *,
    gpu_minor: int,
    gpu_instance: int,
    compute_instance: int,
    majors: Mapping[str, int] | None = None,
) -> tuple[DeviceNode, DeviceNode]:
    """Give the nodes of a GPU instance and of a compute instance in it; ids are those NVML reports.

    Raises:
        DeviceError: DRA-MIG-CAPABILITY: the kernel lists no such instance, or its entry cannot be read.
        StackError: DRA-MIG-CAPS-DRIVER: the kernel has no driver for such nodes.
        HostError: DRA-HOST-PROC-DEVICES.

    Source: /proc/driver/nvidia/capabilities/gpu<M>/mig/gi<G>[/ci<C>]/access, /proc/driver/nvidia-caps/mig-minors.
    """
    known = device_majors(paths) if majors is None else majors
    major = known.get(_DRIVER)
    if major is None:
        raise StackError(
            "DRA-MIG-CAPS-DRIVER",
            f"{paths.proc / 'devices'} lists no {_DRIVER}, so MIG devices cannot be opened",
            remedy="Load the nvidia kernel module with MIG support (driver 450 or newer).",
        )
    instance = f"gi{gpu_instance}"
    parts = (instance, f"{instance}/ci{compute_instance}")
    first, second = (_capability(paths, gpu_minor, part, major) for part in parts)
    return first, second


def parse_access(text: str) -> tuple[int, int] | None:
    """Read an access file: (minor, mode); None if it does not say."""
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    minor, mode = (values.get(key, "").strip() for key in ("DeviceFileMinor", "DeviceFileMode"))
    if not minor.isdigit():
        return None
    return int(minor), (int(mode) & 0o777 if mode.isdigit() else 0) or _DEFAULT_MODE


def _capability(paths: HostPaths, gpu_minor: int, part: str, major: int) -> DeviceNode:
    file = paths.proc / f"driver/nvidia/capabilities/gpu{gpu_minor}/mig/{part}/access"
    try:
        found = parse_access(file.read_text(encoding="ascii", errors="replace"))
        if found is None:
            raise _unknown(gpu_minor, part, f"{file} does not give its DeviceFileMinor")
    except OSError as error:
        minor = _listed_minor(paths, f"gpu{gpu_minor}/{part}/access")
        if minor is None:
            raise _unknown(gpu_minor, part, f"there is no {file}") from error
        found = minor, _DEFAULT_MODE
    minor, mode = found
    return DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, mode=mode)


def _listed_minor(paths: HostPaths, name: str) -> int | None:
    """Look a capability up in the table of all that may exist.

    The table also lists instances that do not exist, so it counts only where the kernel has no access files at all.
    """
    if (paths.proc / "driver/nvidia/capabilities").is_dir():
        return None
    try:
        text = (paths.proc / "driver/nvidia-caps/mig-minors").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    pairs = (line.rpartition(" ") for line in text.splitlines())
    return next((int(minor) for key, _, minor in pairs if key == name and minor.isdigit()), None)


def _unknown(gpu_minor: int, part: str, why: str) -> DeviceError:
    return DeviceError(
        "DRA-MIG-CAPABILITY",
        f"the kernel does not give the capability {part} of /dev/nvidia{gpu_minor}: {why}",
        remedy="The MIG device may be gone: look at nvidia-smi mig -lgi on the node; the call is retried.",
        retryable=True,
    )
