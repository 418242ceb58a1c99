"""Finding NVIDIA's hook program on the host.

The engine runs it, in the host's mount namespace: a path that only the plugin's container has would make every
container fail to start. So only what can be seen through the host's own tree counts.
"""

from __future__ import annotations

import os
from pathlib import Path

from dra.host.driver_search import is_executable
from dra.host.paths import HostPaths, strip_root
from dra.host.rooted import resolve

# The toolkit's packages; the GPU operator's toolkit; Google's and Amazon's images.
HOOK_PLACES = (
    "/usr/bin/nvidia-cdi-hook",
    "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
    "/usr/local/bin/nvidia-cdi-hook",
    "/opt/nvidia/toolkit/nvidia-cdi-hook",
)


def find_hook(paths: HostPaths, wanted: str = "") -> str:
    """Give the host's path of the hook program, empty if there is none that we can see.

    `wanted` is what an administrator named; then no other place counts.
    """
    return next((place for place in ((wanted,) if wanted else HOOK_PLACES) if is_program(paths, place)), "")


def is_program(paths: HostPaths, host_path: str) -> bool:
    """Whether the host has a program at this path, its links followed as on the host."""
    real = host_file(paths, host_path)
    try:
        return real is not None and is_executable(os.lstat(real).st_mode)
    except OSError:
        return False


def host_file(paths: HostPaths, host_path: str) -> Path | None:
    """Give where this process sees the real file behind a path of the host; None if there is none, or no way to see."""
    if not host_path.startswith("/"):
        return None
    inside = strip_root(host_path, paths.driver_root_host)
    if inside is not None:
        return resolve(paths.driver_root, inside)
    if paths.sees_whole_host:
        return resolve(paths.host_root, host_path)
    view = paths.view_of(host_path)
    return None if view is None else resolve(Path("/"), str(view))
