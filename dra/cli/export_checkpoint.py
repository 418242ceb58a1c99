"""`dra export-checkpoint`: hand this node's prepared claims back to NVIDIA's driver."""

from __future__ import annotations

import argparse
import sys

from dra.cli.common_flags import Subparsers
from dra.cli.node_view import add_node_arguments, node_view
from dra.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    from dra.prepare.imports.checkpoint import RELEASES

    parser = subparsers.add_parser(
        "export-checkpoint",
        help="hand this node's prepared claims back to NVIDIA's driver",
        description="Write checkpoint.json as a release of NVIDIA's driver reads it, from this node's claim records, and "
        "put the records by. Run it on the node after this driver was taken off and before NVIDIA's is put on "
        "(docs/migration.md).",
        epilog="Exit code 0: all claims went in; 1: some could not, and nothing was written without --force.",
    )
    parser.add_argument("--release", choices=RELEASES, default=RELEASES[-1], help=f"default: {RELEASES[-1]}")
    parser.add_argument("--dry-run", action="store_true", help="print the checkpoint, change nothing")
    parser.add_argument("--force", action="store_true", help="leave out the claims that cannot go in")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read the records, look at the hardware, write."""
    from dra.diagnose.doctor.context import NodeContext
    from dra.diagnose.doctor.kubelet_rung import answers, registration_sockets
    from dra.diagnose.doctor.published_rungs import records_on_disk
    from dra.host.boot import boot_id
    from dra.prepare.imports.checkpoint import encode_checkpoint
    from dra.prepare.imports.export import export_records, write_export
    from dra.telemetry.log import configure

    configure(level="error", console=True)
    with node_view(args) as view:
        ctx = NodeContext(view.paths, view.name, driver=args.driver_name, library=view.library)
        serving = [path for path in registration_sockets(ctx) if answers(path)]
        if serving and not args.dry_run:
            raise ConfigError(
                "DRA-EXPORT-DRIVER-RUNS",
                f"a driver serves {serving[0]}: what it prepares meanwhile would be lost",
                remedy="Take the driver's pod off this node first; claims stay prepared.",
            )
        found = records_on_disk(ctx)
        exported = export_records(
            (each.record for each in found if each.record is not None),
            ctx.inventory,
            boot_id=boot_id(view.paths),
            release=args.release,
        )
        refused = [*exported.refused, *((each.uid, each.trouble) for each in found if each.record is None)]
        for claim, reason in refused:
            print(f"left out: claim {claim}: {reason}", file=sys.stderr)
        if args.dry_run:
            print(encode_checkpoint(exported.checkpoint, release=args.release).decode())
            return 1 if refused else 0
        if refused and not args.force:
            print("nothing was written: end those claims' pods first, or give --force", file=sys.stderr)
            return 1
        kept = write_export(exported, view.paths.state_dir(args.driver_name), release=args.release)
    print(f"{len(exported.claims)} claims for NVIDIA's driver {args.release}; our records are in {kept}")
    return 0
