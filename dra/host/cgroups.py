"""Which pod and container a process belongs to, by its cgroup."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dra.host.paths import HostPaths

_UID = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# `kubepods/burstable/pod<uid>/<id>` (cgroupfs) or `kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope` (systemd).
_POD = re.compile(rf"kubepods[^:\n]*?[-/]pod(?P<uid>{_UID})(?:\.slice)?(?:/(?P<rest>[^\n]*))?", re.ASCII)
_CONTAINER = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs. Both are empty for a process of the host itself."""

    pod_uid: str = ""
    container_id: str = ""


def place_of(paths: HostPaths, pid: int) -> Place | None:
    """Give where a process of the host's numbering runs; None if that cannot be seen from here.

    Seeing the host's processes needs `hostPID`, or the host's /proc.

    Source: /proc/PID/cgroup; the kubelet's and the runtimes' names of cgroups.
    """
    try:
        text = (paths.proc / str(pid) / "cgroup").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return parse_cgroup(text)


def parse_cgroup(text: str) -> Place:
    """Read the text of a cgroup file, of version 1 or 2."""
    match = _POD.search(text)
    if match is None:
        return Place()
    container = _CONTAINER.search(match["rest"] or "")
    return Place(match["uid"].replace("_", "-"), container[0] if container else "")


def command_of(paths: HostPaths, pid: int) -> str:
    """Give a process' short name, empty if it cannot be seen. Source: /proc/PID/comm."""
    try:
        return (paths.proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
