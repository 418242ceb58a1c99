"""`dra plugin`: the node daemon.

Every flag and environment name of NVIDIA's gpu-kubelet-plugin parses; those that do nothing here are named in one
warning. A flag wins over its environment variable.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.cli.common_flags import Subparsers

if TYPE_CHECKING:
    from dra.plugin.machine import Machine
    from dra.plugin.settings import PluginSettings

# Of NVIDIA's plugin, parsed and without effect.
_NO_EFFECT = (
    ("--image-name", "IMAGE_NAME"),
    ("--pprof-path", "PPROF_PATH"),
    ("--image-pull-secrets", "IMAGE_PULL_SECRETS"),
    ("--image-pull-policy", "IMAGE_PULL_POLICY"),
    ("--service-account-name", "SERVICE_ACCOUNT_NAME"),
    ("--log-flush-frequency", "LOG_FLUSH_FREQUENCY"),
    ("--vmodule", "VMODULE"),
    ("--log-json-info-buffer-size", "LOG_JSON_INFO_BUFFER_SIZE"),
    ("--log-json-split-stream", "LOG_JSON_SPLIT_STREAM"),
    ("--log-text-info-buffer-size", "LOG_TEXT_INFO_BUFFER_SIZE"),
    ("--log-text-split-stream", "LOG_TEXT_SPLIT_STREAM"),
)

# From this verbosity on, Kubernetes components log what we call debug.
_DEBUG_VERBOSITY = 6


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag, the environment variables that stand for it, what it is when neither is given, and its help."""

    name: str
    env: tuple[str, ...]
    default: str
    help: str
    choices: tuple[str, ...] = ()
    kind: Callable[[str], Any] = str


_FLAGS = (
    _Flag("--node-name", ("NODE_NAME",), "", "name of the Node this runs on"),
    _Flag("--driver-name", ("DRA_DRIVER_NAME",), "gpu.nvidia.com", "name of the DRA driver"),
    _Flag("--namespace", ("NAMESPACE",), "default", "namespace this runs in"),
    _Flag("--cdi-root", ("CDI_ROOT",), "", "directory for CDI specs (default /var/run/cdi)"),
    _Flag("--nvidia-driver-root", ("NVIDIA_DRIVER_ROOT", "HOST_DRIVER_ROOT"), "", "root of the NVIDIA driver on the host (default /)"),
    _Flag("--container-driver-root", ("DRIVER_ROOT_CTR_PATH",), "", "where that root is mounted in this container (default /driver-root if it exists)"),
    _Flag("--host-root", ("HOST_ROOT",), "", "prefix of the host's files: a simulated node's directory"),
    _Flag("--nvidia-cdi-hook-path", ("NVIDIA_CDI_HOOK_PATH",), "", "host path of nvidia-cdi-hook"),
    _Flag("--kubelet-registrar-directory-path", ("KUBELET_REGISTRAR_DIRECTORY_PATH",), "", "the kubelet's registry directory (default /var/lib/kubelet/plugins_registry)"),
    _Flag("--kubelet-plugins-directory-path", ("KUBELET_PLUGINS_DIRECTORY_PATH",), "", "the kubelet's plugin directory (default /var/lib/kubelet/plugins)"),
    _Flag("--healthcheck-port", ("HEALTHCHECK_PORT",), "-1", "TCP port of the gRPC health service; negative: none", kind=int),
    _Flag("--additional-xids-to-ignore", ("ADDITIONAL_XIDS_TO_IGNORE",), "", "XIDs that do not make a device unhealthy"),
    _Flag("--health-effects", ("HEALTH_EFFECTS",), "", "effects of health taints that differ: gpu-lost=NoExecute,thermal=None"),
    _Flag("--claim-status", ("CLAIM_STATUS",), "true", "write to status.devices of claims which hardware they got", choices=("true", "false")),
    _Flag("--device-metadata", ("DEVICE_METADATA",), "", "give containers files that say what their devices are (default: as the gate DeviceMetadata says, else false)", choices=("", "true", "false")),
    _Flag("--http-endpoint", ("HTTP_ENDPOINT",), "", "address of the metrics server"),
    _Flag("--metrics-path", ("METRICS_PATH",), "/metrics", "path of the metrics"),
    _Flag("--metrics-interval", ("METRICS_INTERVAL",), "1", "seconds that a reading of the GPUs is given again without asking them", kind=float),
    _Flag("--kubeconfig", ("KUBECONFIG",), "", "kubeconfig (default: the pod's service account)"),
    _Flag("--kube-api-qps", ("KUBE_API_QPS",), "5", "requests a second to the API server, except for claims", kind=float),
    _Flag("--kube-api-burst", ("KUBE_API_BURST",), "10", "requests at once before the rate counts", kind=int),
    _Flag("--feature-gates", ("FEATURE_GATES",), "", "NVIDIA's gates: X=false turns X off, X=true is the default"),
    _Flag("--driver-capabilities", ("DRIVER_CAPABILITIES",), "", "which of the driver's files containers get (default: all but display)"),
    _Flag("--cdi-exposure", ("CDI_EXPOSURE",), "auto", "how driver libraries reach the container", choices=("auto", "hooks", "soname", "ld-library-path")),
    _Flag("--nvml-hold", ("NVML_HOLD",), "auto", "how long the NVML session stays open", choices=("auto", "always", "never")),
    _Flag("--mig-mode", ("MIG_MODE",), "", "partitions: made on demand, only those that exist, or none (default: as the gate DynamicMIG says, else dynamic; a GPU with partitions made by hand is static)", choices=("", "dynamic", "static", "none")),
    _Flag("--node-policies", ("NODE_POLICIES",), "true", "whether GpuNodePolicies lie over the flags", choices=("true", "false")),
    _Flag("--inventory-interval", ("INVENTORY_INTERVAL",), "30", "seconds between two looks at the hardware", kind=float),
    _Flag("--start-jitter", ("START_JITTER",), "0", "publish at a random moment of so many seconds after start (big fleets)", kind=float),
    _Flag("--dev-char-links", ("DEV_CHAR_LINKS",), "true", "links below /dev/char, so that systemd reloads take no GPU from containers", choices=("true", "false")),
    _Flag("--node-labels", ("NODE_LABELS",), "none", "GPU feature discovery's labels: through NFD's feature file, on the Node (needs the right to patch it), or none", choices=("none", "nfd", "api")),
    _Flag("--clean-up-mps-deployments", ("CLEAN_UP_MPS_DEPLOYMENTS",), "false", "delete Deployments that NVIDIA's driver left for MPS, when their imported claim ends", choices=("true", "false")),
    _Flag("--log-level", ("LOG_LEVEL",), "", "debug, info, warning or error", choices=("", "debug", "info", "warning", "error")),
    _Flag("--logging-format", ("LOGGING_FORMAT",), "json", "json, or text for people", choices=("json", "text")),
    _Flag("--simulate", ("DRA_SIMULATE",), "", "run on a simulated machine of this profile below --host-root"),
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Add `plugin` to a command line."""
    parser = subparsers.add_parser(
        "plugin", help="run the node daemon", description="Publishes this node's GPUs and prepares claims."
    )
    add_arguments(parser, os.environ)
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Add all flags; their defaults come from the environment."""
    for flag in _FLAGS:
        value = next((environment[name] for name in flag.env if environment.get(name)), flag.default)
        parser.add_argument(
            flag.name,
            default=value,
            type=flag.kind,
            choices=flag.choices or None,
            metavar=None if flag.choices else flag.name.rpartition("-")[2].upper(),
            help=f"{flag.help} [{', '.join(flag.env)}]",
        )
    shares = next(
        (environment[name] for name in ("SHARING", "CONSUMABLE_SHARES") if environment.get(name)), "disabled"
    )
    parser.add_argument(
        "--sharing", "--consumable-shares", dest="sharing", default=shares, metavar="KIND",
        help="how claims may share a GPU: exclusive, memory, unlimited or a number of shares, also for single GPUs "
        "(exclusive,NVIDIA-L40S=10) and with /none, /cooperative or /required for the limits [SHARING, CONSUMABLE_SHARES]",
    )  # fmt: skip
    parser.add_argument(
        "-v",
        "--v",
        dest="verbosity",
        type=int,
        default=environment.get("LOG_VERBOSITY") or "0",
        help=argparse.SUPPRESS,
    )
    for name, variable in _NO_EFFECT:
        parser.add_argument(
            name, default=environment.get(variable, ""), nargs="?", const="true", help=argparse.SUPPRESS
        )


def settings_from(args: argparse.Namespace, environment: Mapping[str, str]) -> PluginSettings:
    """Give checked `PluginSettings`. Raises ConfigError."""
    from dra.health.policy import parse_effects
    from dra.plugin.settings import (
        PluginSettings,
        check_settings,
        gates_without_effect,
        gpu_settings_of,
        mig_mode_of,
        parse_crash_point,
        parse_gates,
        parse_xids,
    )

    gates = parse_gates(args.feature_gates)
    ignored = [name for name, _ in _NO_EFFECT if getattr(args, name.removeprefix("--").replace("-", "_"))]
    ignored += [f"--feature-gates {name}" for name in gates_without_effect(gates)]
    settings = PluginSettings(
        node_name=args.node_name,
        driver_name=args.driver_name,
        namespace=args.namespace,
        pod_uid=environment.get("POD_UID", ""),
        host_root=Path(args.host_root or "/"),
        driver_root_host=args.nvidia_driver_root or "/",
        driver_root=_driver_root(args),
        plugins_dir=_path(args.kubelet_plugins_directory_path),
        registry_dir=_path(args.kubelet_registrar_directory_path),
        cdi_root=_path(args.cdi_root),
        cdi_hook_path=args.nvidia_cdi_hook_path,
        cdi_exposure=args.cdi_exposure,
        driver_capabilities=args.driver_capabilities,
        nvml_hold=args.nvml_hold,
        mig_mode=mig_mode_of(args.mig_mode, gates),
        gpus=gpu_settings_of(args.sharing, gates),
        follow_policies=args.node_policies == "true",
        inventory_interval_seconds=args.inventory_interval,
        start_jitter_seconds=args.start_jitter,
        kubeconfig=args.kubeconfig,
        kube_qps=args.kube_api_qps,
        kube_burst=args.kube_api_burst,
        healthcheck_port=args.healthcheck_port,
        http_endpoint=args.http_endpoint,
        metrics_path=args.metrics_path,
        metrics_interval_seconds=args.metrics_interval,
        ignored_xids=parse_xids(args.additional_xids_to_ignore),
        health_effects=parse_effects(args.health_effects),
        claim_status=args.claim_status != "false",
        device_metadata=args.device_metadata == "true"
        or (not args.device_metadata and gates.get("DeviceMetadata", False)),
        dev_char_links=args.dev_char_links != "false",
        node_labels=args.node_labels,
        clean_up_mps_deployments=args.clean_up_mps_deployments == "true",
        gates=gates,
        ignored=tuple(ignored),
        simulate=args.simulate,
        crash_at=parse_crash_point(environment.get("DRA_CRASH_AT", ""), simulate=args.simulate),
    )
    check_settings(settings)
    return settings


def _driver_root(args: argparse.Namespace) -> Path | None:
    from dra.plugin.settings import CONTAINER_DRIVER_ROOT

    if args.container_driver_root:
        return Path(args.container_driver_root)
    return CONTAINER_DRIVER_ROOT if not args.simulate and CONTAINER_DRIVER_ROOT.is_dir() else None


def _path(text: str) -> Path | None:
    return Path(text).absolute() if text else None


def run(args: argparse.Namespace) -> int:
    """Run the daemon until it is told to stop; ends the process."""
    # Thousands of objects that stay are made now: looking through them again and again is a tenth of the start.
    gc.disable()
    from dra.telemetry import log

    level = args.log_level or ("debug" if args.verbosity >= _DEBUG_VERBOSITY else "info")
    log.configure(level=level, console=args.logging_format == "text")
    from dra.errors import DraError
    from dra.plugin.signals import SignalQueue, end_process

    logger = log.get_logger()
    signals = SignalQueue()
    status = 1
    try:
        settings = settings_from(args, os.environ)
        machine = _machine(settings)
        from dra.plugin.daemon import Daemon

        status = Daemon(settings, machine).run(signals)
    except DraError as error:
        logger.error("plugin_not_started", **log.error_fields(error))  # noqa: TRY400 - for people, no traceback
    except Exception as error:
        logger.exception("plugin_crashed", **log.error_fields(error))
    end_process(status)


def _machine(settings: PluginSettings) -> Machine:
    """Give the real machine, or a simulated one: only the command line knows the simulator."""
    from dra.plugin.machine import real_machine

    if not settings.simulate:
        return real_machine(settings)
    from dra.cli.simulated import simulated_machine

    return simulated_machine(settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dra plugin` alone: `python -m dra.cli.plugin`."""
    parser = argparse.ArgumentParser(prog="dra plugin")
    add_arguments(parser, os.environ)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
