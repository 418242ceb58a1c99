"""The cluster that a command of a person looks at: its flags, a client for it, and what it or dumps of it hold."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dra.diagnose.explain.cluster import Cluster
    from dra.kube.client import KubeClient


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--kubeconfig` and `--context`."""
    parser.add_argument(
        "--kubeconfig", help="default: $KUBECONFIG, ~/.kube/config, the pod's service account"
    )
    parser.add_argument("--context", help="context of the kubeconfig")


def kubeconfig_of(args: argparse.Namespace) -> str | None:
    """Give the kubeconfig that is named; None for the default one or the pod's service account."""
    return args.kubeconfig or os.environ.get("KUBECONFIG") or None


@contextlib.contextmanager
def cluster_client(args: argparse.Namespace, command: str) -> Iterator[KubeClient]:
    """Give a client, which calls itself `dra-<command>`; closed afterwards."""
    from dra.kube.client import connect
    from dra.kube.connection import KubeOptions

    client = connect(
        KubeOptions(kubeconfig=kubeconfig_of(args), context=args.context, user_agent=f"dra-{command}")
    )
    try:
        yield client
    finally:
        client.close()


def read_cluster(
    args: argparse.Namespace, command: str, files: Sequence[str], *, namespace: str = ""
) -> Cluster:
    """Read dumps if there are any, else the cluster; `namespace`: as of `read_live`.

    Raises:
        ConfigError: a dump cannot be read.
        KubeError: the API server cannot be asked.
    """
    if files:
        from dra.diagnose.explain.files import read_files

        return read_files(files)
    from dra.diagnose.explain.live import read_live

    with cluster_client(args, command) as client:
        return read_live(client, namespace)
