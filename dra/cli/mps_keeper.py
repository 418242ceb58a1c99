"""`dra mps-keeper`: runs the node's MPS control daemons, apart from the plugin. Flags have the plugin's names."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dra.cli.common_flags import Subparsers, add_log_arguments
from dra.cli.service import configure_log

_FLAGS = (
    ("--driver-name", ("DRA_DRIVER_NAME",), "gpu.nvidia.com", "name of the DRA driver"),
    ("--nvidia-driver-root", ("NVIDIA_DRIVER_ROOT", "HOST_DRIVER_ROOT"), "", "root of the NVIDIA driver on the host (default /)"),
    ("--container-driver-root", ("DRIVER_ROOT_CTR_PATH",), "", "where that root is mounted in this container (default /driver-root if it exists)"),
    ("--host-root", ("HOST_ROOT",), "", "prefix of the host's files: a simulated node's directory"),
    ("--kubelet-plugins-directory-path", ("KUBELET_PLUGINS_DIRECTORY_PATH",), "", "the kubelet's plugin directory (default /var/lib/kubelet/plugins)"),
    ("--simulate", ("DRA_SIMULATE",), "", "keep the stand-ins of daemons of the simulated machine below --host-root"),
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add `mps-keeper` to a command line."""
    parser = subparsers.add_parser(
        "mps-keeper",
        help="run the MPS control daemons of this node",
        description="Starts, supervises and ends MPS control daemons, as the plugin asks over a unix socket in its state "
        "directory. The daemons live on when this process is restarted.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags; their defaults come from the environment."""
    for name, variables, default, text in _FLAGS:
        value = next((os.environ[each] for each in variables if os.environ.get(each)), default)
        parser.add_argument(name, default=value, help=f"{text} [{', '.join(variables)}]")
    add_log_arguments(parser, os.environ)
    parser.add_argument(
        "--check",
        action="store_true",
        help="ask the keeper that runs on this node whether it is well, for a probe",
    )
    parser.add_argument(
        "--guard",
        action="store_true",
        help="start it again when it ends by itself, so that a container lives on",
    )


def run(args: argparse.Namespace) -> int:
    """Run the keeper until it is told to stop; or ask one."""
    if args.guard:
        from dra.mps.guard import Guard

        return Guard([sys.executable, "-m", "dra.cli.mps_keeper", *_same_flags(args)]).run()
    from dra.mps.service import KeeperService, KeeperSettings, check_alive

    paths = _paths(args)
    if args.check:
        check_alive(paths.state_dir(args.driver_name))
        return 0
    configure_log(args)
    return KeeperService(
        KeeperSettings(
            args.driver_name,
            paths,
            isolate=not args.simulate,
            environment=_simulation() if args.simulate else {},
        )
    ).run()


def _same_flags(args: argparse.Namespace) -> list[str]:
    """Give the flags again, without the guard's own."""
    values = {name: getattr(args, name.removeprefix("--").replace("-", "_")) for name, *_ in _FLAGS}
    values |= {"--log-level": args.log_level, "--logging-format": args.logging_format}
    return [f"{name}={value}" for name, value in values.items() if value]


def _paths(args: argparse.Namespace) -> Any:
    from dra.host.paths import HostPaths

    root = Path(args.host_root or "/")
    if args.simulate:
        from dra.sim.node import SimulatedNode

        more: dict[str, Any] = SimulatedNode(args.simulate, root).paths_kwargs()
    else:
        mounted = Path(args.container_driver_root or "/driver-root")
        more = {"host_root": root, "driver_root_host": args.nvidia_driver_root or "/"}
        if args.container_driver_root or mounted.is_dir():
            more["driver_root"] = mounted
    # As the plugin's: on a real node the kubelet's directories are mounted at the host's own paths.
    base = root if args.simulate else Path("/")
    plugins = args.kubelet_plugins_directory_path
    more["kubelet_plugins_dir"] = Path(plugins).absolute() if plugins else base / "var/lib/kubelet/plugins"
    return HostPaths(**more)


def _simulation() -> dict[str, str]:
    """Give what the stand-ins of daemons must know: with which process they end."""
    return {name: value for name, value in os.environ.items() if name.startswith("DRA_SIM_")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dra mps-keeper` alone: `python -m dra.cli.mps_keeper`."""
    parser = argparse.ArgumentParser(prog="dra mps-keeper")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
