"""`dra uninstall-check`: refuse to take the driver away while claims are prepared; the chart's pre-delete hook."""

from __future__ import annotations

import argparse
import os

from dra.cli.cluster import add_cluster_arguments, cluster_client
from dra.cli.common_flags import Subparsers
from dra.values.words import counted


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "uninstall-check",
        help="whether claims are prepared, so that the driver must stay",
        description="Name the claims of this driver that pods use. Without the driver such pods cannot end: delete them first.",
        epilog="Exit code 0: none; 1: some, which are named; 2: the cluster could not be asked.",
    )
    parser.add_argument("--driver-name", default=os.environ.get("DRA_DRIVER_NAME") or "gpu.nvidia.com")
    add_cluster_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and tell."""
    from dra.cli.main import EXIT_USAGE, print_error
    from dra.diagnose.uninstall import claims_in_use
    from dra.errors import ClaimError, KubeError
    from dra.kube.resources import RESOURCE_CLAIMS
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    try:
        with cluster_client(args, "uninstall") as client:
            claims = client.list(RESOURCE_CLAIMS, timeout_seconds=60.0).items
    except KubeError as error:
        print_error(error)
        return EXIT_USAGE
    found = claims_in_use(claims, driver=args.driver_name)
    if not found:
        print(f"no pod uses a claim of {args.driver_name}: the driver may go")
        return 0
    print_error(
        ClaimError(
            "DRA-UNINSTALL-CLAIMS",
            f"{counted(len(found), 'claim')} of {args.driver_name} {'is' if len(found) == 1 else 'are'} in use, and without "
            "the driver their pods cannot end",
            remedy="Delete the pods that are named first; or helm uninstall --no-hooks, and install the driver again to let "
            "them end.",
        )
    )
    for each in found:
        print(f"  {each}")
    return 1
