"""A node for commands that look at its files: the flags of `dra plugin` that say where they are, real or simulated."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.errors import ConfigError

if TYPE_CHECKING:
    from dra.host.paths import HostPaths
    from dra.sim.node import SimulatedNode

PATH_FLAGS = {
    "--nvidia-driver-root": ("NVIDIA_DRIVER_ROOT", "HOST_DRIVER_ROOT"),
    "--container-driver-root": ("DRIVER_ROOT_CTR_PATH",),
    "--cdi-root": ("CDI_ROOT",),
    "--kubelet-registrar-directory-path": ("KUBELET_REGISTRAR_DIRECTORY_PATH",),
    "--kubelet-plugins-directory-path": ("KUBELET_PLUGINS_DIRECTORY_PATH",),
}


@dataclass(frozen=True, slots=True)
class NodeView:
    """Where the node's files are, the simulated NVML (None on a real node), and the node's name."""

    paths: HostPaths
    library: Callable[[], object] | None
    name: str


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--host-root", metavar="DIR", help="where the node's / is (default: $HOST_ROOT, /)")
    parser.add_argument(
        "--simulate",
        metavar="PROFILE",
        help="a simulated machine; with --host-root the one that lives there",
    )
    parser.add_argument(
        "--node-name",
        default=os.environ.get("NODE_NAME") or None,
        help="this node's name (default: $NODE_NAME, the host's)",
    )
    parser.add_argument("--driver-name", default=os.environ.get("DRA_DRIVER_NAME") or "gpu.nvidia.com")
    for flag, variables in PATH_FLAGS.items():
        parser.add_argument(flag, metavar="DIR", help=f"as of dra plugin [{', '.join(variables)}]")


@contextlib.contextmanager
def node_view(args: argparse.Namespace) -> Iterator[NodeView]:
    """Give the node. A simulated one without `--host-root` is gone afterwards.

    Raises:
        ConfigError: DRA-CLI-PROFILE, DRA-CLI-HOST-ROOT.
    """
    from dra.host.paths import HostPaths

    if not args.simulate:
        name = args.node_name or socket.gethostname().lower()
        yield NodeView(HostPaths(**_real_paths(args)), None, name)
        return
    with contextlib.ExitStack() as made:
        node = simulated_node(args.simulate, args.host_root or "", made)
        yield NodeView(HostPaths(**node.paths_kwargs()), node.library, args.node_name or args.simulate)


def simulated_node(profile: str, root: str, made: contextlib.ExitStack) -> SimulatedNode:
    """Give the simulated node that lives below `root`; where that is empty, one that is gone with `made`.

    A look makes nothing where it was told to look.

    Raises:
        ConfigError: DRA-CLI-PROFILE; DRA-CLI-HOST-ROOT: no node lives there, or one of another profile.
    """
    from dra.sim.node import SimulatedNode

    if root and not SimulatedNode.lives_in(Path(root)):
        raise ConfigError(
            "DRA-CLI-HOST-ROOT",
            f"--host-root {root} holds no simulated node",
            remedy="Name the directory of one (that of dra plugin --simulate; n0, n1 … below that of dra sim up), or "
            "leave --host-root out: then a machine is made for this look.",
        )
    place = root or made.enter_context(tempfile.TemporaryDirectory(prefix="dra-node-"))
    try:
        return SimulatedNode(profile, Path(place))
    except (ValueError, OSError) as error:
        raise ConfigError("DRA-CLI-HOST-ROOT", f"--host-root {place}: {error}") from error
    except KeyError as error:
        from dra.sim.profiles import PROFILES

        raise ConfigError(
            "DRA-CLI-PROFILE",
            f"there is no machine profile {profile!r}",
            remedy=f"Choose one of {', '.join(sorted(PROFILES))}.",
        ) from error


def _real_paths(args: argparse.Namespace) -> dict[str, Any]:
    """Give the arguments of `HostPaths`: flags, then the environment of the plugin's pod, then below the host's root.

    Paths of the environment are as the pod sees them, so they do not count beside a `--host-root` that was typed.
    """
    told = {
        flag: getattr(args, flag.removeprefix("--").replace("-", "_"))
        or ("" if args.host_root else next((os.environ[n] for n in variables if os.environ.get(n)), ""))
        for flag, variables in PATH_FLAGS.items()
    }
    fields: dict[str, Any] = {"host_root": Path(args.host_root or os.environ.get("HOST_ROOT") or "/")}
    if told["--nvidia-driver-root"]:
        fields["driver_root_host"] = told["--nvidia-driver-root"]
    mounted = told["--container-driver-root"]
    if not mounted and not args.host_root and Path("/driver-root").is_dir():
        mounted = "/driver-root"
    named = {
        "driver_root": mounted,
        "cdi_root": told["--cdi-root"],
        "kubelet_registry_dir": told["--kubelet-registrar-directory-path"],
        "kubelet_plugins_dir": told["--kubelet-plugins-directory-path"],
    }
    return fields | {field: Path(value) for field, value in named.items() if value}
