"""The examples with workloads around the pods, and those that want a certain machine: applied, looked into, deleted."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from dra.sim.cluster import SimCluster, read_manifests
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
# Two GPUs below each root complex, 40 GiB each.
NODE = "node-1"


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="dsw", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), [(NODE, "dgx-a100")]) as made:
            made.wait_ready(timeout_seconds=90)
            made.apply(ROOT / "deploy/manifests/deviceclasses.yaml")
            yield made


@pytest.fixture
def example(cluster):
    applied = []

    def apply(name):
        applied.append(ROOT / f"examples/{name}.yaml")
        cluster.apply(applied[-1])
        return next(
            each["metadata"]["name"] for each in read_manifests(applied) if each["kind"] == "Namespace"
        )

    yield apply
    cluster.delete(*applied)
    cluster.until(lambda: not cluster.pods() and not cluster.claims(), "everything to go", timeout_seconds=60)
    node = cluster.nodes[NODE]
    cluster.until(lambda: not list(node.cdi_root.glob("*claim_*")), "the CDI files to go", timeout_seconds=60)
    assert not list((node.state_dir / "claims").glob("*.json"))


def pods_of(cluster, namespace):
    return [pod for pod in cluster.pods() if pod["metadata"]["namespace"] == namespace]


def running(cluster, namespace, count):
    def ready():
        return [p for p in pods_of(cluster, namespace) if p["status"].get("phase") == "Running"]

    cluster.until(lambda: len(ready()) == count, f"{count} pods of {namespace} to run", timeout_seconds=60)
    return ready()


def devices_of(cluster, pod):
    uid = pod["metadata"]["uid"]
    return [
        result["device"]
        for claim in cluster.claims()
        if any(ref["uid"] == uid for ref in claim["status"].get("reservedFor") or [])
        for result in claim["status"]["allocation"]["devices"]["results"]
    ]


def attribute(cluster, device, name):
    for item in cluster.slices():
        for each in item["spec"].get("devices") or []:
            if each["name"] == device:
                return next(iter(each["attributes"][name].values()))
    raise AssertionError(device)


@pytest.mark.parametrize("name", ["deployment", "inference-server"])
def test_each_pod_of_a_deployment_has_a_gpu_of_its_own(cluster, example, name):
    pods = running(cluster, example(name), 2)
    devices = [device for pod in pods for device in devices_of(cluster, pod)]
    assert len(devices) == len(set(devices)) == 2
    for pod in pods:
        (view,) = cluster.nodes[NODE].kubelet.pods.get(pod["metadata"]["uid"]).views.values()
        assert [f"gpu-{minor}" for minor in view.gpus] == devices_of(cluster, pod)


def test_a_job_ends_with_all_pieces_and_frees_its_gpus(cluster, example):
    namespace = example("job")
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/batch"

    def done():
        status = cluster.api.request("GET", path)[1]["status"]
        return any(c["type"] == "Complete" and c["status"] == "True" for c in status.get("conditions") or [])

    cluster.until(done, "the job to complete", timeout_seconds=60)
    assert cluster.api.request("GET", path)[1]["status"]["succeeded"] == 4
    cluster.until(
        lambda: not any(c["status"].get("allocation") for c in cluster.claims()), "the GPUs to be free"
    )


def test_two_gpus_for_training_are_below_one_root_complex(cluster, example):
    (pod,) = running(cluster, example("training-pcie-root"), 1)
    devices = devices_of(cluster, pod)
    assert len(set(devices)) == 2
    roots = {attribute(cluster, device, "resource.kubernetes.io/pcieRoot") for device in devices}
    assert len(roots) == 1


def test_the_first_kind_of_gpu_that_is_there_is_taken(cluster, example):
    """No H200 and no H100 here: the last entry, under the request's own name."""
    (pod,) = running(cluster, example("fallback"), 1)
    (claim,) = cluster.claims()
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert result["request"] == "gpu/large"
    (view,) = cluster.nodes[NODE].kubelet.pods.get(pod["metadata"]["uid"]).views.values()
    assert [f"gpu-{minor}" for minor in view.gpus] == [result["device"]]
