"""`dra explain`: why a pod or a claim is pending."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from dra.cli.common_flags import add_cluster_arguments
from dra.cli.main import EXIT_USAGE, print_error
from dra.errors import KubeError

if TYPE_CHECKING:
    from dra.diagnose.explain import Cluster


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="why a pod or a claim is pending, or how it was allocated",
        description="Say why a pod or a ResourceClaim is pending: which request fails, on which nodes and devices, "
        "and what to do. Reads a cluster, or files that kubectl get -o yaml or -o json wrote; changes nothing.",
        epilog="Exit code 0: not pending; 1: pending, with the reason; 2: not found, or it could not be read.",
    )
    parser.add_argument("subject", metavar="pod/NAME|claim/NAME|NAME", help="what to explain")
    parser.add_argument("-n", "--namespace", help="its namespace (default: default)")
    parser.add_argument(
        "-f",
        "--filename",
        metavar="DUMP",
        action="append",
        nargs="+",
        default=[],
        help="read these files or folders (- is standard input) in place of a cluster",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("short", "wide", "json"),
        default="short",
        help="wide: every node and device",
    )
    add_cluster_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read, explain, print."""
    from dra.diagnose.explain import explain
    from dra.diagnose.explain.render import as_json, text
    from dra.diagnose.explain.subject import parse_subject
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    parse_subject(args.subject)
    files = [name for group in args.filename for name in group]
    namespace = args.namespace
    if files:
        from dra.diagnose.explain.files import read_files

        cluster = read_files(files)
    else:
        namespace = namespace or "default"
        try:
            cluster = _live(args, namespace)
        except KubeError as error:
            # 1 would say that the pod is pending.
            print_error(error)
            return EXIT_USAGE
    answer = explain(cluster, args.subject, namespace=namespace)
    if args.output == "json":
        json.dump(as_json(answer), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        print(text(answer, wide=args.output == "wide"))
    return answer.exit_code


def _live(args: argparse.Namespace, namespace: str) -> Cluster:
    from dra.diagnose.explain.live import read_live
    from dra.kube.client import connect
    from dra.kube.connection import KubeOptions

    kubeconfig = args.kubeconfig or os.environ.get("KUBECONFIG") or None
    client = connect(KubeOptions(kubeconfig=kubeconfig, context=args.context, user_agent="dra-explain"))
    try:
        return read_live(client, namespace)
    finally:
        client.close()
