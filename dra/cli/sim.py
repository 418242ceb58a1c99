"""`dra sim`: a simulated cluster to try the driver in, without a GPU and without Kubernetes."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `sim` to a command line."""
    parser = subparsers.add_parser(
        "sim",
        help="a simulated cluster to try the driver in",
        description="A simulated cluster on loopback: test equipment and a way to try DRA, never for production.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="walk through the main job on a simulated DGX H100, then end")
    demo.add_argument(
        "--examples", type=Path, default=Path("examples"), help="folder of the example manifests"
    )
    demo.add_argument(
        "--manifests", type=Path, default=Path("deploy/manifests"), help="folder of the DeviceClasses"
    )
    up = verbs.add_parser("up", help="run a cluster until Ctrl-C")
    up.add_argument("--nodes", default="dgx-h100", help="machine profiles, for example dgx-h100x2,l40s-x4")
    up.add_argument("--version", default="1.36", help="the Kubernetes version to play, 1.32 to 1.37")
    up.add_argument("--port", type=int, default=0, help="port of the API server (default: a free one)")
    up.add_argument(
        "--root",
        type=Path,
        default=Path(tempfile.gettempdir(), "dra-sim"),
        help="folder for the nodes' files",
    )
    up.add_argument(
        "--manifests", type=Path, default=Path("deploy/manifests"), help="folder of the DeviceClasses"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    return _demo(args) if args.verb == "demo" else _up(args)


def _demo(args: argparse.Namespace) -> int:
    from dra.sim.demo import Demo

    def say(text: str) -> None:
        print(text, flush=True)

    Demo(args.examples, args.manifests, say).run()
    return 0


def _up(args: argparse.Namespace) -> int:
    from dra.sim.cluster import SimCluster, parse_nodes

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with SimCluster(args.root, parse_nodes(args.nodes), version=args.version, port=args.port) as cluster:
        cluster.wait_ready()
        classes = args.manifests / "deviceclasses.yaml"
        if classes.is_file():
            cluster.apply(classes)
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        for node in cluster.nodes.values():
            print(f"# node {node.name}: {node.profile}, driver log {node.log}", file=sys.stderr)
        stop.wait()
    return 0
