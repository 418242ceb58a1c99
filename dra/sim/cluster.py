"""A whole simulated cluster in one process tree on loopback.

The API server, the ResourceClaim controller, the scheduler and one kubelet a node run in this process; the driver
of each node is the real `dra plugin` as a process of its own, over real unix sockets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dra.allocator.model import CompileSelector
from dra.errors import ConfigError, DraError
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.sim.apiserver import SimApiServer
from dra.sim.control.loop import ControlPlane
from dra.sim.kubelet import PodLoop, SimKubelet, Timings
from dra.sim.node import SimulatedNode
from dra.sim.profiles import PROFILES
from dra.sim.runtime import Runtime

DRIVER = "gpu.nvidia.com"
Json = dict[str, Any]

# A simulated kubelet looks and retries faster than a real one, so that a person does not wait.
_TIMINGS = Timings(
    scan=0.1, first_back_off=0.2, health_retry=1.0, reconcile=5.0, prepare_retry=3.0, unprepare_retry=1.0
)
# A unix socket's path has 107 usable bytes; the kubelet's directories and the driver's names take about 75.
_MAX_ROOT = 32


def parse_nodes(text: str) -> list[tuple[str, str]]:
    """Read `dgx-h100x4,l40s-x4` as (node name, profile) pairs. A profile's own name wins over a count.

    Raises:
        ConfigError: DRA-SIM-NODES.
    """
    found: list[tuple[str, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        profile, count = part, 1
        if profile not in PROFILES:
            name, _, number = part.rpartition("x")
            if name in PROFILES and number.isdecimal() and number.isascii():
                profile, count = name, int(number)
        if profile not in PROFILES or not 0 < count <= 100:
            raise ConfigError(
                "DRA-SIM-NODES",
                f"{part!r} is no machine profile",
                remedy=f"Write profiles with an optional count, for example dgx-h100x2. Known: {', '.join(sorted(PROFILES))}.",
            )
        found += [
            (f"{profile}-{sum(1 for _, other in found if other == profile) + i}", profile)
            for i in range(count)
        ]
    if not found:
        raise ConfigError(
            "DRA-SIM-NODES", "no nodes were given", remedy="Write for example --nodes dgx-h100."
        )
    return found


@dataclass(slots=True)
class ClusterNode:
    """A node of the cluster: its files, its kubelet, its driver process."""

    name: str
    profile: str
    root: Path
    machine: SimulatedNode
    kubelet: SimKubelet
    loop: PodLoop
    client: KubeClient
    process: subprocess.Popen[bytes] | None = None
    arguments: Sequence[str] = field(default_factory=tuple)

    @property
    def cdi_root(self) -> Path:
        """Where the driver writes CDI files."""
        return self.root / "var/run/cdi"

    @property
    def state_dir(self) -> Path:
        """Where the driver keeps its records."""
        return self.root / f"var/lib/kubelet/plugins/{DRIVER}"

    @property
    def log(self) -> Path:
        """The driver's log."""
        return self.root / "plugin.log"


class SimCluster:
    """Nodes under `root`, one directory each. Use as a context manager: everything ends with it.

    Args:
        nodes: (name, profile) pairs.
        version: the Kubernetes version to play, `1.32` to `1.37`.
        port: of the API server; 0 takes a free one.
    """

    def __init__(
        self,
        root: Path,
        nodes: Iterable[tuple[str, str]],
        *,
        version: str = "1.36",
        port: int = 0,
        compile_selector: CompileSelector | None = None,
        plugin_arguments: Sequence[str] = (),
    ) -> None:
        if len(str(root)) > _MAX_ROOT:
            raise ConfigError(
                "DRA-SOCKET-PATH-TOO-LONG",
                f"sockets below {root} would have paths longer than 107 bytes",
                remedy="Choose a shorter directory, for example /tmp/sim.",
            )
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.version = root, version
        if compile_selector is None:
            from dra.cel import compile_selector as found

            compile_selector = found
        self.api = SimApiServer(port=port, version=version)
        self.control = ControlPlane(self.api, compile_selector)
        self._wanted = list(nodes)
        self._plugin_arguments = tuple(plugin_arguments)
        self.nodes: dict[str, ClusterNode] = {}
        self.kubeconfig = root / "kubeconfig"

    def start(self) -> Self:
        """Start everything; returns when the processes run. `wait_ready` waits for slices."""
        self.api.start()
        self.api.write_kubeconfig(self.kubeconfig)
        self.control.start()
        for number, (name, profile) in enumerate(self._wanted):
            self.nodes[name] = self._start_node(name, profile, self.root / f"n{number}")
        return self

    def _start_node(self, name: str, profile: str, root: Path) -> ClusterNode:
        machine = SimulatedNode(profile, root, salt=name)
        registry = root / "var/lib/kubelet/plugins_registry"
        registry.mkdir(parents=True, exist_ok=True)
        self.api.create("/api/v1/nodes", node_object(name, profile))
        client = KubeClient(
            Connection(KubeOptions(kubeconfig=str(self.kubeconfig), user_agent="sim-kubelet"))
        )
        kubelet = SimKubelet(
            name, root / "var/lib/kubelet", client, slices=client, runtime=Runtime(root),
            minor=int(self.version.partition(".")[2]), timings=_TIMINGS,
        )  # fmt: skip
        node = ClusterNode(name, profile, root, machine, kubelet, PodLoop(kubelet, client), client)
        kubelet.start()
        node.loop.start()
        self.start_driver(node)
        return node

    def start_driver(self, node: ClusterNode) -> None:
        """Start a node's driver process."""
        command = [
            sys.executable, "-m", "dra.cli.main", "plugin",
            "--simulate", node.profile, "--host-root", str(node.root), "--node-name", node.name,
            "--kubeconfig", str(self.kubeconfig), *self._plugin_arguments,
        ]  # fmt: skip
        with node.log.open("ab") as log:
            node.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "POD_UID": ""}
            )

    def stop_driver(self, node: ClusterNode, *, timeout_seconds: float = 10.0) -> None:
        """End a node's driver process: politely, then not."""
        if node.process is None:
            return
        node.process.terminate()
        try:
            node.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
        node.process = None

    def stop(self) -> None:
        """End everything. The files stay."""
        for node in self.nodes.values():
            if node.process is not None:
                node.process.terminate()
        for node in self.nodes.values():
            self.stop_driver(node)
            node.loop.stop()
            node.kubelet.stop()
            node.client.close()
        self.control.stop()
        self.api.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- using it ----------------------------------------------------------------------------------

    def wait_ready(self, *, timeout_seconds: float = 30.0) -> None:
        """Wait until every node's driver is registered and its pool is complete in the API.

        Raises:
            DraError: DRA-SIM-TIMEOUT, with the end of the driver's log.
        """
        for node in self.nodes.values():
            self.until(
                lambda node=node: self._is_ready(node),  # type: ignore[misc]
                f"the driver of {node.name} to register and publish",
                timeout_seconds=timeout_seconds,
                log=node.log,
            )

    def _is_ready(self, node: ClusterNode) -> bool:
        if node.process is not None and node.process.poll() is not None:
            raise DraError("DRA-SIM-DRIVER", f"the driver of {node.name} ended: {tail(node.log)}")
        if node.kubelet.connection(DRIVER) is None:
            return False
        slices = [item for item in self.slices() if item["spec"].get("nodeName") == node.name]
        return bool(slices) and len(slices) == slices[0]["spec"]["pool"]["resourceSliceCount"]

    def until(
        self,
        condition: Callable[[], Any],
        what: str,
        *,
        timeout_seconds: float = 20.0,
        log: Path | None = None,
    ) -> Any:
        """Wait for a condition and give its value.

        Raises:
            DraError: DRA-SIM-TIMEOUT.
        """
        end = time.monotonic() + timeout_seconds
        while not (value := condition()):
            if time.monotonic() > end:
                more = f"; {tail(log)}" if log is not None else ""
                raise DraError("DRA-SIM-TIMEOUT", f"waited {timeout_seconds:g} s for {what}{more}")
            time.sleep(0.03)
        return value

    def items(self, path: str) -> list[Json]:
        """Give all objects of a collection by its path, for example `/api/v1/pods`."""
        _, answer = self.api.request("GET", path)
        return list(answer["items"])

    def slices(self) -> list[Json]:
        """Give all ResourceSlices."""
        return self.items("/apis/resource.k8s.io/v1/resourceslices")

    def claims(self) -> list[Json]:
        """Give all ResourceClaims."""
        return self.items("/apis/resource.k8s.io/v1/resourceclaims")

    def pods(self) -> list[Json]:
        """Give all pods."""
        return self.items("/api/v1/pods")

    def apply(self, *files: Path) -> list[Json]:
        """Create the objects of manifest files, as `kubectl create` does; gives them as stored.

        An object that exists is left alone.
        """
        made: list[Json] = []
        for manifest in read_manifests(files):
            status, answer = self.api.request("POST", self._collection(manifest), manifest)
            if status == 409:
                continue
            if status >= 300:
                raise DraError("DRA-SIM-REFUSED", f"{manifest['kind']}: {answer.get('message')}")
            made.append(answer)
        return made

    def delete(self, *files: Path) -> None:
        """Delete the objects of manifest files, namespaces with all that is in them."""
        for manifest in reversed(list(read_manifests(files))):
            self.api.request("DELETE", f"{self._collection(manifest)}/{manifest['metadata']['name']}")

    def _collection(self, manifest: Json) -> str:
        version, kind = manifest["apiVersion"], manifest["kind"]
        _, group = self.api.request("GET", f"/apis/{version}" if "/" in version else f"/api/{version}")
        found = [
            item for item in group.get("resources", []) if item["kind"] == kind and "/" not in item["name"]
        ]
        if not found:
            raise DraError("DRA-SIM-KIND", f"the simulated server has no {kind} in {version}")
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if found[0]["namespaced"]:
            base += f"/namespaces/{manifest['metadata'].get('namespace', 'default')}"
        return f"{base}/{found[0]['name']}"


def read_manifests(files: Iterable[Path]) -> Iterator[Json]:
    """Give the objects of YAML files."""
    import yaml

    for file in files:
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if document:
                yield document


def node_object(name: str, profile: str) -> Json:
    """Give the Node of a simulated machine."""
    resources = {"cpu": "128", "memory": "1Ti", "pods": "250"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "nvidia.com/gpu.present": "true",
                "simulated-machine": profile,
            },
        },
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "nodeInfo": {
                "kubeletVersion": "v1.36.0-sim", "containerRuntimeVersion": "sim://1", "operatingSystem": "linux",
                "architecture": "amd64", "osImage": "simulated", "kernelVersion": "", "bootID": "",
                "machineID": "", "systemUUID": "", "kubeProxyVersion": "",
            },
        },
    }  # fmt: skip


def tail(log: Path | None) -> str:
    """Give the last thing a driver logged, in one line."""
    if log is None or not log.exists():
        return "nothing was logged"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not lines:
        return "nothing was logged"
    try:
        entry = json.loads(lines[-1])
    except ValueError:
        return lines[-1][:300]
    return f"last log line: {entry.get('event')} {entry.get('error', '')}".strip()
