"""`dra webhook`: the admission webhook."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dra.cli.common_flags import Subparsers, add_log_arguments, add_setting
from dra.cli.service import configure_log, serve

if TYPE_CHECKING:
    from dra.api.fractions import FractionRules

# The second part of a resource's name.
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command; each flag has an environment variable."""
    env = os.environ
    parser = subparsers.add_parser(
        "webhook",
        help="the admission webhook",
        description="Checks claims, templates and DeviceClasses when they are written, and turns fractions of GPUs "
        "(nvidia.com/gpu: 0.2) into claims, where a namespace or an object asks for it.",
    )
    add_setting(parser, env, "--port", "8443", "TCP port (default 8443)", read=int)
    add_setting(
        parser, env, "--tls-cert-file", "/certs/tls.crt",
        "certificate in PEM; it is loaded again when it changes (default /certs/tls.crt)", metavar="FILE",
    )  # fmt: skip
    add_setting(
        parser, env, "--tls-private-key-file", "/certs/tls.key", "its key (default /certs/tls.key)", metavar="FILE"
    )  # fmt: skip
    add_setting(
        parser, env, "--gpu-resources", "nvidia.com/gpu",
        "resources of which a fraction is a share of a card (default nvidia.com/gpu)", metavar="NAMES",
    )  # fmt: skip
    add_setting(
        parser, env, "--memory-resources", "nvidia.com/gpumem",
        "resources that are GPU memory, in MiB without suffix (default nvidia.com/gpumem)", metavar="NAMES",
    )  # fmt: skip
    add_setting(
        parser, env, "--shares-per-card", "100",
        "into how many shares the fleet's shared cards are cut: --sharing N of the plugin (default 100)",
        read=int, metavar="N",
    )  # fmt: skip
    add_log_arguments(parser, env)


def rules_from(args: argparse.Namespace) -> FractionRules:
    """Give the rules that the flags ask for.

    Raises:
        ConfigError: DRA-FLAG-….
    """
    from dra.api.fractions import FractionRules
    from dra.api.gpu_settings import MAX_SHARES
    from dra.errors import ConfigError
    from dra.values import is_dns_subdomain

    names: dict[str, frozenset[str]] = {}
    for flag, text in (
        ("--gpu-resources", args.gpu_resources),
        ("--memory-resources", args.memory_resources),
    ):
        names[flag] = frozenset(part.strip() for part in text.split(",") if part.strip())
        for name in names[flag]:
            domain, _, word = name.partition("/")
            if not is_dns_subdomain(domain) or not re.fullmatch(_WORD, word):
                raise ConfigError(
                    "DRA-FLAG-VALUE",
                    f"{flag}: {name[:80]!r} is no name of an extended resource",
                    remedy="Write DOMAIN/NAME, such as nvidia.com/gpu.",
                )
    if both := names["--gpu-resources"] & names["--memory-resources"]:
        raise ConfigError(
            "DRA-FLAG-VALUE",
            f"{', '.join(sorted(both))} cannot be both a GPU and memory",
            remedy="Give it once.",
        )
    if not 1 <= args.shares_per_card <= MAX_SHARES:
        raise ConfigError(
            "DRA-FLAG-RANGE",
            f"--shares-per-card cannot be {args.shares_per_card}",
            remedy=f"Use a number from 1 to {MAX_SHARES}.",
        )
    return FractionRules(names["--gpu-resources"], names["--memory-resources"], args.shares_per_card)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from dra.webhook.certificate import Certificate
    from dra.webhook.server import WebhookServer

    configure_log(args)
    rules = rules_from(args)
    certificate = Certificate(Path(args.tls_cert_file), Path(args.tls_private_key_file))
    return serve(lambda: WebhookServer(certificate, rules=rules, port=args.port))
