"""Flags that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TypeAlias

# What `add_subparsers` gives: commands add themselves to it.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_setting(
    parser: argparse.ArgumentParser,
    env: Mapping[str, str],
    flag: str,
    default: str,
    text: str,
    *,
    variable: str = "",
    read: Callable[[str], object] = str,
    metavar: str | None = None,
) -> None:
    """Add a flag of a service whose default an environment variable sets, empty as if it were not there.

    `default` is as it would be written on the command line, and `read` what makes the value of such a text. The help
    names `variable`, which is the flag's name in capitals, if it is not given.
    """
    name = variable or flag.removeprefix("--").replace("-", "_").upper()
    parser.add_argument(
        flag, default=env.get(name) or default, help=f"{text} [{name}]", type=read, metavar=metavar
    )


def add_log_arguments(parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
    """Add `--log-level` and `--logging-format` of a process; their defaults come from the environment."""
    parser.add_argument(
        "--log-level", default=env.get("LOG_LEVEL") or "info", choices=("debug", "info", "warning", "error")
    )
    parser.add_argument(
        "--logging-format", default=env.get("LOGGING_FORMAT") or "json", choices=("json", "text")
    )
