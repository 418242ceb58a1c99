"""The entry of `dra` and `kubectl-dra`: finds the command, runs it, turns errors into text and an exit code.

Only the chosen command's module is imported. A command module has `add_parser(subparsers)` and
`run(args) -> int`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dra import __version__
from dra.cli.common_flags import Subparsers
from dra.errors import ConfigError, DraError, HostError

# name -> (module, one line of help)
COMMANDS = {
    "plugin": ("dra.cli.plugin", "the node daemon: publishes GPUs and prepares claims"),
    "mps-keeper": ("dra.cli.mps_keeper", "runs the node's MPS control daemons, apart from the plugin"),
    "inventory": ("dra.cli.inventory", "this node's GPUs and partitions"),
    "mig": ("dra.cli.mig", "MIG layouts that hold a mix of partitions, and what is in the way"),
    "explain": ("dra.cli.explain", "why a pod or a claim is pending, or how it was allocated"),
    "doctor": ("dra.cli.doctor", "which step between the hardware and a container is broken"),
    "top": ("dra.cli.top", "GPUs, who holds them, and what they do"),
    "validate": ("dra.cli.validate", "check manifests offline"),
    "webhook": ("dra.cli.webhook", "the admission webhook"),
    "fleet": (
        "dra.cli.fleet",
        "the cluster's side: claim templates, DeviceClasses, the status of policies, metrics",
    ),
    "policy": ("dra.cli.policy", "what GpuNodePolicies would change, and how far the nodes are"),
    "export-checkpoint": ("dra.cli.export_checkpoint", "hand prepared claims back to NVIDIA's driver"),
    "uninstall-check": (
        "dra.cli.uninstall_check",
        "whether claims are prepared, so that the driver must stay",
    ),
    "sim": ("dra.cli.sim", "a simulated cluster to try the driver in"),
}
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
# What a write to a file without name, stdout, can end with.
_OUTPUT_FAILED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code is the answer.

    0: done. 1: the command failed, with `error: CODE: ...` on stderr. 2: what the user wrote is wrong. A command
    may give codes of its own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _write_any_text()
    try:
        try:
            return _run(words)
        finally:
            # Now, and not when the interpreter ends, where it could only complain. None: stdout was closed by the caller.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has enough. Python would complain once more at exit.
        _drop_output()
        return EXIT_ERROR
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_FAILED:
            raise
        _drop_output()
        print_error(
            HostError(
                "DRA-CLI-OUTPUT",
                f"cannot write the output: {error.strerror}",
                remedy="It is not complete. Free space, or send it somewhere else.",
            )
        )
        return EXIT_ERROR


def _run(words: Sequence[str]) -> int:
    parser = _parser(words)
    args = parser.parse_args(words)
    run = getattr(args, "run", None)
    if run is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        return int(run(args))
    except DraError as error:
        print_error(error)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _write_any_text() -> None:
    """What the terminal's encoding does not have (in a locale of ASCII: …) is escaped: it must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Send what is still to be written nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: DraError) -> None:
    """Print an error for people: the code, what happened, what to do."""
    print(f"error: {error.code}: {error.message}", file=sys.stderr)
    if error.remedy:
        print(f"  {error.remedy}", file=sys.stderr)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    called = Path(sys.argv[0]).name
    name = "kubectl dra" if called.startswith("kubectl-dra") else "dra"
    parser = argparse.ArgumentParser(
        prog=name, description="A Kubernetes Dynamic Resource Allocation driver for NVIDIA GPUs."
    )
    parser.add_argument("--version", action="version", version=f"dra {__version__}")
    subparsers: Subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for command, (module, help_text) in COMMANDS.items():
        if command != chosen:
            subparsers.add_parser(command, help=help_text, add_help=False)
            continue
        loaded = importlib.import_module(module)
        before = set(subparsers.choices)
        loaded.add_parser(subparsers)
        for added in set(subparsers.choices) - before:
            subparsers.choices[added].set_defaults(run=loaded.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
