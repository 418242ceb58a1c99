"""The NVML session of a node, real or simulated."""

from __future__ import annotations

import functools
from collections.abc import Callable

from dra.host.paths import HostPaths
from dra.host.proc import kernel_driver_version
from dra.nvml.library import RootedLibrary
from dra.nvml.session import HoldPolicy, NvmlSession


def session_of(
    paths: HostPaths, *, hold: HoldPolicy = HoldPolicy.AUTO, library: Callable[[], object] | None = None
) -> NvmlSession:
    """Give the session of the node at `paths`; nothing is opened yet.

    Args:
        paths: where its driver root and /proc are.
        hold: how long the session stays open.
        library: gives the library object of a simulated node. The file is looked for all the same, so that a
            missing or replaced driver in the tree acts as it would on a real node.
    """
    root = [paths.driver_root]
    source = RootedLibrary(root)
    if library is not None:
        source = RootedLibrary(root, machine=None, load=lambda _file: library())
    return NvmlSession(source, hold=hold, kernel_version=functools.partial(kernel_driver_version, paths))
