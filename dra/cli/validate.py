"""`dra validate`: check manifests offline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dra.cli.common_flags import Subparsers
from dra.values.words import counted

if TYPE_CHECKING:
    from dra.diagnose.validate_fit import KnownDevice
    from dra.diagnose.validate_model import Report


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "validate",
        help="check manifests offline",
        description="Check ResourceClaims, templates, DeviceClasses, pods and workloads as the API server, the scheduler "
        "and the driver would, without a cluster.",
        epilog="Exit code 0: clean; 1: errors (with --strict: or warnings); 2: something could not be read.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="FILE", help="a file (YAML or JSON), a folder, or - for standard input"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")


def run(args: argparse.Namespace) -> int:
    """Check and print."""
    from dra.diagnose.validate import validate_paths
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    report = validate_paths(args.paths, known_devices=known_devices)
    if args.output == "json":
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_text(report)
    return report.exit_code(strict=args.strict)


def _print_text(report: Report) -> None:
    for finding in report.findings:
        print(finding)
        for line in finding.excerpt:
            print(f"    {line}")
        if finding.remedy:
            print(f"    {finding.remedy}")
    counts = ", ".join(counted(report.count(each), each) for each in ("error", "warning"))
    skipped = f" ({report.skipped} of other kinds not checked)" if report.skipped else ""
    print(f"{counted(report.objects, 'object')} checked{skipped}: {counts}", file=sys.stderr)


def known_devices() -> Iterator[KnownDevice]:
    """Give what the machines of the simulator publish: their GPUs, and every MIG placement of each model."""
    import tempfile
    from dataclasses import replace
    from pathlib import Path

    from dra.diagnose.validate_fit import KnownDevice
    from dra.host.paths import HostPaths
    from dra.inventory.model import MigDevice
    from dra.inventory.scan import scan
    from dra.nvml.node import session_of
    from dra.sim.node import SimulatedNode
    from dra.sim.profiles import PROFILES
    from dra.slices.devices import gpu_device, mig_device

    for machine in PROFILES:
        with tempfile.TemporaryDirectory(prefix="dra-validate-") as root:
            node = SimulatedNode(machine, Path(root), real_nodes=False)
            paths = HostPaths(**node.paths_kwargs())
            session = session_of(paths, library=node.library)
            try:
                inventory = scan(session, paths, profiles=True)
            finally:
                session.close()
        models = set()
        for gpu in inventory.gpus:
            yield KnownDevice(machine, gpu_device(gpu, inventory, []))
            if gpu.product_name in models:
                continue
            models.add(gpu.product_name)
            for profile in gpu.mig_profiles:
                for start, size in profile.placements:
                    partition = MigDevice(f"MIG-{gpu.uuid}", profile, 0, 0, start, size)
                    parent = replace(gpu, mig_enabled=True)
                    yield KnownDevice(machine, mig_device(parent, partition, inventory, []))
