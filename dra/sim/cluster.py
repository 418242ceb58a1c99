"""A whole simulated cluster in one process tree on loopback.

The API server, the controllers, the scheduler and one kubelet a node run in this process; the driver of a node is the
real `dra plugin` as a process of its own, over real unix sockets. Beyond a few nodes, the drivers of the others run in
this process too (`dra.sim.in_process` says what that leaves out).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dra.allocator.model import CompileSelector
from dra.api.versions import NEWEST_KUBERNETES, OLDEST_KUBERNETES
from dra.errors import ConfigError, DraError
from dra.plugin.settings import DEFAULT_MIG_MODE
from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.identity import plugin_of
from dra.sim.cluster_node import DRIVER, TIMINGS, ClusterNode, tail
from dra.sim.control.loop import ControlPlane
from dra.sim.in_process import InProcessNodes
from dra.sim.leash import Leash
from dra.sim.profiles import PROFILES
from dra.sim.run_file import IN_PROCESS_FOLDER, KUBECONFIG

Json = dict[str, Any]

# A unix socket's path has 107 usable bytes; the kubelet's directories and the driver's names take about 75.
_MAX_ROOT = 32
# A driver process costs a second of CPU to start and about 80 MB.
MOST_PROCESSES = 4
# A node with partitions on demand publishes 26 devices for each of its GPUs, half a second of work; where more
# nodes than this run in one process, they have only what exists.
MOST_WITH_PARTITIONS = 16


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
        if profile not in PROFILES or not 0 < count <= 1000:
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


_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


VERSIONS = tuple(f"1.{minor}" for minor in range(OLDEST_KUBERNETES[1], NEWEST_KUBERNETES[1] + 1))


class SimCluster:
    """Nodes under `root`. Use as a context manager: everything ends with it.

    Args:
        nodes: (name, profile) pairs.
        version: the Kubernetes version to play, `1.32` to `1.37`.
        port: of the API server; 0 takes a free one.
        real: so many nodes, the first ones, have a driver process; the others run in this process. Default: all,
            but no more than four.
        features: feature gates that differ from the version's.
    """

    def __init__(
        self,
        root: Path,
        nodes: Iterable[tuple[str, str]],
        *,
        version: str = "1.36",
        port: int = 0,
        real: int | None = None,
        compile_selector: CompileSelector | None = None,
        plugin_arguments: Sequence[str] = (),
        features: Mapping[str, bool] | None = None,
    ) -> None:
        if len(str(root)) > _MAX_ROOT:
            raise ConfigError(
                "DRA-SOCKET-PATH-TOO-LONG",
                f"sockets below {root} would have paths longer than 107 bytes",
                remedy="Choose a shorter directory, for example /tmp/sim.",
            )
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root, self.version = root, version
        if compile_selector is None:
            from dra.cel import compile_selector as found

            compile_selector = found
        if version not in VERSIONS:
            raise ConfigError(
                "DRA-SIM-VERSION",
                f"{version!r} is no version to play",
                remedy=f"Give one of {', '.join(VERSIONS)}.",
            )
        self.api = SimApiServer(port=port, version=version, features=features)
        self.control = ControlPlane(self.api, compile_selector)
        self.wanted = list(nodes)
        self._real = min(len(self.wanted), MOST_PROCESSES) if real is None else real
        self._plugin_arguments = tuple(plugin_arguments)
        self._leash = Leash()
        self.nodes: dict[str, ClusterNode] = {}
        self.in_process = InProcessNodes(
            self.api, root / IN_PROCESS_FOLDER, driver=DRIVER, version=version, timings=TIMINGS,
            mig_mode=DEFAULT_MIG_MODE if len(self.wanted) - self._real <= MOST_WITH_PARTITIONS else "static",
        )  # fmt: skip
        self.api.api.log_of = self._printed
        self.kubeconfig = root / KUBECONFIG

    def start(self) -> Self:
        """Start everything; returns when the processes run. `wait_ready` waits for slices.

        Raises:
            DraError: DRA-SIM-PORT: the API server's port is taken.
        """
        try:
            self.api.start()
        except OSError as error:
            raise DraError(
                "DRA-SIM-PORT",
                f"the API server cannot listen: {error}",
                remedy="Give another --port, or none.",
            ) from error
        self.api.write_kubeconfig(self.kubeconfig)
        from dra.api.policy_crd import node_crd, policy_crd

        for definition in (policy_crd(), node_crd()):
            self.api.create(_DEFINITIONS, definition)
        self.control.start()
        self.in_process.start()
        for number, (name, profile) in enumerate(self.wanted):
            self.api.create("/api/v1/nodes", node_object(name, profile, version=self.version))
            if number < self._real:
                self._start_node(name, profile, self.root / f"n{number}")
            else:
                self.in_process.add(name, profile)
        return self

    def _start_node(self, name: str, profile: str, root: Path) -> None:
        own = root / KUBECONFIG
        node = ClusterNode.make(
            name, profile, root,
            kubeconfig=self.kubeconfig, driver_kubeconfig=own, minor=int(self.version.partition(".")[2]), leash=self._leash,
            arguments=self._plugin_arguments,
        )  # fmt: skip
        # As on a real cluster the driver's token tells on which node it is: admission policies see that.
        self.api.write_kubeconfig(own, token=self.api.token_for(plugin_of(name)))
        # Known before anything runs: a signal that ends the start must end its driver too, which would make the files anew.
        self.nodes[name] = node
        node.start_kubelet()
        node.start_driver()
        if node.keeper is not None:
            node.keeper.start()

    def stop(self) -> None:
        """End everything. The files stay."""
        for node in self.nodes.values():
            node.ask_driver_to_stop()
        # Frozen requests would hold up whoever waits for them.
        self.api.faults.clear()
        for node in self.nodes.values():
            node.stop()
        self.in_process.stop()
        self.control.stop()
        self.api.stop()
        self._leash.close()

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

    def _printed(self, pod: Json, container: str) -> str | None:
        name = pod["spec"].get("nodeName") or ""
        node, beside = self.nodes.get(name), self.in_process.nodes.get(name)
        runs = node.kubelet.pods if node is not None else beside.pods if beside is not None else None
        return None if runs is None else runs.printed(pod["metadata"]["uid"], container)

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
        if not node.driver_runs:
            raise DraError("DRA-SIM-DRIVER", f"the driver of {node.name} ended: {tail(node.log)}")
        if not node.registered:
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

        What takes long to look at is looked at less often: those who are waited for need the processor too.

        Raises:
            DraError: DRA-SIM-TIMEOUT.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            began = time.thread_time()
            value = condition()
            if value:
                return value
            if time.monotonic() > end:
                more = f"; {tail(log)}" if log is not None else ""
                raise DraError("DRA-SIM-TIMEOUT", f"waited {timeout_seconds:g} s for {what}{more}")
            time.sleep(min(max(0.03, 5 * (time.thread_time() - began)), 0.3))

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

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in files:
        for document in yaml.load_all(file.read_text(encoding="utf-8"), loader):
            if document:
                yield document


def node_object(name: str, profile: str, *, version: str = "1.36") -> Json:
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
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "nodeInfo": {
                "kubeletVersion": f"v{version}.0-sim", "containerRuntimeVersion": "sim://1", "operatingSystem": "linux",
                "architecture": "amd64", "osImage": "simulated", "kernelVersion": "", "bootID": "",
                "machineID": "", "systemUUID": "", "kubeProxyVersion": "",
            },
        },
    }  # fmt: skip
