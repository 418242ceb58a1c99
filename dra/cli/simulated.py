"""A simulated machine for `dra plugin --simulate`: the one place where the command line meets the simulator."""

from __future__ import annotations

from typing import Any

from dra.errors import ConfigError
from dra.plugin.machine import Machine, host_paths
from dra.plugin.settings import PluginSettings


def simulated_machine(settings: PluginSettings) -> Machine:
    """Give the simulated node below `--host-root`, made if it is not there.

    Raises:
        ConfigError: DRA-FLAG-SIMULATE: no such profile, or the directory holds another machine.
    """
    from dra.host.proc import kernel_driver_version
    from dra.nvml.library import InjectedLibrary
    from dra.sim.node import SimulatedNode

    if str(settings.host_root) == "/":
        raise ConfigError(
            "DRA-FLAG-SIMULATE",
            "--simulate needs a directory for the simulated node's files",
            remedy="Give --host-root DIRECTORY.",
        )
    try:
        node = SimulatedNode(settings.simulate, settings.host_root)
    except (KeyError, ValueError) as error:
        raise ConfigError("DRA-FLAG-SIMULATE", f"--simulate {settings.simulate}: {error}") from error
    except OSError as error:
        raise ConfigError(
            "DRA-FLAG-HOST-ROOT",
            f"--host-root {settings.host_root} cannot hold the files of a simulated node: "
            f"{error.strerror or error} ({error.filename or settings.host_root})",
            remedy="Give --host-root a directory, or a name for one, where this user may write.",
        ) from error
    more: dict[str, Any] = node.paths_kwargs()
    if settings.driver_root_host != "/":
        # For a real container runtime, which mounts the simulated files from where they really are.
        more |= {"driver_root_host": settings.driver_root_host, "dev_root_host": settings.driver_root_host}
    paths = host_paths(settings, **more)
    return Machine(paths, InjectedLibrary(node.library), lambda: kernel_driver_version(paths), node.kernel)
