"""`dra fleet`: the cluster's side of the driver."""

from __future__ import annotations

import argparse
import os
import socket

from dra.cli.common_flags import Subparsers, add_log_arguments, add_setting
from dra.cli.service import configure_log, serve


def add_parser(subparsers: Subparsers) -> None:
    """Add the command; each flag has an environment variable."""
    env = os.environ
    parser = subparsers.add_parser(
        "fleet",
        help="the cluster's side: claim templates, DeviceClasses, the status of policies, metrics",
        description="Makes the claim templates that pods with fractions of GPUs name, and collects those that nobody "
        "names any more; makes DeviceClasses of the MIG profiles and shared cards that are published; counts in the "
        "status of policies what nodes say of them. Several replicas may run; a Lease decides which one works.",
    )
    add_setting(parser, env, "--namespace", "dra-driver-nvidia-gpu", "of the Lease")
    add_setting(parser, env, "--lease", "dra-fleet", "name of the Lease")
    add_setting(
        parser, env, "--identity", f"{socket.gethostname()}-{os.getpid()}",
        "who holds the Lease; differs between replicas", variable="POD_NAME",
    )  # fmt: skip
    add_setting(parser, env, "--kubeconfig", "", "kubeconfig (default: the pod's service account)")
    add_setting(
        parser, env, "--healthcheck-port", "-1", "TCP port of /healthz and /readyz; negative: none",
        read=int, metavar="PORT",
    )  # fmt: skip
    add_setting(
        parser, env, "--collect-after", "600", "how long a template that no pod names is kept (default 600)",
        read=float, metavar="SECONDS",
    )  # fmt: skip
    add_log_arguments(parser, env)


def run(args: argparse.Namespace) -> int:
    """Work until a signal comes."""
    from dra.errors import ConfigError
    from dra.fleet.process import Fleet, FleetSettings

    configure_log(args)
    if not 0 <= args.collect_after <= 86_400:
        raise ConfigError(
            "DRA-FLAG-RANGE",
            f"--collect-after cannot be {args.collect_after}",
            remedy="Use 0 to 86400 seconds.",
        )
    settings = FleetSettings(
        identity=args.identity, namespace=args.namespace, lease=args.lease, kubeconfig=args.kubeconfig,
        port=args.healthcheck_port, collect_seconds=args.collect_after,
    )  # fmt: skip
    return serve(lambda: Fleet(settings))
