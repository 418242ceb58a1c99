"""`dra sim demo`: the main job from beginning to end on one simulated node, told step by step.

Every line that is printed was read back from the API server, from the driver's files or from the simulated
containers; a step that does not come out as it should ends the demo with an error.
"""

from __future__ import annotations

import json
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.errors import DraError
from dra.prepare.sharing.time_slice import INTERVALS
from dra.sim.cluster import SimCluster
from dra.sim.cluster_node import ClusterNode
from dra.sim.runtime import ContainerView

Json = dict[str, Any]
Print = Callable[[str], None]
# Source: nvmlComputeMode_t.
_COMPUTE_MODES = {2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


@dataclass(frozen=True, slots=True)
class Chapter:
    """An example and what it shows. `gpus` is how many GPUs each container must see, by `pod/container`.

    `passing`: it is deleted again before the story goes on.
    """

    file: str
    title: str
    gpus: dict[str, int]
    # Containers that must see the same GPUs, and ones that must not share any.
    same: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    passing: bool = False


CHAPTERS = (
    Chapter("time-slicing.yaml", "Two pods take turns on one GPU, with a longer time-slice",
            {"first/main": 1, "second/main": 1}, same=("first/main", "second/main"), passing=True),
    Chapter("mps.yaml", "Two containers compute at once on one GPU, each with a limit, through MPS",
            {"pair/left": 1, "pair/right": 1}, same=("pair/left", "pair/right"), passing=True),
    Chapter("gpu-per-pod.yaml", "One GPU for each pod, from one ResourceClaimTemplate",
            {"first/main": 1, "second/main": 1}, apart=("first/main", "second/main")),
    Chapter("gpu-shared-by-containers.yaml", "Two containers of a pod share one claim",
            {"pair/left": 1, "pair/right": 1}, same=("pair/left", "pair/right")),
    Chapter("gpu-shared-by-pods.yaml", "Two pods share one ResourceClaim",
            {"writer/main": 1, "reader/main": 1}, same=("writer/main", "reader/main")),
    Chapter("two-gpus.yaml", "One pod with two GPUs", {"trainer/main": 2}),
    Chapter("selectors.yaml", "CEL selectors on productName, memory and driverVersion", {"chooser/main": 1}),
    Chapter("extended-resource.yaml", "nvidia.com/gpu: 1, through the DeviceClass's extended resource",
            {"classic/main": 1}),
    Chapter("admin-access.yaml", "Admin access: a monitor sees all GPUs, also those in use", {"watcher/main": 8}),
)  # fmt: skip


class Demo:
    """Runs the chapters on a cluster of one DGX H100."""

    def __init__(self, examples: Path, manifests: Path, say: Print) -> None:
        self._examples, self._manifests, self._say = examples, manifests, say
        self._started = time.monotonic()

    def run(self) -> None:
        """Tell the whole story.

        Raises:
            DraError: a step failed.
        """
        for folder in (self._examples, self._manifests):
            if not folder.is_dir():
                raise DraError(
                    "DRA-SIM-EXAMPLES",
                    f"{folder} is not there",
                    remedy="Run the demo in a checkout of the project, or give --examples and --manifests.",
                )
        # Not below TMPDIR, which may be long: the path of a unix socket has 107 bytes.
        with tempfile.TemporaryDirectory(prefix="dra", dir="/tmp", ignore_cleanup_errors=True) as place:
            self._step(
                "Start a cluster: API server, scheduler, and a node with 8 simulated H100, our driver on it"
            )
            with SimCluster(Path(place), [("node-1", "dgx-h100")]) as cluster:
                cluster.wait_ready()
                node = cluster.nodes["node-1"]
                self._note(f"export KUBECONFIG={cluster.kubeconfig}    (kubectl works while this runs)")
                self._step("The driver is registered with the kubelet and has published its GPUs")
                self._show_slices(cluster)
                self._step("The administrator installs the DeviceClasses")
                for made in cluster.apply(self._manifests / "deviceclasses.yaml"):
                    extended = made["spec"].get("extendedResourceName")
                    self._note(
                        made["metadata"]["name"] + (f"   (also asked for as {extended})" if extended else "")
                    )
                for chapter in CHAPTERS:
                    self._chapter(cluster, node, chapter)
                self._full(cluster)
                self._unprepare(cluster, node)
            self._step("The driver and the cluster have ended")
        self._note(f"{time.monotonic() - self._started:.0f} s in all")

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, text: str) -> None:
        self._say(f"\n== {text}")

    def _note(self, text: str) -> None:
        self._say(textwrap.indent(text, "   "))

    def _show_slices(self, cluster: SimCluster) -> None:
        for item in cluster.slices():
            spec = item["spec"]
            self._note(
                f"ResourceSlice {item['metadata']['name']}  node {spec['nodeName']}  pool {spec['pool']}"
            )
            if sets := spec.get("sharedCounters"):
                self._note(f"  counters of {len(sets)} GPUs, which whole GPUs and their partitions draw on")
            devices = spec.get("devices") or []
            profiles = Counter(
                device["attributes"]["profile"]["string"]
                for device in devices
                if "profile" in device["attributes"]
            )
            if profiles:
                text = ", ".join(f"{count} x {profile}" for profile, count in profiles.items())
                self._note(f"  partitions that can be made on demand: {text}")
            for device in devices:
                if device["attributes"]["type"]["string"] != "gpu":
                    continue
                facts = {name: next(iter(value.values())) for name, value in device["attributes"].items()}
                self._note(
                    f"  {device['name']:<6} {facts['productName']}  {device['capacity']['memory']['value']}"
                    f"  driver {facts['driverVersion']}  {facts['resource.kubernetes.io/pciBusID']}"
                )

    def _chapter(self, cluster: SimCluster, node: ClusterNode, chapter: Chapter) -> None:
        self._step(f"{chapter.title}   (examples/{chapter.file})")
        file = self._examples / chapter.file
        pods = [item for item in cluster.apply(file) if item["kind"] == "Pod"]
        uids = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods}
        cluster.until(
            lambda: all(
                pod["status"].get("phase") == "Running"
                for pod in cluster.pods()
                if pod["metadata"]["uid"] in uids
            ),
            f"the pods {', '.join(uids.values())} to run",
            log=node.log,
        )
        seen: dict[str, tuple[int, ...]] = {}
        for uid in uids:
            self._show_pod(cluster, node, uid, seen)
        self._show_sharing(node)
        self._check(chapter, seen)
        if chapter.passing:
            cluster.delete(file)
            cluster.until(lambda: not cluster.pods() and not cluster.claims(), "the pods to go", log=node.log)
            cluster.until(lambda: not _sharing(node), "the GPU to be as it was", log=node.log)
            self._note("deleted again; the GPU is as it was")

    def _show_pod(
        self, cluster: SimCluster, node: ClusterNode, uid: str, seen: dict[str, tuple[int, ...]]
    ) -> None:
        pod = next(pod for pod in cluster.pods() if pod["metadata"]["uid"] == uid)
        name = pod["metadata"]["name"]
        for claim in _claims_of(pod, cluster.claims()):
            results = claim["status"]["allocation"]["devices"]["results"]
            devices = ", ".join(f"{item['request']} -> {item['device']}" for item in results)
            file = node.cdi_root / f"k8s.gpu.nvidia.com-claim_{claim['metadata']['uid']}.yaml"
            spec = json.loads(file.read_text(encoding="utf-8"))
            self._note(f"claim {claim['metadata']['name']}: {devices}")
            self._note(f"  CDI {file.name}: {len(spec['devices'])} device(s), {_size(spec)}")
        running = node.kubelet.pods.get(uid)
        if running is None:
            raise DraError("DRA-SIM-DEMO", f"the kubelet does not run pod {name}")
        for container, view in running.views.items():
            seen[f"{name}/{container}"] = view.gpus
            self._note(f"container {name}/{container} sees {_sees(view)}")
            for line in _smi_list(view, cluster.slices()):
                self._note(f"  {line}")

    def _show_sharing(self, node: ClusterNode) -> None:
        for line in _sharing(node):
            self._note(line)

    @staticmethod
    def _check(chapter: Chapter, seen: dict[str, tuple[int, ...]]) -> None:
        for container, count in chapter.gpus.items():
            if len(seen[container]) != count:
                raise DraError("DRA-SIM-DEMO", f"{container} sees {len(seen[container])} GPUs, not {count}")
        if len({seen[container] for container in chapter.same}) > 1:
            raise DraError("DRA-SIM-DEMO", f"{', '.join(chapter.same)} do not see the same GPU: {seen}")
        minors = [minor for container in chapter.apart for minor in seen[container]]
        if len(set(minors)) != len(minors):
            raise DraError("DRA-SIM-DEMO", f"{', '.join(chapter.apart)} see a common GPU: {seen}")

    def _full(self, cluster: SimCluster) -> None:
        self._step("All eight GPUs are taken; one more pod waits and says why")
        template = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\n"
        text = template + textwrap.dedent(
            """\
            metadata: {name: one-gpu, namespace: default}
            spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}
            ---
            apiVersion: v1
            kind: Pod
            metadata: {name: late, namespace: default}
            spec:
              containers: [{name: main, image: ubuntu:22.04, resources: {claims: [{name: gpu}]}}]
              resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
            """
        )
        file = cluster.root / "late.yaml"
        file.write_text(text, encoding="utf-8")
        cluster.apply(file)

        def reason() -> str:
            pod = next(pod for pod in cluster.pods() if pod["metadata"]["name"] == "late")
            conditions = {item["type"]: item for item in pod["status"].get("conditions") or []}
            message = str(conditions.get("PodScheduled", {}).get("message", ""))
            return message if "cannot allocate" in message else ""

        self._note(f"pod late: {cluster.until(reason, 'the scheduler to give up on pod late')}")
        cluster.delete(file)

    def _unprepare(self, cluster: SimCluster, node: ClusterNode) -> None:
        self._step("Delete everything: the claims are unprepared, nothing is left behind")
        cluster.delete(*(self._examples / chapter.file for chapter in CHAPTERS))
        cluster.until(lambda: not cluster.pods(), "the pods to go", log=node.log)
        cluster.until(lambda: not cluster.claims(), "the claims to go", log=node.log)
        records = node.state_dir / "claims"

        def left() -> list[Path]:
            return [*node.cdi_root.glob("*claim_*"), *records.glob("*.json")]

        cluster.until(lambda: not left(), "the CDI files and records to go", log=node.log)
        self._note("pods: 0   claims: 0   CDI files: 0   claim records: 0")
        self._note(f"ResourceSlices stay, for the next pod: {len(cluster.slices())}")


def _sharing(node: ClusterNode) -> list[str]:
    """Give what sharing has changed on a node: time-slices, compute modes, and MPS daemons with their limits."""
    minors = {slot.uuid: slot.minor for slot in node.machine.profile.gpus}
    found = []
    for gpu in node.machine.control.state.gpus:
        name = f"GPU {minors[gpu.uuid]} of the node"
        if gpu.timeslice:
            found.append(f"{name} has time-slice {INTERVALS[gpu.timeslice]}")
        if gpu.compute_mode:
            found.append(f"{name} has compute mode {_COMPUTE_MODES.get(gpu.compute_mode, gpu.compute_mode)}")
    for row in node.keeper.daemons() if node.keeper is not None else ():
        limits = "; ".join(row.spec.commands()) or "no limits"
        found.append(f"MPS control daemon, process {row.pid}: {limits}")
    return found


def _claims_of(pod: Json, claims: Sequence[Json]) -> list[Json]:
    uid = pod["metadata"]["uid"]
    return [
        claim
        for claim in claims
        if any(entry.get("uid") == uid for entry in (claim.get("status") or {}).get("reservedFor") or [])
    ]


def _smi_list(view: ContainerView, slices: Sequence[Json]) -> list[str]:
    """Give what `nvidia-smi -L` tells in the container: the GPUs whose nodes it can open, by the published facts."""
    facts = {
        device["name"]: device["attributes"]
        for item in slices
        for device in item["spec"].get("devices") or ()
    }
    found = [facts[f"gpu-{minor}"] for minor in view.gpus]
    return [
        f"GPU {index}: {gpu['productName']['string']} (UUID: {gpu['uuid']['string']})"
        for index, gpu in enumerate(found)
    ]


def _size(spec: Json) -> str:
    edits = spec["containerEdits"]
    nodes = edits.get("deviceNodes") or []
    return f"{len(nodes)} control nodes, {len(edits.get('mounts') or [])} mounts, cdiVersion {spec['cdiVersion']}"


def _sees(view: ContainerView) -> str:
    nodes = sorted(path for path in view.device_nodes if path.startswith("/dev/nvidia"))
    cuda = view.libraries.get("libcuda.so.1")
    return (
        f"{len(view.gpus)} GPU(s): {' '.join(nodes)}; libcuda.so.1 -> {cuda.name if cuda else 'missing'}; "
        f"NVIDIA_VISIBLE_DEVICES={view.env.get('NVIDIA_VISIBLE_DEVICES')}"
    )
