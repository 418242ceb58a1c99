"""What `dra plugin` can be told: one frozen value, made from flags and environment, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from dra.api.gpu_settings import NO_SETTINGS, NodeSettings, parse_sharing
from dra.errors import ConfigError
from dra.health.policy import Effect
from dra.slices.partitions import MigMode
from dra.values import is_dns_label, is_dns_subdomain

DRIVER_NAME = "gpu.nvidia.com"
# NVIDIA's driver mounts the driver root here in its container.
CONTAINER_DRIVER_ROOT = Path("/driver-root")

# Where neither the flag nor NVIDIA's gate says anything.
DEFAULT_MIG_MODE: MigMode = "dynamic"
MIG_MODES: tuple[MigMode, ...] = ("dynamic", "static", "none")
NVML_HOLDS = ("auto", "always", "never")
NODE_LABELS = ("none", "nfd", "api")
EXPOSURES = ("auto", "hooks", "soname", "ld-library-path")

# From and to. One look a second is what a GPU's driver stands; a day is never.
_INTERVAL_SECONDS = (1.0, 86_400.0)
_METRICS_SECONDS = (0.0, 3_600.0)
_JITTER_SECONDS = (0.0, 3_600.0)
# 0: no limit.
_QPS = (0.0, 10_000.0)
_BURST = (1, 10_000)

# NVIDIA's gates. True: what it asks for is built in here. `=true` is how things are, but for PASSTHROUGH, which gives
# workloads a PCI function itself: that an administrator must have said.
PASSTHROUGH = "PassthroughSupport"
GATES: Mapping[str, bool] = {
    "TimeSlicingSettings": True,
    "MPSSupport": True,
    "DynamicMIG": True,
    "NVMLDeviceHealthCheck": True,
    "DeviceMetadata": True,
    "ConsumableShares": True,
    "DRAListTypeAttributes": False,
    PASSTHROUGH: True,
    "FabricManagerPartitioning": False,
    "IMEXDaemonsWithDNSNames": False,
    "ComputeDomainCliques": False,
    "CrashOnNVLinkFabricErrors": False,
    "HostManagedIMEXDaemon": False,
    "AllAlpha": False,
    "AllBeta": False,
    "ContextualLogging": False,
    "LoggingAlphaOptions": False,
    "LoggingBetaOptions": False,
}


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Everything the node daemon is told. Paths are as this process sees them.

    Args:
        node_name: the Node's name.
        driver_name: name of the driver, and of its socket and state directories.
        pod_uid: UID of the pod that this runs in; empty outside of a pod.
        host_root: prefix of the host's files; not `/` for simulated nodes and special mounts.
        driver_root_host: the NVIDIA driver's root as the host spells it.
        driver_root: the same as this process sees it; None: found out.
        plugins_dir, registry_dir, cdi_root: None: the usual places.
        gpus: what the flags say of single GPUs: how they are shared.
        follow_policies: whether GpuNodePolicies lie over the flags.
        healthcheck_port: TCP port of the probe; negative: none.
        health_effects: by key of a health taint, the effect that replaces the usual one.
        dev_char_links, node_labels, clean_up_mps_deployments: see `dra.plugin.node_upkeep`.
        device_metadata: give containers files that say what their devices are.
        claim_status: write to status.devices of claims which hardware they got.
        gates: NVIDIA's feature gates that were set.
        ignored: flags that were given and have no effect, for a warning.
        crash_at: name of a journal step at which a simulated daemon kills itself, and the how-manieth time.
    """

    node_name: str
    driver_name: str = DRIVER_NAME
    namespace: str = "default"
    pod_uid: str = ""
    host_root: Path = Path("/")
    driver_root_host: str = "/"
    driver_root: Path | None = None
    plugins_dir: Path | None = None
    registry_dir: Path | None = None
    cdi_root: Path | None = None
    cdi_hook_path: str = ""
    cdi_exposure: str = "auto"
    driver_capabilities: str = ""
    nvml_hold: str = "auto"
    mig_mode: MigMode = DEFAULT_MIG_MODE
    gpus: NodeSettings = NO_SETTINGS
    follow_policies: bool = True
    inventory_interval_seconds: float = 30.0
    start_jitter_seconds: float = 0.0
    kubeconfig: str = ""
    kube_qps: float = 5.0
    kube_burst: int = 10
    healthcheck_port: int = -1
    http_endpoint: str = ""
    metrics_path: str = "/metrics"
    metrics_interval_seconds: float = 1.0
    ignored_xids: tuple[int, ...] = ()
    health_effects: Mapping[str, Effect] = field(default_factory=dict)
    claim_status: bool = True
    device_metadata: bool = False
    dev_char_links: bool = True
    node_labels: str = "none"
    clean_up_mps_deployments: bool = False
    gates: Mapping[str, bool] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    simulate: str = ""
    crash_at: tuple[str, int] | None = None


def check_settings(settings: PluginSettings) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: DRA-FLAG-…; names the flag.
    """
    _check_names(settings)
    if settings.healthcheck_port > 65535:
        raise ConfigError(
            "DRA-FLAG-PORT",
            f"--healthcheck-port {settings.healthcheck_port} is not a port",
            remedy="Use 1 to 65535, 0 for any that is free, or a negative number for none.",
        )
    _check_http(settings)
    # argparse does not check choices that come from the environment.
    for name, value, allowed in (
        ("--nvml-hold", settings.nvml_hold, NVML_HOLDS),
        ("--mig-mode", settings.mig_mode, MIG_MODES),
        ("--cdi-exposure", settings.cdi_exposure, EXPOSURES),
        ("--node-labels", settings.node_labels, NODE_LABELS),
    ):
        if value not in allowed:
            raise ConfigError(
                "DRA-FLAG-VALUE", f"{name} cannot be {value!r}", remedy=f"Use one of {', '.join(allowed)}."
            )
    for name, number, (least, most) in (
        ("--inventory-interval", settings.inventory_interval_seconds, _INTERVAL_SECONDS),
        ("--start-jitter", settings.start_jitter_seconds, _JITTER_SECONDS),
        ("--metrics-interval", settings.metrics_interval_seconds, _METRICS_SECONDS),
        ("--kube-api-qps", settings.kube_qps, _QPS),
        ("--kube-api-burst", settings.kube_burst, _BURST),
    ):
        # Not a number is in no range.
        if not least <= number <= most:
            raise ConfigError(
                "DRA-FLAG-RANGE",
                f"{name} cannot be {str(number)[:40]}",
                remedy=f"Use a number from {least:g} to {most:g}.",
            )


def _check_names(settings: PluginSettings) -> None:
    if not settings.node_name:
        raise ConfigError(
            "DRA-FLAG-NODE-NAME",
            "the name of the node is not known",
            remedy="Give --node-name or set NODE_NAME from spec.nodeName through the downward API.",
        )
    if not is_dns_subdomain(settings.node_name):
        raise ConfigError(
            "DRA-FLAG-NODE-NAME",
            f"--node-name {settings.node_name[:300]!r} is not the name of a node",
            remedy="Give it as kubectl get nodes shows it: a DNS name in lower case, at most 253 characters.",
        )
    if not is_dns_subdomain(settings.driver_name, limit=63):
        raise ConfigError(
            "DRA-FLAG-DRIVER-NAME",
            f"--driver-name {settings.driver_name[:300]!r} is not a DNS name of at most 63 characters",
            remedy=f"Leave it out for {DRIVER_NAME}, or give a DNS name in lower case.",
        )
    # Source: pods' UIDs; mirror pods have ones without dashes.
    if settings.pod_uid and not is_dns_label(settings.pod_uid):
        raise ConfigError(
            "DRA-FLAG-POD-UID",
            f"POD_UID {settings.pod_uid[:300]!r} is not the UID of a pod",
            remedy="Set it from metadata.uid through the downward API, or not at all.",
        )


def _check_http(settings: PluginSettings) -> None:
    if not settings.http_endpoint:
        return
    from dra.telemetry.http import parse_endpoint

    parse_endpoint(settings.http_endpoint)
    path = settings.metrics_path
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or set(path) & set("? #"):
        raise ConfigError(
            "DRA-FLAG-METRICS-PATH",
            f"--metrics-path {path[:200]!r} is not the path of a page",
            remedy="Give one that begins with /, as /metrics does.",
        )


def mig_mode_of(asked: str, gates: Mapping[str, bool]) -> MigMode:
    """Give the mode that a flag, or else NVIDIA's gate DynamicMIG, asks for; `check_settings` refuses nonsense."""
    if asked:
        return cast("MigMode", asked)
    gate = gates.get("DynamicMIG")
    if gate is None:
        return DEFAULT_MIG_MODE
    return "dynamic" if gate else "static"


def gpu_settings_of(sharing: str, gates: Mapping[str, bool]) -> NodeSettings:
    """Give what `--sharing` says of the GPUs; nothing is shared where NVIDIA's gate ConsumableShares is off.

    Raises:
        ConfigError: DRA-SHARING-KIND.
    """
    asked = parse_sharing(sharing)
    return asked if gates.get("ConsumableShares", True) else NO_SETTINGS


def offers_passthrough(gates: Mapping[str, bool]) -> bool:
    """Whether GPUs are offered to virtual machines too: only where NVIDIA's gate says so."""
    return gates.get(PASSTHROUGH, False)


def watches_health(gates: Mapping[str, bool]) -> bool:
    """Whether GPUs are watched: always, unless NVIDIA's gate turns it off."""
    return gates.get("NVMLDeviceHealthCheck", True)


def parse_gates(text: str) -> dict[str, bool]:
    """Read `--feature-gates`: `Name=true,Other=false`.

    Raises:
        ConfigError: DRA-FEATURE-GATE: an unknown name or value.
    """
    found: dict[str, bool] = {}
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        name, equals, value = entry.partition("=")
        if not equals or value.lower() not in ("true", "false"):
            raise ConfigError(
                "DRA-FEATURE-GATE", f"{entry!r} in --feature-gates is not NAME=true or NAME=false"
            )
        if name not in GATES:
            raise ConfigError(
                "DRA-FEATURE-GATE",
                f"unknown feature gate {name!r}",
                remedy=f"Known are {', '.join(sorted(GATES))}.",
            )
        found[name] = value.lower() == "true"
    return found


def gates_without_effect(gates: Mapping[str, bool]) -> tuple[str, ...]:
    """Give the gates that were set and change nothing here: those of features that this driver does not have."""
    return tuple(name for name in sorted(gates) if not GATES[name])


def parse_xids(text: str) -> tuple[int, ...]:
    """Read a list of XIDs with commas.

    Raises:
        ConfigError: DRA-FLAG-XIDS.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError("DRA-FLAG-XIDS", f"{text!r} is not a list of XID numbers with commas") from error


def parse_crash_point(text: str, *, simulate: str) -> tuple[str, int] | None:
    """Read `DRA_CRASH_AT`: `step` or `step#count`; ignored on a real node.

    Raises:
        ConfigError: DRA-FLAG-CRASH.
    """
    if not text or not simulate:
        return None
    step, mark, count = text.partition("#")
    if mark and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError("DRA-FLAG-CRASH", f"DRA_CRASH_AT={text!r} is not STEP or STEP#COUNT")
    return step, int(count) if mark else 1


def describe_ignored(names: Iterable[str]) -> str:
    """Give the text of the warning about settings without effect."""
    return ", ".join(names) + ": accepted, without effect in this version"
