"""Flags that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TypeAlias

# What `add_subparsers` gives: commands add themselves to it.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_log_arguments(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    """Add `--log-level` and `--logging-format` of a process; their defaults come from the environment."""
    parser.add_argument(
        "--log-level", default=env.get("LOG_LEVEL") or "info", choices=("debug", "info", "warning", "error")
    )
    parser.add_argument(
        "--logging-format", default=env.get("LOGGING_FORMAT") or "json", choices=("json", "text")
    )
