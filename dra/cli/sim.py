"""`dra sim`: a simulated cluster to try the driver in, without a GPU and without Kubernetes."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from dra.cli.columns import aligned
from dra.cli.common_flags import Subparsers

Json = dict[str, Any]

EXIT_UNWELL = 3
_MANIFESTS = "deploy/manifests"


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add `sim` to a command line."""
    parser = subparsers.add_parser(
        "sim",
        help="a simulated cluster to try the driver in",
        description="A simulated cluster on loopback: test equipment and a way to try DRA, never for production.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="walk through the main job on a simulated DGX H100, then end")
    demo.add_argument(
        "--examples", type=Path, default=_of_checkout("examples"), help="folder of the example manifests"
    )
    _add_manifests(demo)
    _add_up(verbs)
    status = verbs.add_parser(
        "status",
        help="nodes, drivers, slices, pods, claims, faults",
        description=f"Exit status {EXIT_UNWELL}: some node has no driver or no slices.",
    )
    _add_root(status)
    status.add_argument("-o", "--output", choices=("table", "json"), default="table")
    _add_fault(verbs)
    down = verbs.add_parser("down", help="end the cluster and remove its files")
    _add_root(down)
    down.add_argument("--keep", action="store_true", help="leave the nodes' files and logs")
    parser.set_defaults(run=run)
    return parser


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(tempfile.gettempdir(), "dra-sim"),
        help="the cluster's directory (default: %(default)s)",
    )


def _add_manifests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--manifests",
        type=Path,
        help="folder of the DeviceClasses (default: deploy/manifests of the checkout)",
    )


def _of_checkout(folder: str) -> Path:
    """Give a folder of the checkout: of the one where the user is, else of the one that this code lies in."""
    here, ours = Path(folder), Path(__file__).resolve().parents[2] / folder
    return ours if ours.is_dir() and not here.is_dir() else here


def _device_classes(args: argparse.Namespace) -> Path | None:
    """Give the file of the DeviceClasses; None where there is no checkout.

    Raises:
        ConfigError: DRA-SIM-MANIFESTS, the folder that was named has none.
    """
    from dra.errors import ConfigError

    file = ((args.manifests or _of_checkout(_MANIFESTS)) / "deviceclasses.yaml").absolute()
    if file.is_file():
        return file
    if args.manifests is not None:
        raise ConfigError(
            "DRA-SIM-MANIFESTS",
            f"there is no {file}",
            remedy="Give the folder deploy/manifests of a checkout, or leave --manifests out.",
        )
    print(
        f"there is no {file}: the cluster starts without DeviceClasses, apply them yourself", file=sys.stderr
    )
    return None


def _add_up(verbs: Subparsers) -> None:
    up = verbs.add_parser("up", help="run a cluster until Ctrl-C, or with --detach until `down`")
    up.add_argument("--nodes", default="dgx-h100", help="machine profiles, for example dgx-h100x4,l40s-x4")
    up.add_argument("--version", default="1.36", help="the Kubernetes version to play, 1.32 to 1.37")
    up.add_argument("--port", type=_port, default=0, help="port of the API server (default: a free one)")
    up.add_argument(
        "--real",
        type=_count,
        default=None,
        metavar="N",
        help="nodes with a driver process of their own; the others run in the cluster's process (default: up to 4)",
    )
    up.add_argument(
        "--feature-gates",
        default="",
        metavar="GATES",
        help="of the drivers, for example PassthroughSupport=true",
    )
    up.add_argument("--detach", action="store_true", help="return when it is ready; it runs on")
    up.add_argument("--keep", action="store_true", help="leave the nodes' files and logs at the end")
    _add_root(up)
    _add_manifests(up)


def _port(text: str) -> int:
    number = _count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return number


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return int(text)


def _add_fault(verbs: Subparsers) -> None:
    fault = verbs.add_parser(
        "fault",
        help="switch faults on and off",
        description="Without arguments: the faults that are on. A target is a node, or `api` for the API server.",
        epilog="Of a node: nvml, gpu-lost, gpu-removed, gpu-reset, gpu-set, gpu-held, xid, ecc, iommu-off, driver-unload, library-missing, "
        "plugin-stop, plugin-kill, keeper-stop, keeper-kill, mps-kill, kubelet-restart. Of `api`: delay, conflict (409), throttle (429), gone (410), error, freeze, drop, down.",
    )
    _add_root(fault)
    fault.add_argument("target", nargs="?", default="", metavar="NODE|api")
    fault.add_argument("kind", nargs="?", default="", metavar="FAULT")
    fault.add_argument("--clear", action="store_true", help="take back the faults of the target, or all")
    fault.add_argument("--gpu", type=int, help="a GPU's minor number, as in gpu-3")
    fault.add_argument("--xid", type=int, help="the number of the XID")
    fault.add_argument("--mig", metavar="UUID", help="the MIG device that reports the XID")
    fault.add_argument(
        "--set", action="append", metavar="NAME=NUMBER", help="what NVML reports about the GPU"
    )
    fault.add_argument("--function", help="an NVML function, or a shell pattern")
    fault.add_argument("--error", help="an NVML error, for example GPU_IS_LOST")
    fault.add_argument("--seconds", type=float, help="how late calls or answers come")
    fault.add_argument("--hang", action="store_true", help="NVML calls do not come back")
    fault.add_argument("--times", type=int, help="for so many calls or requests (default: until cleared)")
    fault.add_argument("--force", action="store_true", help="unload the driver although it is in use")
    fault.add_argument("--method", help="requests of this HTTP method only")
    fault.add_argument("--path", help="requests whose path this regular expression finds only")
    fault.add_argument("--code", type=int, help="the HTTP status of `error`")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    verbs = {"demo": _demo, "up": _up, "status": _status, "fault": _fault, "down": _down}
    return verbs[args.verb](args)


def _say(text: str) -> None:
    print(text, flush=True)


def _demo(args: argparse.Namespace) -> int:
    from dra.sim.demo import Demo

    Demo(args.examples, args.manifests or _of_checkout(_MANIFESTS), _say).run()
    return 0


def _up(args: argparse.Namespace) -> int:
    from dra.plugin.settings import parse_gates
    from dra.sim.cluster import parse_nodes
    from dra.sim.up import UpSettings, run_up, start_detached

    root = args.root.absolute()
    nodes = tuple(parse_nodes(args.nodes))
    parse_gates(args.feature_gates)  # a wrong one is said here, and not in the log of each node
    classes = _device_classes(args)
    if args.detach:
        words = [
            "--nodes",
            args.nodes,
            "--version",
            args.version,
            "--port",
            str(args.port),
            "--root",
            str(root),
        ]
        words += [] if classes is None else ["--manifests", str(classes.parent)]
        words += ["--keep"] if args.keep else []
        words += ["--feature-gates", args.feature_gates] if args.feature_gates else []
        words += [] if args.real is None else ["--real", str(args.real)]
        start_detached(root, words)
        _say(f"export KUBECONFIG={root / 'kubeconfig'}")
        return 0
    settings = UpSettings(
        root=root, nodes=nodes, version=args.version, port=args.port, real=args.real,
        manifests=classes, keep=args.keep, gates=args.feature_gates,
    )  # fmt: skip
    run_up(settings, _say)
    return 0


def _status(args: argparse.Namespace) -> int:
    from dra.sim.cluster_status import is_well
    from dra.sim.door import ask

    status = ask(args.root.absolute(), {"verb": "status"})
    if args.output == "json":
        _say(json.dumps(status, indent=2))
    else:
        _print_status(status)
    return 0 if is_well(status) else EXIT_UNWELL


def _print_status(status: Json) -> None:
    _say(f"Kubernetes {status['version']} (simulated) at {status['url']}, process {status['pid']}")
    _say(f"export KUBECONFIG={status['kubeconfig']}\n")
    rows: list[tuple[str, ...]] = [
        ("NODE", "PROFILE", "DRIVER", "PID", "REGISTERED", "SLICES", "DEVICES", "IN USE", "PODS", "FAULTS")
    ]
    for node in status["nodes"]:
        registered = {None: "-", True: "yes", False: "no"}[node["registered"]]
        cells = (
            node["name"], node["profile"], node["driver"], node["pid"] or "-", registered, node["slices"],
            node["devices"], node["devicesInUse"], node["pods"], ", ".join(node["faults"]) or "-",
        )  # fmt: skip
        rows.append(tuple(str(cell) for cell in cells))
    for line in aligned(rows):
        _say(line)
    phases = ", ".join(f"{count} {phase}" for phase, count in sorted(status["pods"].items())) or "none"
    claims = status["claims"]
    _say(f"\npods: {phases}")
    _say(f"claims: {claims['total']}, {claims['allocated']} allocated, {claims['reserved']} reserved")
    _print_faults(status["faults"])


def _print_faults(faults: list[Json]) -> None:
    if not faults:
        _say("faults: none")
    for fault in faults:
        _say(f"fault: {fault['target']} {fault['fault']} {fault['detail']}".rstrip())


def _fault(args: argparse.Namespace) -> int:
    from dra.errors import ConfigError
    from dra.sim.door import ask

    root = args.root.absolute()
    if args.clear:
        was = ask(root, {"verb": "clear", "target": args.target})
        _say("\n".join(f"cleared {text}" for text in was) or "no faults were on")
    elif not args.target:
        _print_faults(ask(root, {"verb": "faults"}))
    elif not args.kind:
        raise ConfigError(
            "DRA-SIM-FAULT",
            f"which fault of {args.target}?",
            remedy="Name one, or give --clear; dra sim fault --help lists them.",
        )
    else:
        names = (
            "gpu",
            "xid",
            "mig",
            "set",
            "function",
            "error",
            "seconds",
            "hang",
            "times",
            "force",
            "method",
            "path",
            "code",
        )
        given = {name: getattr(args, name) for name in names}
        options = {name: value for name, value in given.items() if value is not None and value is not False}
        request = {"verb": "fault", "target": args.target, "kind": args.kind, "options": options}
        _say(ask(root, request))
    return 0


def _down(args: argparse.Namespace) -> int:
    from dra.sim.up import run_down

    root = args.root.absolute()
    ran = run_down(root, keep=args.keep)
    print(f"the cluster in {root} has ended" if ran else f"no cluster ran in {root}", file=sys.stderr)
    return 0
