"""The kubelet: its version and gates, its directories, the driver's sockets, and who else registered the GPUs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dra.api.versions import NEWEST_KUBERNETES, OLDEST_KUBERNETES
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, error, note, warning
from dra.diagnose.explain.cluster import POD, Json
from dra.host.paths import strip_root

GATE = "DynamicResourceAllocation"
# From this version on the gate is on by default. Source: kube_features.go of 1.34.
GATE_DEFAULT_ON = (1, 34)
# Kubelets that lose an idle driver. Source: kubernetes/kubernetes#133920, fixed in 1.34.2.
BAD_KUBELETS = {(1, 34, 0), (1, 34, 1)}
CONFIG_FILES = (
    "/var/lib/kubelet/config.yaml",
    "/etc/kubernetes/kubelet/config.json",
    "/etc/kubernetes/kubelet-config.yaml",
)
_CONNECT_SECONDS = 2.0
_PLUGIN_SOCKET = re.compile(r"nvidia.*\.sock", re.ASCII)
GPU_RESOURCES = re.compile(r"nvidia\.com/(?:gpu(?:\.shared)?|mig-[\w.+-]+)", re.ASCII)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Read `v1.34.1-gke.100`; None for what is no version."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def version_findings(text: str, who: str) -> Iterator[Finding]:
    """Give what is known to be wrong with a kubelet's version."""
    version = parse_version(text)
    if version is None:
        return
    if version[:2] < OLDEST_KUBERNETES:
        oldest = ".".join(map(str, OLDEST_KUBERNETES))
        yield error(
            "DRA-KUBELET-TOO-OLD",
            f"{who} is {text}; the driver needs {oldest}",
            f"Upgrade it to {oldest} or later.",
        )
    if version[:2] > NEWEST_KUBERNETES:
        newest = ".".join(map(str, NEWEST_KUBERNETES))
        yield note("DRA-KUBELET-NEW", f"{who} is {text}; this driver was tried up to {newest}")
    if version in BAD_KUBELETS:
        yield warning(
            "DRA-KUBELET-1340",
            f'{who} is {text}, which loses a driver after half an hour without calls ("driver is not registered")',
            "Upgrade it to 1.34.2 or later; until then a restart of the plugin's pod registers it again.",
        )
    if version[:2] == (1, 32):
        yield note(
            "DRA-KUBELET-1320", f"{who} is {text}: no two instances at once; the chart sets maxSurge 0 for it"
        )


def look_at_kubelet(ctx: NodeContext) -> Looked:
    """Look at the kubelet and at what is registered with it."""
    paths = ctx.paths
    findings: list[Finding] = list(version_findings(ctx.kubelet_version, "the kubelet"))
    process = kubelet_process(ctx)
    findings += _root_findings(ctx, process)
    findings += _gate_findings(ctx, process)
    findings += device_plugin_findings(ctx)
    if not paths.kubelet_registry_dir.is_dir():
        findings.append(
            error(
                "DRA-KUBELET-REGISTRY-MISSING",
                f"the kubelet's registry directory {paths.kubelet_registry_dir} is not there",
                "Start the kubelet, or set --kubelet-registrar-directory-path to <its root dir>/plugins_registry.",
            )
        )
        return Looked("", tuple(findings))
    sockets = registration_sockets(ctx)
    answering = [path for path in sockets if answers(path)]
    if not answering:
        dead = f"; nobody answers on {', '.join(path.name for path in sockets)}" if sockets else ""
        findings.append(
            error(
                "DRA-DRIVER-NOT-REGISTERED",
                f"no instance of {ctx.driver} serves the kubelet in {paths.kubelet_registry_dir}{dead}",
                "Start the driver's pod on this node: kubectl get pods -A -l dra-driver-nvidia-gpu-component=kubelet-plugin; its log says why it ends.",
            )
        )
    elif len(answering) < len(sockets):
        left = sorted(path.name for path in set(sockets) - set(answering))
        findings.append(
            note(
                "DRA-SOCKET-STALE",
                f"nobody answers on {', '.join(left)}: left by a killed instance, the next start removes it",
            )
        )
    version = f"kubelet {ctx.kubelet_version}, " if ctx.kubelet_version else ""
    return Looked(
        f"{version}{len(answering)} instance{'s' * (len(answering) != 1)} of {ctx.driver} at its registry",
        tuple(findings),
    )


def kubelet_process(ctx: NodeContext) -> list[str] | None:
    """Give the kubelet's command line; None where its process is not seen."""
    try:
        entries = [entry for entry in ctx.paths.proc.iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    for entry in entries:
        try:
            if (entry / "comm").read_text(encoding="utf-8", errors="replace").strip() == "kubelet":
                return (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
    return None


def _flag(command: list[str] | None, name: str) -> str:
    for index, word in enumerate(command or []):
        if word == name and command and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def _root_findings(ctx: NodeContext, command: list[str] | None) -> Iterator[Finding]:
    root = _flag(command, "--root-dir")
    if not root:
        return
    ours = strip_root(str(ctx.paths.kubelet_registry_dir), str(ctx.paths.host_root)) or str(
        ctx.paths.kubelet_registry_dir
    )
    if ours != f"{root.rstrip('/')}/plugins_registry":
        yield error(
            "DRA-KUBELET-ROOT",
            f"the kubelet's root directory is {root}, the driver registers in {ours}",
            f"Set kubeletPlugin.kubeletRegistrarDirectoryPath and kubeletPluginsDirectoryPath to {root}/plugins_registry and {root}/plugins.",
        )


def _gate_findings(ctx: NodeContext, command: list[str] | None) -> Iterator[Finding]:
    """Say whether DRA is switched off in the kubelet, or was never switched on before 1.34."""
    config, where = _kubelet_config(ctx, _flag(command, "--config"))
    gates = dict(config.get("featureGates") or {}) if isinstance(config.get("featureGates"), Mapping) else {}
    for part in _flag(command, "--feature-gates").split(","):
        name, equals, value = part.partition("=")
        if equals:
            gates[name.strip()] = value.strip().lower() == "true"
    version = parse_version(ctx.kubelet_version)
    state = gates.get(GATE)
    if state is False and (version is None or version[:2] < (1, 35)):
        yield error(
            "DRA-KUBELET-GATE",
            f"the gate {GATE} is off in the kubelet",
            f"Remove {GATE}: false from {where or 'its flags'} and restart it.",
        )
    elif state is None and version is not None and version[:2] < GATE_DEFAULT_ON and (where or command):
        yield error(
            "DRA-KUBELET-GATE",
            f"the kubelet is {ctx.kubelet_version}, in which the gate {GATE} is off by default, and it is not set",
            f"Set featureGates: {{{GATE}: true}} in {where or 'its configuration'} (and in the API server, the scheduler and the controller manager), with resource.k8s.io served.",
        )


def _kubelet_config(ctx: NodeContext, named: str) -> tuple[dict[str, Any], str]:
    for path in [named] if named else CONFIG_FILES:
        text = ctx.read_text(path)
        if text is None:
            continue
        import yaml

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        if isinstance(found, dict):
            return found, path
    return {}, ""


# -- sockets -----------------------------------------------------------------------------------------------


def registration_sockets(ctx: NodeContext) -> list[Path]:
    """Give the registration sockets of this driver's instances, hashed names included where a pod's UID is known."""
    directory = ctx.paths.kubelet_registry_dir
    named = re.compile(rf"{re.escape(ctx.driver)}(-[A-Za-z0-9_-]+)?-reg\.sock", re.ASCII)
    uids = [str(pod["metadata"].get("uid") or "") for pod in (ctx.cluster.all(POD) if ctx.cluster else ())]
    hashed = {f"dra-{_hash(ctx.driver, uid)}-reg.sock" for uid in ["", *uids]}
    try:
        found = sorted(directory.iterdir())
    except OSError:
        return []
    return [
        path for path in found if (named.fullmatch(path.name) or path.name in hashed) and _is_socket(path)
    ]


def _hash(driver: str, uid: str) -> str:
    digest = hashlib.sha256(f"{driver}\0{uid}".encode()).digest()[:16]
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def answers(path: Path) -> bool:
    """Whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_SECONDS)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


# -- the device plugin -------------------------------------------------------------------------------------


def device_plugin_findings(ctx: NodeContext) -> Iterator[Finding]:
    """Say whether a device plugin offers this node's GPUs too: nothing keeps both from giving out the same one."""
    counts = allocatable_gpus(ctx.node)
    sockets = [
        name for name in ctx.names_in("/var/lib/kubelet/device-plugins") if _PLUGIN_SOCKET.fullmatch(name)
    ]
    folder = ctx.paths.kubelet_plugins_dir.parent / "device-plugins"
    living = [name for name in sockets if answers(folder / name)]
    registered = _registered(folder / "kubelet_internal_checkpoint")
    if counts:
        seen = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
        yield device_plugin_warning(ctx.node_name, f"the node offers {seen}")
    elif living:
        yield device_plugin_warning(ctx.node_name, f"it serves {', '.join(living)}")
    elif registered and ctx.node is None:
        yield device_plugin_warning(ctx.node_name, f"the kubelet's checkpoint has {', '.join(registered)}")


def allocatable_gpus(node: Json | None) -> dict[str, int]:
    """Give the GPU resources of a device plugin that a node offers; a zero is what one leaves behind."""
    found = {}
    for name, value in (((node or {}).get("status") or {}).get("allocatable") or {}).items():
        if GPU_RESOURCES.fullmatch(name) and str(value).isdigit() and int(value) > 0:
            found[name] = int(value)
    return found


def device_plugin_warning(node: str, seen: str) -> Finding:
    """Give the warning that two systems give out one node's GPUs."""
    return warning(
        "DRA-DEVICE-PLUGIN-ACTIVE",
        f"a device plugin is active on node {node} ({seen}): both may give out the same GPU, and pods that ask for "
        "nvidia.com/gpu get it there and not through DRA",
        "Move node by node: label it nvidia.com/gpu.deploy.device-plugin=false, drain it, and let the driver take it "
        "(docs/migration.md).",
    )


def _registered(path: Path) -> list[str]:
    """Give the GPU resources in the kubelet's own checkpoint of device plugins that have devices.

    Source: kubelet cm/devicemanager/checkpoint: Data.RegisteredDevices.
    """
    try:
        data = json.loads(path.read_bytes())["Data"]["RegisteredDevices"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return sorted(name for name, devices in data.items() if devices and GPU_RESOURCES.fullmatch(name))
