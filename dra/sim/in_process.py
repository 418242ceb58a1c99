"""Nodes without processes and sockets, for clusters of hundreds of nodes on a laptop.

What is as on a node with a driver process: the pool (`dra.slices` over a scanned inventory), preparing (the Engine with
its records, locks, journal and CDI files), the kubelet's checks around it, the container that comes out. What is
simplified:

* nodes of one profile share the files of one machine (/proc, /sys, /dev, the driver), which is scanned once; their GPUs
  differ by UUID;
* the pool is written directly, and restored when somebody deletes it, without the publisher and its lock;
* prepare and unprepare are function calls that carry the same messages as the sockets; there is no registration, no
  health stream, no janitor, and no NVML to put faults into; MIG partitions are kept in memory, and nobody can make
  some by hand;
* pods are followed in the memory of the API server, so that faults of the API server do not reach these nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dra.api.claim import ClaimRef
from dra.cdi.model import CdiOptions
from dra.cdi.renderer import CdiRenderer
from dra.errors import KubeError
from dra.host.boot import boot_id
from dra.host.paths import HostPaths
from dra.inventory.model import Inventory
from dra.inventory.scan import scan
from dra.kube.resources import Resource
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.pb.services import PREPARE_V1, UNPREPARE_V1, Method
from dra.plugin.prepare_service import PrepareService
from dra.plugin.settings import DEFAULT_MIG_MODE
from dra.prepare.engine import Engine, EnginePorts, EngineSettings
from dra.sim.apiserver.server import SimApiServer
from dra.sim.apiserver.storage import Change
from dra.sim.control.api import CLAIMS, PODS, SLICES, CallFailed, Collection, ControlApi, Json
from dra.sim.in_process_mig import MigInMemory, offer_all_capabilities
from dra.sim.kubelet.claims import DraManager, UnprepareError
from dra.sim.kubelet.pod_work import TICK_SECONDS, PodWork, is_over
from dra.sim.kubelet.pods import PodRuns
from dra.sim.kubelet.versions import KubeletVersion, Timings
from dra.sim.node import SimulatedNode
from dra.sim.profiles import machine_profile
from dra.sim.runtime import Runtime
from dra.sim.sharing import memory_sharing
from dra.slices.features import ServerFeatures
from dra.slices.pool import MigMode, PoolContent, build_pool
from dra.telemetry.log import get_logger

log = get_logger()

_WORKERS = 4


class _CallInProcess:
    """What the service asks of a call's context: whether the kubelet still waits, and for how long (45 s)."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def time_remaining() -> float:
        return 45.0


class LocalApi:
    """The API server's calls that pods and claims of a node need, without sockets. Raises KubeError."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Json:
        """Give an object in the shape of v1."""
        found = self._api.get(Collection(resource.group, resource.plural), name, namespace or "")
        if found is None:
            raise KubeError("DRA-API-NOT-FOUND", f"{resource.plural} {name!r} not found", status=404, reason="NotFound")  # fmt: skip
        return found

    def claim(self, namespace: str, name: str) -> Json:
        """Give a ResourceClaim."""
        found = self._api.get(CLAIMS, name, namespace)
        if found is None:
            raise KubeError("DRA-API-NOT-FOUND", f"resourceclaims {name!r} not found", status=404, reason="NotFound")  # fmt: skip
        return found

    def claims(self) -> list[Json]:
        """Give all ResourceClaims."""
        return self._api.list(CLAIMS)

    def patch(
        self, resource: Resource, name: str, body: Any, namespace: str | None = None, *, subresource: str = ""
    ) -> Json:
        """Merge a patch into an object of the core group."""
        path = f"/api/v1/namespaces/{namespace}/{resource.plural}/{name}/{subresource}".rstrip("/")
        status, answer = self._api.server.request(
            "PATCH", path, body, content_type="application/merge-patch+json"
        )
        if status >= 300:
            raise _kube_error(CallFailed("PATCH", path, status, answer))
        return dict(answer)

    def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_period_seconds: int | None = None,
    ) -> None:
        """Delete an object of the core group."""
        options: Json = {"preconditions": {"uid": uid}} if uid else {}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds
        try:
            self._api.call("DELETE", f"/api/v1/namespaces/{namespace}/{resource.plural}/{name}", options)
        except CallFailed as error:
            raise _kube_error(error) from error


def _kube_error(error: CallFailed) -> KubeError:
    return KubeError("DRA-API-REFUSED", str(error), status=error.status)


class _Claims:
    """The engine's source of claims."""

    def __init__(self, api: LocalApi) -> None:
        self._api = api

    def get(self, namespace: str, name: str, timeout_seconds: float) -> Mapping[str, Any]:
        return self._api.claim(namespace, name)

    def list(self, timeout_seconds: float) -> Iterable[Mapping[str, Any]]:
        return self._api.claims()


class EngineCalls:
    """The two calls of a plugin as function calls; the messages are made by the plugin's own service."""

    def __init__(self, engine: Engine) -> None:
        # The service's threads serve sockets; without a server there are none.
        self._behaviours = {method.path: behaviour for method, behaviour in PrepareService(engine).methods()}

    def prepare(self, claims: Iterable[ClaimRef]) -> Any:
        """Call NodePrepareResources."""
        return self._call(PREPARE_V1, claims)

    def unprepare(self, claims: Iterable[ClaimRef]) -> Any:
        """Call NodeUnprepareResources."""
        return self._call(UNPREPARE_V1, claims)

    def _call(self, method: Method, claims: Iterable[ClaimRef]) -> Any:
        request: Any = method.request()
        for ref in claims:
            request.claims.add(namespace=ref.namespace, name=ref.name, uid=ref.uid)
        context: Any = _CallInProcess()
        return self._behaviours[method.path](request, context)


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """The machine whose files all in-process nodes of a profile share, as it was scanned."""

    profile: str
    root: Path
    paths: HostPaths
    inventory: Inventory
    renderer: CdiRenderer

    @classmethod
    def make(cls, profile: str, root: Path, *, driver: str) -> SharedMachine:
        """Make the files under `root` and scan them through the simulated NVML. A second or less."""
        machine = SimulatedNode(profile, root)
        paths = HostPaths(**machine.paths_kwargs())
        session = NvmlSession(InjectedLibrary(machine.library))
        try:
            inventory = scan(session, paths, profiles=True)
        finally:
            session.close()
        offer_all_capabilities(machine)
        return cls(profile, root, paths, inventory, CdiRenderer(paths, CdiOptions(driver=driver)))

    def inventory_of(self, node: str) -> Inventory:
        """Give the inventory of the node with this name: the same GPUs with UUIDs of their own."""
        uuids = {slot.minor: slot.uuid for slot in machine_profile(self.profile, salt=node).gpus}
        gpus = tuple(replace(gpu, uuid=uuids[gpu.minor]) for gpu in self.inventory.gpus)
        return replace(self.inventory, gpus=gpus)


class InProcessNode:
    """One node: its pool, its engine, its pods. What `PodWork` sees of it is a kubelet."""

    def __init__(
        self,
        name: str,
        machine: SharedMachine,
        api: LocalApi,
        *,
        driver: str,
        kubernetes: tuple[int, int],
        timings: Timings,
        mig_mode: MigMode = DEFAULT_MIG_MODE,
    ) -> None:
        self.name, self.profile, self.timings = name, machine.profile, timings
        self._machine_root = machine.root
        self.root = machine.root / "nodes" / name
        self.cdi_root, self.state_dir = self.root / "cdi", self.root / "state"
        self.inventory = machine.inventory_of(name)
        self.pool: PoolContent = build_pool(
            self.inventory, node_name=name, driver=driver, features=ServerFeatures.of_version(*kubernetes),
            mig_mode=mig_mode,
        )  # fmt: skip
        partitions = MigInMemory(self.profile, salt=name)
        settings = EngineSettings(
            driver=driver, pool=name, state_dir=self.state_dir, cdi_root=self.cdi_root, boot_id=boot_id(machine.paths),
            create_partitions=mig_mode == "dynamic", parallel_claims=_WORKERS,
        )  # fmt: skip
        self.sharing = memory_sharing(
            machine.paths, driver=driver, state_dir=self.state_dir, host_path=self._in_machine
        )
        ports = EnginePorts(
            source=_Claims(api), inventory=lambda: partitions.on(self.inventory), renderer=machine.renderer,
            mig=partitions, strategies=self.sharing.strategies, effects=self.sharing.effects,
        )  # fmt: skip
        self.engine = Engine(settings, ports)
        self.engine.open()
        calls = EngineCalls(self.engine)
        self.manager = DraManager(
            api,
            lambda name: calls if name == driver else None,
            state=self.root / "dra_manager_state",
            replace_devices=KubeletVersion(kubernetes[1]).replaces_devices,
        )
        runtime = Runtime(machine.root, cdi_dirs=(f"/nodes/{name}/cdi",))
        self.pods = PodRuns(self.manager, runtime=runtime)

    def _in_machine(self, path: Path) -> str:
        """Give a path as the machine's files have it: containers of all its nodes see them."""
        return "/" + str(path.relative_to(self._machine_root))

    def health(self) -> dict[tuple[str, str, str], tuple[str, str]]:
        """Give nothing: no health is streamed here."""
        return {}


class InProcessNodes:
    """All in-process nodes of a cluster: one thread that looks, a few that work.

    Args:
        server: the API server.
        root: a directory of their own; they make one below it for each profile.
        driver: the driver's name.
        version: the Kubernetes version, `1.36`.
        timings: of the kubelets.
        mig_mode: as `dra plugin --mig-mode`.
    """

    def __init__(
        self,
        server: SimApiServer,
        root: Path,
        *,
        driver: str,
        version: str,
        timings: Timings,
        mig_mode: MigMode = DEFAULT_MIG_MODE,
    ) -> None:
        major, _, minor = version.partition(".")
        self._kubernetes = (int(major), int(minor))
        self._root, self._driver, self._timings, self._mig_mode = root, driver, timings, mig_mode
        self._control = ControlApi(server, on_change=self._noticed)
        self._api = LocalApi(self._control)
        self._machines: dict[str, SharedMachine] = {}
        self.nodes: dict[str, InProcessNode] = {}
        self._work: dict[str, PodWork] = {}
        self._lock = threading.Lock()
        self._pods: dict[str, dict[str, Json]] = {}
        # Nodes to look at, and the names of slices of ours that somebody deleted.
        self._dirty: set[str] = set()
        self._lost_slices: set[str] = set()
        self._slices: dict[str, Json] = {}
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="in-process-pods")
        self._thread = threading.Thread(target=self._run, name="in-process-nodes", daemon=True)

    def add(self, name: str, profile: str) -> InProcessNode:
        """Make a node and publish its pool. The Node object is the caller's."""
        machine = self._machines.get(profile)
        if machine is None:
            root = self._root / f"m{len(self._machines)}"
            machine = self._machines[profile] = SharedMachine.make(profile, root, driver=self._driver)
        node = InProcessNode(
            name, machine, self._api,
            driver=self._driver, kubernetes=self._kubernetes, timings=self._timings, mig_mode=self._mig_mode,
        )  # fmt: skip
        self.nodes[name] = node
        self._work[name] = PodWork(
            node, self._api,
            submit=self._workers.submit, wake=self._wake_for(name), tell=self._tell,
        )  # fmt: skip
        for number, spec in enumerate(node.pool.specs(generation=1)):
            title = f"{name}-{self._driver}-{number}"
            self._slices[title] = {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": title}, "spec": spec,
            }  # fmt: skip
            self._control.create(SLICES, self._slices[title])
        return node

    def start(self) -> None:
        """Follow the pods of all nodes."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following. Slices, records and CDI files stay."""
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self._workers.shutdown(wait=True)

    # -- news ----------------------------------------------------------------------------------------

    def _noticed(self, resource: str, change: Change) -> None:
        """Take a write to the API (under its lock)."""
        if resource == SLICES.key and change.after is None and change.key[1] in self._slices:
            with self._lock:
                self._lost_slices.add(change.key[1])
            self._woken.set()
        if resource != PODS.key:
            return
        pod = change.after if change.after is not None else change.before
        name = ((pod or {}).get("spec") or {}).get("nodeName")
        if pod is None or name not in self._work:
            return
        with self._lock:
            pods = self._pods.setdefault(name, {})
            if change.after is None:
                pods.pop(pod["metadata"]["uid"], None)
            else:
                pods[pod["metadata"]["uid"]] = pod
            self._dirty.add(name)
        self._woken.set()

    def _wake_for(self, name: str) -> Callable[[], None]:
        def wake() -> None:
            with self._lock:
                self._dirty.add(name)
            self._woken.set()

        return wake

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.wait(TICK_SECONDS)
            self._woken.clear()
            with self._lock:
                todo = {name: list(self._pods.get(name, {}).values()) for name in self._dirty}
                lost, self._lost_slices = self._lost_slices, set()
                self._dirty = {name for name in todo if self._work[name].waits_for_retry}
            if self._stop.is_set():
                return
            for name, pods in todo.items():
                self._work[name].tick(pods)
                self._reconcile(self.nodes[name], pods)
            for title in lost:
                self._control.attempt(self._restore, title)

    @staticmethod
    def _reconcile(node: InProcessNode, pods: list[Json]) -> None:
        """Unprepare the claims of pods that vanished without a word."""
        try:
            node.manager.reconcile({pod["metadata"]["uid"] for pod in pods if not is_over(pod)})
        except UnprepareError as error:
            log.info("sim_reconcile_failed", node=node.name, error=str(error))

    def _restore(self, title: str) -> None:
        if self._control.get(SLICES, title) is None:
            self._control.create(SLICES, self._slices[title])
            log.info("sim_slice_restored", name=title)

    def _tell(self, pod: Json, reason: str, message: str) -> None:
        self._control.event(pod, "Warning", reason=reason, message=message, component="kubelet")
