"""Pods of the API live and end on the simulated kubelet's node."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dra.errors import DeviceError
from dra.health.feed import DeviceCondition, HealthFeed
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.plugin.endpoint import Endpoint
from dra.plugin.sockets import plan_sockets
from dra.sim.apiserver import SimApiServer
from dra.sim.kubelet import PodLoop, SimKubelet, Timings
from dra.sim.runtime import Runtime
from dra.sim.tree.nodes import make_device_node
from tests.places import SHORT

DRIVER = "gpu.nvidia.com"
FAST = Timings(
    scan=0.02, first_back_off=0.05, health_retry=0.1, reconcile=0.1, prepare_retry=0.1, unprepare_retry=0.1
)


@dataclass(frozen=True)
class Prepared:
    request_names: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass
class Engine:
    """Gives every claim GPU 0 and writes its CDI file; fails while `error` is set."""

    cdi: Path
    error: DeviceError | None = None
    prepared: set = field(default_factory=set)
    calls: list = field(default_factory=list)

    def prepare(self, refs, within_seconds=None):
        self.calls.append(("prepare", [ref.name for ref in refs]))
        return {ref.uid: self.error or self._write(ref.uid) for ref in refs}

    def _write(self, uid):
        self.prepared.add(uid)
        name = f"{uid}-gpu-0"
        spec = {
            "cdiVersion": "0.5.0", "kind": "k8s.gpu.nvidia.com/claim",
            "devices": [{"name": name, "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
        }  # fmt: skip
        (self.cdi / f"{uid}.yaml").write_text(json.dumps(spec))
        return (Prepared(("gpu",), "node-a", "gpu-0", (f"k8s.gpu.nvidia.com/claim={name}",)),)

    def unprepare(self, refs):
        self.calls.append(("unprepare", [ref.name for ref in refs]))
        for ref in refs:
            self.prepared.discard(ref.uid)
            (self.cdi / f"{ref.uid}.yaml").unlink(missing_ok=True)
        return {ref.uid: self.error for ref in refs}


class World:
    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="w", dir=SHORT))
        self.kubelet_root = self.root / "var/lib/kubelet"
        (self.kubelet_root / "plugins_registry").mkdir(parents=True)
        (self.root / "var/run/cdi").mkdir(parents=True)
        make_device_node(self.root / "dev/nvidia0", 195, 0)
        self.api = SimApiServer().start()
        self.client = KubeClient(
            Connection(KubeOptions(kubeconfig=str(self.api.write_kubeconfig(self.root / "kubeconfig"))))
        )
        self.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}})
        self.engine, self.feed = Engine(self.root / "var/run/cdi"), HealthFeed()
        self.endpoint = Endpoint(
            DRIVER,
            sockets=plan_sockets(
                DRIVER,
                plugins_dir=self.kubelet_root / "plugins",
                registry_dir=self.kubelet_root / "plugins_registry",
            ),
            engine=self.engine,
            feed=self.feed,
        )
        self.endpoint.start()
        self.kubelet = self.loop = None
        self.start_kubelet()

    def start_kubelet(self):
        self.kubelet = SimKubelet(
            "node-a",
            self.kubelet_root,
            self.client,
            slices=self.client,
            runtime=Runtime(self.root),
            timings=FAST,
        )
        self.loop = PodLoop(self.kubelet, self.client)
        self.kubelet.start()
        self.kubelet.wait_registered(DRIVER)
        self.loop.start()

    def stop_kubelet(self):
        self.loop.stop()
        self.kubelet.stop()

    def close(self):
        self.stop_kubelet()
        self.endpoint.stop(grace_seconds=0)
        self.client.close()
        self.api.stop()
        shutil.rmtree(self.root)

    def pod(self, name, *, command=("sleep", "infinity"), restart="Always"):
        """Create a claim that is allocated to a new pod which is bound to the node."""
        base = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
        claim = {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": f"{name}-claim"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
        }  # fmt: skip
        claim = self.api.create(base, claim)
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "nodeName": "node-a", "restartPolicy": restart,
                "resourceClaims": [{"name": "gpu", "resourceClaimName": f"{name}-claim"}],
                "containers": [
                    {"name": "main", "image": "cuda", "command": list(command), "resources": {"claims": [{"name": "gpu"}]}}
                ],
            },
        }  # fmt: skip
        result = {"request": "gpu", "driver": DRIVER, "pool": "node-a", "device": "gpu-0"}
        claim["status"] = {"allocation": {"devices": {"results": [result]}}}
        status, claim = self.api.request("PUT", f"{base}/{name}-claim/status", claim)
        assert status == 200, claim
        pod = self.api.create("/api/v1/namespaces/default/pods", pod)
        claim["status"]["reservedFor"] = [{"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}]
        status, answer = self.api.request("PUT", f"{base}/{name}-claim/status", claim)
        assert status == 200, answer
        return pod

    def status(self, name):
        code, answer = self.api.request("GET", f"/api/v1/namespaces/default/pods/{name}")
        return answer["status"] if code == 200 else None

    def events(self):
        _, answer = self.api.request("GET", "/api/v1/namespaces/default/events")
        return [(event["reason"], event["message"]) for event in answer["items"]]

    def wait(self, condition, seconds=60.0):
        ticks = threading.Event()
        for _ in range(int(seconds / 0.02)):
            answer = condition()
            if answer:
                return answer
            ticks.wait(0.02)
        raise AssertionError("the wanted state did not come")

    def wait_phase(self, name, phase):
        return self.wait(lambda: (status := self.status(name)) and status.get("phase") == phase and status)


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def test_a_pod_runs_with_its_gpu_and_is_gone_after_its_deletion(world):
    pod = world.pod("a")
    status = world.wait_phase("a", "Running")
    assert status["containerStatuses"][0]["ready"] is True
    assert world.kubelet.pods.get(pod["metadata"]["uid"]).views["main"].gpus == (0,)
    world.api.request("DELETE", "/api/v1/namespaces/default/pods/a")
    world.wait(lambda: world.status("a") is None)
    assert [verb for verb, _ in world.engine.calls] == ["prepare", "unprepare"]
    assert world.engine.prepared == set()


def test_a_pod_whose_command_ends_is_unprepared_and_succeeds(world):
    world.pod("a", command=("true",), restart="Never")
    status = world.wait_phase("a", "Succeeded")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    assert [verb for verb, _ in world.engine.calls] == ["prepare", "unprepare"]


def test_a_command_that_needs_what_is_not_there_fails_the_pod(world):
    world.pod("a", command=("nvidia-smi", "-L"), restart="Never")
    status = world.wait_phase("a", "Failed")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 127


def test_a_failed_prepare_is_an_event_and_is_tried_again(world):
    world.engine.error = DeviceError("DRA-DEVICE-HELD", "gpu-0 is held by claim x/y")
    world.pod("a")
    (reason, message) = world.wait(world.events)[0]
    assert reason == "FailedPrepareDynamicResources"
    assert message.startswith(
        "Failed to prepare dynamic resources: NodePrepareResources failed for ResourceClaim a-claim"
    )
    assert "DRA-DEVICE-HELD: gpu-0 is held by claim x/y" in message
    world.engine.error = None
    world.wait_phase("a", "Running")


def test_a_pod_whose_unprepare_fails_stays_until_it_works(world):
    world.pod("a")
    world.wait_phase("a", "Running")
    world.engine.error = DeviceError("DRA-BUSY", "in use")
    world.api.request("DELETE", "/api/v1/namespaces/default/pods/a")
    world.wait(lambda: [verb for verb, _ in world.engine.calls].count("unprepare") >= 2)
    assert world.status("a") is not None
    world.engine.error = None
    world.wait(lambda: world.status("a") is None)


def test_a_cdi_file_that_is_missing_at_container_creation_shows_in_the_pods_status(world):
    world.engine._write = lambda uid: (
        Prepared(("gpu",), "node-a", "gpu-0", ("k8s.gpu.nvidia.com/claim=none",)),
    )
    world.pod("a")
    waiting = world.wait(
        lambda: (
            (status := world.status("a"))
            and status.get("containerStatuses")
            and status["containerStatuses"][0]
        )
    )["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerError"
    assert "unresolvable CDI devices k8s.gpu.nvidia.com/claim=none" in waiting["message"]


def test_the_claim_of_a_force_deleted_pod_is_unprepared_by_the_reconcile_loop(world):
    world.pod("a")
    world.wait_phase("a", "Running")
    world.api.request("DELETE", "/api/v1/namespaces/default/pods/a?gracePeriodSeconds=0")
    world.wait(lambda: world.engine.prepared == set())
    assert world.kubelet.pods.all() == []


def test_a_restarted_kubelet_takes_over_running_pods_without_a_prepare_call(world):
    pod = world.pod("a")
    world.wait_phase("a", "Running")
    world.stop_kubelet()
    world.start_kubelet()
    running = world.wait(lambda: world.kubelet.pods.get(pod["metadata"]["uid"]))
    assert running.views["main"].gpus == (0,)
    assert [verb for verb, _ in world.engine.calls] == ["prepare"]
    world.api.request("DELETE", "/api/v1/namespaces/default/pods/a")
    world.wait(lambda: world.status("a") is None)
    assert world.engine.prepared == set()


def test_the_health_of_a_device_shows_in_the_status_of_its_pod(world):
    world.feed.publish((DeviceCondition("node-a", "gpu-0"),))
    world.pod("a")
    world.wait_phase("a", "Running")

    def shown():
        statuses = world.status("a")["containerStatuses"][0].get("allocatedResourcesStatus") or []
        return [(entry["name"], r["health"]) for entry in statuses for r in entry["resources"]]

    world.wait(lambda: shown() == [("claim:gpu", "Healthy")])
    world.feed.publish((DeviceCondition("node-a", "gpu-0", "Unhealthy", "XID 79"),))
    world.wait(lambda: shown() == [("claim:gpu", "Unhealthy")])
