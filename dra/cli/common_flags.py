"""Flags that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Mapping


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--kubeconfig` and `--context`: which cluster a command of a person looks at."""
    parser.add_argument(
        "--kubeconfig", help="default: $KUBECONFIG, ~/.kube/config, the pod's service account"
    )
    parser.add_argument("--context", help="context of the kubeconfig")


def add_log_arguments(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    """Add `--log-level` and `--logging-format` of a process; their defaults come from the environment."""
    parser.add_argument(
        "--log-level", default=env.get("LOG_LEVEL") or "info", choices=("debug", "info", "warning", "error")
    )
    parser.add_argument(
        "--logging-format", default=env.get("LOGGING_FORMAT") or "json", choices=("json", "text")
    )
