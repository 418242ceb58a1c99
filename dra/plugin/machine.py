"""The machine that the daemon runs on: where its files are and where NVML comes from. Real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.host.paths import HostPaths
from dra.host.proc import kernel_driver_version
from dra.nvml.library import LibrarySource, RootedLibrary
from dra.plugin.settings import PluginSettings

if TYPE_CHECKING:
    from dra.host.kernel import HostKernel


@dataclass(frozen=True, slots=True)
class Machine:
    """What differs between a real and a simulated node.

    `kernel_version` gives the version of the loaded kernel module, empty without one. `kernel` is what binds PCI
    functions and loads modules; None: the kernel that this process runs on. `close` is called last.
    """

    paths: HostPaths
    library: LibrarySource
    kernel_version: Callable[[], str]
    kernel: HostKernel | None = None
    close: Callable[[], None] = lambda: None


def real_machine(settings: PluginSettings) -> Machine:
    """Give the machine that this process runs on."""
    paths = host_paths(settings)
    # A driver container's root may be missing while the host has a driver of its own: only the asked root counts.
    return Machine(paths, RootedLibrary((paths.driver_root,)), lambda: kernel_driver_version(paths))


def host_paths(settings: PluginSettings, **more: Any) -> HostPaths:
    """Give the paths that the settings ask for; `more` are fields of `HostPaths` that they do not have.

    On a real node the kubelet's directories and the CDI directory are mounted at the host's own paths, whatever
    `--host-root` is; those of a simulated node lie below it.
    """
    base = settings.host_root if settings.simulate else Path("/")
    kubelet = base / "var/lib/kubelet"
    given: dict[str, Any] = {
        "host_root": settings.host_root,
        "driver_root_host": settings.driver_root_host,
        "cdi_root": settings.cdi_root or base / "var/run/cdi",
        "kubelet_plugins_dir": settings.plugins_dir or kubelet / "plugins",
        "kubelet_registry_dir": settings.registry_dir or kubelet / "plugins_registry",
    }
    if settings.driver_root is not None:
        given["driver_root"] = settings.driver_root
    return HostPaths(**{**given, **more})
