"""What the owner of a pod sees when its GPU falls ill, on the simulated cluster."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from dra.sim.cluster import SimCluster
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
CORE = "/api/v1/namespaces/gpu-per-pod"


@pytest.fixture(scope="module")
def cluster():
    place = tempfile.mkdtemp(prefix="dhp", dir=SHORT)
    with SimCluster(
        Path(place),
        [("node-a", "l40s-x4")],
        real=1,
        plugin_arguments=("--health-effects=gpu-lost=NoExecute", "--device-metadata=true"),
    ) as made:
        made.wait_ready(timeout_seconds=90)
        made.apply(ROOT / "deploy/manifests/deviceclasses.yaml", ROOT / "examples/gpu-per-pod.yaml")
        yield made
    shutil.rmtree(place, ignore_errors=True)


def pod(cluster, name):
    return next((each for each in cluster.pods() if each["metadata"]["name"] == name), None)


def allocated_health(cluster, name):
    """What `kubectl get pod -o yaml` shows of the health of its devices: [(health, message)]."""
    found = pod(cluster, name)
    return [
        (resource.get("health"), resource.get("message", ""))
        for status in (found or {}).get("status", {}).get("containerStatuses") or ()
        for entry in status.get("allocatedResourcesStatus") or ()
        for resource in entry.get("resources") or ()
    ]


def gpu_of(cluster, name):
    """The minor number of the GPU that a pod has."""
    for claim in cluster.claims():
        owners = [each["name"] for each in claim["metadata"].get("ownerReferences") or ()]
        if owners == [name]:
            (result,) = claim["status"]["allocation"]["devices"]["results"]
            return int(result["device"].removeprefix("gpu-"))
    raise AssertionError(f"pod {name} has no claim")


def reasons(cluster, name):
    return {
        event["reason"]
        for event in cluster.items(f"{CORE}/events")
        if event["involvedObject"]["name"] == name
    }


def check_metadata(cluster):
    """A container reads which device it has, by the name that its pod gives the claim."""
    place = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu/gpu/gpu.nvidia.com-metadata.json"
    node = cluster.nodes["node-a"]
    for name in ("first", "second"):
        (view,) = node.kubelet.pods.get(pod(cluster, name)["metadata"]["uid"]).views.values()
        source = Path(view.mounts[place].source)
        found = json.loads((source if source.exists() else node.root / str(source).lstrip("/")).read_text())
        (device,) = found["requests"][0]["devices"]
        assert device["attributes"]["uuid"]["string"].startswith("GPU-")
        assert int(device["name"].removeprefix("gpu-")) in view.gpus


def test_pod_status_events_and_the_next_pod(cluster):
    cluster.until(
        lambda: all((pod(cluster, name) or {}).get("status", {}).get("phase") == "Running" for name in ("first", "second")),
        what="both pods run", timeout_seconds=90,
    )  # fmt: skip
    control = cluster.nodes["node-a"].machine.control
    first, second = gpu_of(cluster, "first"), gpu_of(cluster, "second")
    assert first != second
    check_metadata(cluster)
    control.push_xid(first, 95)
    cluster.until(
        lambda: [health for health, _ in allocated_health(cluster, "first")] == ["Unhealthy"],
        what="the pod's status", timeout_seconds=60,
    )  # fmt: skip
    ((_, message),) = allocated_health(cluster, "first")
    assert message.startswith("XID 95")
    assert [health for health, _ in allocated_health(cluster, "second")] == ["Healthy"]
    cluster.until(lambda: "DeviceUnhealthy" in reasons(cluster, "first"), what="an Event", timeout_seconds=60)
    assert "DeviceUnhealthy" not in reasons(cluster, "second")
    control.recover_gpu(first)
    cluster.until(
        lambda: [health for health, _ in allocated_health(cluster, "first")] == ["Healthy"],
        what="the pod's status after the reset", timeout_seconds=90,
    )  # fmt: skip
    cluster.until(lambda: "DeviceRecovered" in reasons(cluster, "first"), what="an Event", timeout_seconds=60)
    # A loss evicts, where that is asked for.
    control.lose_gpu(second, xid=None)
    cluster.until(lambda: pod(cluster, "second") is None, what="the pod is evicted", timeout_seconds=90)
    assert pod(cluster, "first")["status"]["phase"] == "Running"
