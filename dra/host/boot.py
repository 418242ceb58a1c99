"""Which boot of the machine this is: what was prepared in another one is gone from the hardware."""

from __future__ import annotations

from dra.errors import HostError
from dra.host.paths import HostPaths


def boot_id(paths: HostPaths) -> str:
    """Give the kernel's boot id (a UUID, new at each boot).

    Raises:
        HostError: DRA-HOST-BOOT-ID.

    Source: proc(5), /proc/sys/kernel/random/boot_id.
    """
    path = paths.proc / "sys/kernel/random/boot_id"
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise HostError(
            "DRA-HOST-BOOT-ID",
            f"the boot id cannot be read from {path}: {error.strerror}",
            remedy="Mount the host's /proc, or run the plugin in a container that has one.",
            path=str(path),
        ) from error
    if not text:
        raise HostError(
            "DRA-HOST-BOOT-ID", f"{path} is empty", remedy="Check what is mounted there.", path=str(path)
        )
    return text
