"""The container runtime: is CDI on, and does it look where the driver writes?

containerd before 2.0 ignores CDI devices silently unless `enable_cdi` is set; from 2.0 on it is on. CRI-O always has it.
Docker behind cri-dockerd drops CDI devices. Source: the runtimes' own configuration references; CDI fact sheet section 1.
"""

from __future__ import annotations

import fnmatch
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, error, note, warning
from dra.host.rooted import resolve, resolve_inside

# Where distributions keep containerd's configuration; the last that exists is the most special one.
CONTAINERD_CONFIGS = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/run/k0s/containerd-cri.toml",
    "/etc/k0s/containerd.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/cri/containerd.toml",
)
CRIO_CONFIGS = ("/usr/lib/crio/crio.conf", "/etc/crio/crio.conf")
CRIO_DROP_INS = ("/usr/lib/crio/crio.conf.d", "/etc/crio/crio.conf.d")
_SOCKETS = {
    "containerd": (
        "/run/containerd/containerd.sock",
        "/run/k3s/containerd/containerd.sock",
        "/run/k0s/containerd.sock",
        "/var/snap/microk8s/common/run/containerd.sock",
    ),
    "cri-o": ("/run/crio/crio.sock",),
    "docker": ("/run/cri-dockerd.sock",),
}
DEFAULT_DIRS = ("/etc/cdi", "/var/run/cdi")
_OLD_PLUGIN, _NEW_PLUGIN = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
_DOCKER_REMEDY = "Use containerd or CRI-O on GPU nodes."


@dataclass(frozen=True, slots=True)
class Engine:
    """The runtime that the kubelet uses. `version` is empty where only files tell of it."""

    name: str
    version: tuple[int, int, int] | None
    shown: str


def find_engine(ctx: NodeContext) -> Engine | None:
    """Give the runtime, as the Node object says, else as sockets and configuration files tell; None if nothing does."""
    told = ctx.runtime_version
    if told:
        name, _, version = told.partition("://")
        return Engine(name, _version(version), told)
    for name, sockets in _SOCKETS.items():
        socket = next((each for each in sockets if resolve(ctx.paths.host_root, each)), None)
        if socket is not None:
            return Engine(name, None, f"{name} at {socket}")
    if any(resolve(ctx.paths.host_root, each) for each in CONTAINERD_CONFIGS):
        return Engine("containerd", None, "containerd, by its configuration")
    if any(resolve(ctx.paths.host_root, each) for each in (*CRIO_CONFIGS, *CRIO_DROP_INS)):
        return Engine("cri-o", None, "CRI-O, by its configuration")
    return None


def _version(text: str) -> tuple[int, int, int] | None:
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def look_at_runtime(ctx: NodeContext) -> Looked:
    """Find the runtime and judge its CDI configuration."""
    engine = find_engine(ctx)
    if engine is None:
        return Looked("", unknown="no container runtime was found below this root")
    if engine.name == "containerd":
        return _containerd(ctx, engine)
    if engine.name == "cri-o":
        return _crio(ctx, engine)
    if engine.name == "docker":
        finding = error(
            "DRA-RUNTIME-UNSUPPORTED",
            f"the container runtime is {engine.shown}: cri-dockerd drops CDI devices, pods would start without GPU",
            _DOCKER_REMEDY,
        )
        return Looked(engine.shown, (finding,))
    if engine.name == "sim":
        return Looked("simulated, CDI on")
    finding = warning(
        "DRA-RUNTIME-UNKNOWN", f"the container runtime {engine.shown} is not known here",
        "Check that it takes CDI devices from the kubelet.",
    )  # fmt: skip
    return Looked(engine.shown, (finding,))


# -- containerd --------------------------------------------------------------------------------------------


def _containerd(ctx: NodeContext, engine: Engine) -> Looked:
    findings: list[Finding] = []
    config, read = containerd_config(ctx, findings)
    major = engine.version[0] if engine.version else (2 if config.get("version") == 3 else 0)
    plugins = config.get("plugins") or {}
    old, new = _table(plugins, _OLD_PLUGIN), _table(plugins, _NEW_PLUGIN)
    section = _NEW_PLUGIN if major >= 2 else _OLD_PLUGIN
    # containerd 2 migrates the old section of a version 2 file.
    settings = {**old, **new} if major >= 2 or not old else old
    enabled = settings.get("enable_cdi")
    where = read[-1] if read else CONTAINERD_CONFIGS[0]
    if engine.version is not None and engine.version < (1, 7, 0):
        findings.append(
            error(
                "DRA-RUNTIME-NO-CDI",
                f"{engine.shown} has no CDI: it ignores the devices and pods start without GPU",
                "Upgrade containerd to 1.7 with enable_cdi = true, or to 2.x.",
            )
        )
    elif enabled is False or (enabled is None and major == 1):
        findings.append(
            error(
                "DRA-RUNTIME-CDI-OFF",
                f"CDI is off in containerd ({engine.shown}): enable_cdi is "
                + ("false" if enabled is False else "not set, and off by default before 2.0")
                + ("" if read else "; no configuration file was found"),
                f'Set enable_cdi = true under [plugins."{section}"] in {where} and restart containerd.',
            )
        )
    elif enabled is None and major == 0:
        findings.append(
            warning(
                "DRA-RUNTIME-CDI-UNSURE",
                f"enable_cdi is not set in {where} and containerd's version is not known: before 2.0 CDI is then off",
                f'Set enable_cdi = true under [plugins."{_OLD_PLUGIN}"], or use containerd 2.x.',
            )
        )
    findings += _dirs(ctx, settings.get("cdi_spec_dirs"), where)
    if engine.version is not None and (1, 7, 0) <= engine.version < (1, 7, 16):
        findings.append(
            note(
                "DRA-RUNTIME-CDI-OLD",
                f"{engine.shown} refuses CDI specs newer than 0.6.0; ours are 0.5.0, those of others may not be",
            )
        )
    return Looked(
        f"{engine.shown}, {'configuration ' + where if read else 'default configuration'}", tuple(findings)
    )


def containerd_config(ctx: NodeContext, findings: list[Finding]) -> tuple[dict[str, Any], list[str]]:
    """Give containerd's configuration with its imports laid over it, and the files that were read."""
    start = next((each for each in reversed(CONTAINERD_CONFIGS) if ctx.read_text(each) is not None), None)
    if start is None:
        return {}, []
    merged: dict[str, Any] = {}
    read: list[str] = []
    todo = [start]
    while todo:
        path = todo.pop(0)
        if path in read:
            continue
        found = _toml(ctx, path, findings)
        if found is None:
            continue
        read.append(path)
        _merge(merged, found)
        for pattern in found.get("imports") or []:
            todo += _expand(ctx, str(pattern), os.path.dirname(path))  # noqa: PTH120
    return merged, read


def _expand(ctx: NodeContext, pattern: str, base: str) -> Iterator[str]:
    absolute = pattern if pattern.startswith("/") else f"{base}/{pattern}"
    folder, _, name = absolute.rpartition("/")
    yield from (f"{folder}/{each}" for each in ctx.names_in(folder) if fnmatch.fnmatch(each, name))


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _table(plugins: Any, name: str) -> dict[str, Any]:
    # Files of version 1 name the plugin `cri`.
    found = plugins.get(name) if isinstance(plugins, Mapping) else None
    if found is None and name == _OLD_PLUGIN and isinstance(plugins, Mapping):
        found = plugins.get("cri")
    return dict(found) if isinstance(found, Mapping) else {}


def _toml(ctx: NodeContext, path: str, findings: list[Finding]) -> dict[str, Any] | None:
    text = ctx.read_text(path)
    if text is None:
        return None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        findings.append(
            warning(
                "DRA-RUNTIME-CONFIG",
                f"{path} is not TOML: {problem}",
                "Correct it; the runtime cannot read it either.",
            )
        )
        return None


# -- CRI-O -------------------------------------------------------------------------------------------------


def _crio(ctx: NodeContext, engine: Engine) -> Looked:
    findings: list[Finding] = []
    merged: dict[str, Any] = {}
    files = [
        *CRIO_CONFIGS,
        *(f"{folder}/{name}" for folder in CRIO_DROP_INS for name in ctx.names_in(folder)),
    ]
    read = []
    for path in files:
        found = _toml(ctx, path, findings)
        if found is not None:
            read.append(path)
            _merge(merged, found)
    if engine.version is not None and engine.version < (1, 23, 0):
        findings.append(
            error(
                "DRA-RUNTIME-NO-CDI",
                f"{engine.shown} has no CDI",
                "Upgrade CRI-O to the version of the kubelet.",
            )
        )
    runtime = (merged.get("crio") or {}).get("runtime") or {}
    findings += _dirs(ctx, runtime.get("cdi_spec_dirs"), read[-1] if read else CRIO_CONFIGS[-1])
    return Looked(
        f"{engine.shown}, CDI on" + (f", configuration {read[-1]}" if read else ""), tuple(findings)
    )


def _dirs(ctx: NodeContext, configured: Any, where: str) -> Iterator[Finding]:
    """Say whether the runtime looks where the driver writes; `/var/run` and `/run` are one place."""
    ours = "/" + os.path.relpath(ctx.paths.cdi_root, ctx.paths.host_root) if ctx.paths.host_root in ctx.paths.cdi_root.parents else str(ctx.paths.cdi_root)  # fmt: skip
    dirs = [str(each) for each in configured] if isinstance(configured, list) else list(DEFAULT_DIRS)
    if _same_place(ctx, ours) not in {_same_place(ctx, each) for each in dirs}:
        yield error(
            "DRA-RUNTIME-CDI-DIRS",
            f"the runtime looks for CDI specs in {', '.join(dirs) or 'no directory'} ({where}), the driver writes them to {ours}",
            f"Add {ours} to cdi_spec_dirs and restart the runtime, or set --cdi-root to one of its directories.",
        )


def _same_place(ctx: NodeContext, path: str) -> str:
    real = resolve_inside(str(ctx.paths.host_root), path)
    text = real or path
    return text.removeprefix("/var") if text.startswith("/var/run/") else text
