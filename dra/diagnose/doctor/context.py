"""What a look at a node starts from: where its files are, who it is, and what the API said, if it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dra.diagnose.explain.cluster import NODE, Cluster
from dra.host.paths import HostPaths
from dra.host.rooted import resolve
from dra.inventory.model import Inventory
from dra.inventory.scan import scan
from dra.nvml.node import session_of

DRIVER = "gpu.nvidia.com"


@dataclass
class NodeContext:
    """One node, seen from itself. `cluster` is None where the API was not asked; `offline` says why.

    `library` gives the simulated NVML; None on a real node. `passthrough`: its driver passes GPUs through (NVIDIA's gate).
    """

    paths: HostPaths
    node_name: str
    driver: str = DRIVER
    library: Callable[[], object] | None = None
    cluster: Cluster | None = None
    offline: str = "no API server was asked"
    passthrough: bool = False
    made: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def inventory(self) -> Inventory:
        """One look at the hardware."""
        session = session_of(self.paths, library=self.library)
        try:
            return scan(session, self.paths)
        finally:
            session.close()

    @property
    def node(self) -> dict[str, Any] | None:
        """The Node object, None where it is not known."""
        return None if self.cluster is None else self.cluster.find(NODE, self.node_name)

    @property
    def kubelet_version(self) -> str:
        """The kubelet's version as the API has it (`v1.34.1`), empty where it is not known."""
        return str(node_info(self.node).get("kubeletVersion") or "")

    @property
    def runtime_version(self) -> str:
        """The container runtime and its version as the API has it (`containerd://2.0.1`), empty if not known."""
        return str(node_info(self.node).get("containerRuntimeVersion") or "")

    def read_text(self, path: str) -> str | None:
        """Give the text of a file of the host, links resolved inside the host's root; None if it is not there."""
        real = resolve(self.paths.host_root, path)
        if real is None:
            return None
        try:
            return real.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names_in(self, path: str) -> list[str]:
        """Give the names in a directory of the host; none if there is no such directory."""
        real = resolve(self.paths.host_root, path)
        try:
            return [] if real is None else sorted(entry.name for entry in real.iterdir())
        except OSError:
            return []


def node_info(node: dict[str, Any] | None) -> dict[str, Any]:
    """Give `status.nodeInfo`, empty where there is none."""
    return ((node or {}).get("status") or {}).get("nodeInfo") or {}
