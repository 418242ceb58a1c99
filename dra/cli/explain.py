"""`dra explain`: why a pod or a claim is pending."""

from __future__ import annotations

import argparse
import json
import sys

from dra.cli.cluster import add_cluster_arguments, read_cluster
from dra.cli.common_flags import Subparsers
from dra.cli.main import EXIT_USAGE, print_error
from dra.errors import KubeError


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
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
    namespace = args.namespace or (None if files else "default")
    try:
        cluster = read_cluster(args, "explain", files, namespace=namespace or "")
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
