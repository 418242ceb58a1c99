"""kubectl drives the simulated cluster through the walk-through of docs/simulation.md.

kubectl is looked for on the PATH and in KUBEBUILDER_ASSETS; without it these tests skip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from dra.sim.cluster import SimCluster
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
# Those that need more of a cluster than nodes and DeviceClasses are run where that is set up.
ELSEWHERE = {
    "fractional": "test_shares_cluster.py", "shares": "test_shares_cluster.py",
    "gpu-node-policy": "test_policies_cluster.py",
    "deployment": "test_workload_examples.py", "job": "test_workload_examples.py",
    "inference-server": "test_workload_examples.py", "training-pcie-root": "test_workload_examples.py",
    "vfio": "test_passthrough_examples.py", "vfio-iommufd": "test_passthrough_examples.py",
}  # fmt: skip
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.stem not in ELSEWHERE)
KUBECTL = shutil.which("kubectl") or shutil.which("kubectl", path=os.environ.get("KUBEBUILDER_ASSETS", ""))
NODES = [("gpu-node-1", "dgx-h100"), ("gpu-node-2", "l40s-x4"), ("gpu-node-3", "l40s-x4")]

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="no kubectl on the PATH or in KUBEBUILDER_ASSETS")

DEPLOYMENT = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: inference}
spec:
  replicas: 3
  selector: {matchLabels: {app: inference}}
  template:
    metadata: {labels: {app: inference}}
    spec:
      containers:
      - {name: main, image: "ubuntu:22.04", command: [sleep, "9999"], resources: {claims: [{name: gpu}]}}
      resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
"""

JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: batch}
spec:
  completions: 3
  parallelism: 2
  template:
    spec:
      restartPolicy: Never
      containers:
      - {name: main, image: "ubuntu:22.04", command: [nvidia-smi, -L], resources: {claims: [{name: gpu}]}}
      resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
"""

PENDING = """
apiVersion: v1
kind: Pod
metadata: {name: greedy}
spec:
  containers: [{name: main, image: "ubuntu:22.04", resources: {claims: [{name: gpus}]}}]
  resourceClaims: [{name: gpus, resourceClaimName: nine-gpus}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: nine-gpus}
spec: {devices: {requests: [{name: gpus, exactly: {deviceClassName: gpu.nvidia.com, count: 9}}]}}
"""


class Kubectl:
    """Runs kubectl against one cluster."""

    def __init__(self, kubeconfig: Path, home: Path) -> None:
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(home)}

    def run(self, *words: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [KUBECTL, *words], input=stdin, env=self.env, capture_output=True, text=True, timeout=90
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def __call__(self, *words: str, stdin: str = "") -> str:
        return self.run(*words, stdin=stdin).stdout

    def table(self, *words: str) -> list[dict[str, str]]:
        """A printed table as dicts by column."""
        head, *rows = self(*words).splitlines()
        starts = [head.index(name) for name in head.split()]
        return [
            {head[a:b].strip(): row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)}
            for row in rows
        ]


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="dsk", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), NODES, real=1) as made:
            made.wait_ready()
            yield made


@pytest.fixture
def kubectl(cluster, tmp_path_factory):
    found = Kubectl(cluster.kubeconfig, cluster.root)
    for name in ("deviceclasses", "deviceclasses-mig"):
        found("apply", "-f", str(ROOT / f"deploy/manifests/{name}.yaml"))
    yield found
    # Whatever a test left: the next one starts with an empty cluster.
    found(
        "delete",
        "deployment,job,pod,resourceclaim,resourceclaimtemplate",
        "--all",
        "--wait=true",
        "--timeout=60s",
    )
    cluster.until(lambda: not cluster.claims(), "the claims to go")


def test_nodes_and_slices_are_shown_with_the_servers_columns(kubectl):
    nodes = kubectl.table("get", "nodes")
    assert [(row["NAME"], row["STATUS"], row["VERSION"]) for row in nodes] == [
        (name, "Ready", "v1.36.0-sim") for name, _ in NODES
    ]
    slices = kubectl.table("get", "resourceslices")
    assert {(row["NODE"], row["DRIVER"], row["POOL"]) for row in slices} == {
        (name, "gpu.nvidia.com", name) for name, _ in NODES
    }
    only = kubectl.table("get", "resourceslices", "--field-selector", "spec.nodeName=gpu-node-1")
    assert {row["NODE"] for row in only} == {"gpu-node-1"}
    names = {row["NAME"] for row in kubectl.table("get", "deviceclasses")}
    assert {"gpu.nvidia.com", "mig.nvidia.com", "mig-1g.10gb.nvidia.com"} <= names


def test_the_other_examples_are_run_too():
    for name, file in ELSEWHERE.items():
        assert (ROOT / f"examples/{name}.yaml").exists()
        assert name in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_runs_and_leaves_nothing_when_it_is_deleted(kubectl, cluster, file):
    kubectl("apply", "-f", str(file))
    listed = json.loads(kubectl("get", "-f", str(file), "-o", "json"))
    items = listed.get("items", [listed])
    namespace = next(item["metadata"]["name"] for item in items if item["kind"] == "Namespace")
    pods = [item["metadata"]["name"] for item in items if item["kind"] == "Pod"]
    kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod", "--all", "--timeout=60s")
    shown = kubectl.table("get", "pods", "-n", namespace)
    assert sorted(row["NAME"] for row in shown) == sorted(pods)
    assert {row["STATUS"] for row in shown} == {"Running"}
    assert all(row["READY"].partition("/")[0] == row["READY"].partition("/")[2] for row in shown)
    claims = kubectl.table("get", "resourceclaims", "-n", namespace)
    assert claims and {row["STATE"] for row in claims} == {"allocated,reserved"}
    kubectl("delete", "-f", str(file), "--ignore-not-found", "--timeout=60s")
    assert kubectl.run("get", "ns", namespace, check=False).returncode == 1
    assert not cluster.claims()
    cdi_root = cluster.nodes["gpu-node-1"].cdi_root
    cluster.until(lambda: not list(cdi_root.glob("*claim_*")), "the CDI files to go")


def test_a_pod_that_cannot_be_placed_shows_the_schedulers_event_in_describe(kubectl):
    kubectl("apply", "-f", "-", stdin=PENDING)
    kubectl(
        "wait", "--for=jsonpath={.status.conditions[0].reason}=Unschedulable", "pod/greedy", "--timeout=60s"
    )
    text = kubectl("describe", "pod", "greedy")
    assert "0/3 nodes are available: 3 cannot allocate all claims." in text
    assert "FailedScheduling" in text and "default-scheduler" in text
    events = kubectl("events", "--for", "pod/greedy")
    assert "FailedScheduling" in events
    assert kubectl.table("get", "resourceclaims")[0]["STATE"] == "pending"
    # What was asked for cannot be edited; a smaller claim can be made.
    kubectl("delete", "resourceclaim", "nine-gpus")
    kubectl("apply", "-f", "-", stdin=PENDING.replace("count: 9", "count: 8"))
    kubectl("wait", "--for=condition=Ready", "pod/greedy", "--timeout=60s")
    assert "gpu-node-1" in kubectl("get", "pod", "greedy", "-o", "wide")


def test_a_watch_sees_a_pod_come_and_go(kubectl, cluster):
    cluster.api.requests.clear()
    watch = subprocess.Popen(
        [KUBECTL, "get", "pods", "-w", "--no-headers"], env=kubectl.env, stdout=subprocess.PIPE, text=True
    )
    try:
        # kubectl says nothing when it has its first list; the server does.
        asked = "/api/v1/namespaces/default/pods"
        cluster.until(lambda: cluster.api.requests.count("GET", asked), "kubectl to list pods")
        kubectl("apply", "-f", "-", stdin=DEPLOYMENT.replace("replicas: 3", "replicas: 1"))
        seen = []
        for line in watch.stdout:
            seen.append(line.split()[2])
            if seen[-1] == "Running":
                break
        assert seen[0] == "Pending"
        kubectl("delete", "deployment", "inference")
        for line in watch.stdout:
            if line.split()[2] == "Terminating":
                break
        else:
            pytest.fail("the watch ended")
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()


def test_a_deployment_is_rolled_out_scaled_changed_and_deleted(kubectl, cluster):
    kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    assert "successfully rolled out" in kubectl("rollout", "status", "deployment/inference", "--timeout=60s")
    (row,) = kubectl.table("get", "deployments")
    assert (row["READY"], row["UP-TO-DATE"], row["AVAILABLE"]) == ("3/3", "3", "3")
    kubectl("scale", "deployment/inference", "--replicas=5")
    kubectl("wait", "--for=jsonpath={.status.readyReplicas}=5", "deployment/inference", "--timeout=60s")
    assert len(kubectl.table("get", "resourceclaims")) == 5
    kubectl("set", "image", "deployment/inference", "main=ubuntu:24.04")
    kubectl("rollout", "status", "deployment/inference", "--timeout=60s")
    images = kubectl(
        "get", "pods", "-l", "app=inference", "-o", "jsonpath={.items[*].spec.containers[0].image}"
    )
    assert set(images.split()) == {"ubuntu:24.04"}
    assert len(kubectl.table("get", "replicasets")) == 2
    assert "Scaled up replica set" in kubectl("describe", "deployment", "inference")
    kubectl("delete", "deployment", "inference", "--cascade=foreground", "--timeout=60s")
    assert cluster.pods() == []


def test_a_job_completes(kubectl):
    kubectl("apply", "-f", "-", stdin=DEPLOYMENT.partition("---")[0])
    kubectl("apply", "-f", "-", stdin=JOB)
    kubectl("wait", "--for=condition=complete", "job/batch", "--timeout=60s")
    (row,) = kubectl.table("get", "jobs")
    assert row["COMPLETIONS"] == "3/3"
    pods = kubectl.table("get", "pods", "-l", "job-name=batch")
    assert [pod["STATUS"] for pod in pods] == ["Completed"] * 3


def test_a_taint_rule_drains_a_gpu(kubectl, cluster):
    kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    kubectl("rollout", "status", "deployment/inference", "--timeout=60s")
    held = {r["device"] for c in cluster.claims() for r in c["status"]["allocation"]["devices"]["results"]}
    assert held == {"gpu-0", "gpu-1", "gpu-2"}
    rule = """
apiVersion: resource.k8s.io/v1beta2
kind: DeviceTaintRule
metadata: {name: replace-gpu-1}
spec:
  deviceSelector: {driver: gpu.nvidia.com, pool: gpu-node-1, device: gpu-1}
  taint: {key: example.com/maintenance, effect: NoExecute}
"""
    kubectl("apply", "-f", "-", stdin=rule)

    def moved():
        results = [
            result["device"]
            for claim in cluster.claims()
            for result in ((claim.get("status") or {}).get("allocation") or {})
            .get("devices", {})
            .get("results", [])
        ]
        return sorted(results) == ["gpu-0", "gpu-2", "gpu-3"]

    cluster.until(moved, "the pod to move to another GPU")
    kubectl("rollout", "status", "deployment/inference", "--timeout=60s")
    kubectl("delete", "devicetaintrule", "replace-gpu-1")


def test_a_faulty_gpu_claim_is_explained_by_api_and_kubectl(kubectl):
    bad = PENDING.partition("---")[2].replace("count: 9", "count: -1")
    refused = kubectl.run("apply", "-f", "-", stdin=bad, check=False)
    assert refused.returncode == 1
    assert "spec.devices.requests[0].exactly.count: Invalid value: -1" in refused.stderr
    assert "DeviceRequest" in kubectl("explain", "resourceclaim.spec.devices.requests")
