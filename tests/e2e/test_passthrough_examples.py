"""The examples of GPUs for virtual machines, on a node of two GPUs: scheduled, bound, seen in the container, given back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from dra.api.rules.classes import class_expression
from dra.sim.cluster import SimCluster, read_manifests
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
NODE, CLASS = "node-1", "vfio.gpu.nvidia.com"


@pytest.fixture(scope="module")
def cluster():
    gate = ("--feature-gates=PassthroughSupport=true", "--inventory-interval=1")
    with (
        tempfile.TemporaryDirectory(prefix="dsv", dir=SHORT, ignore_cleanup_errors=True) as place,
        SimCluster(Path(place), [(NODE, "h100-nvl-x2")], plugin_arguments=gate) as made,
    ):
        made.nodes[NODE].machine.pci.set_iommufd(True)
        made.wait_ready(timeout_seconds=90)
        made.apply(ROOT / "deploy/manifests/deviceclasses.yaml")
        device_class = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": CLASS},
            "spec": {"selectors": [{"cel": {"expression": class_expression(CLASS)}}]},
        }
        made.api.create("/apis/resource.k8s.io/v1/deviceclasses", device_class)
        yield made


def whole(cluster):
    return {
        device["name"]
        for item in cluster.slices()
        for device in item["spec"].get("devices") or []
        if "-mig-" not in device["name"]
    }


@pytest.mark.parametrize(
    ("name", "nodes", "left"),
    [
        ("vfio", {"/dev/vfio/vfio"}, 1),
        ("vfio-iommufd", {"/dev/iommu", "/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1"}, 0),
    ],
)
def test_an_example_gets_bare_devices_and_gives_them_back(cluster, name, nodes, left):
    path = ROOT / f"examples/{name}.yaml"
    (namespace,) = (
        each["metadata"]["name"] for each in read_manifests([path]) if each["kind"] == "Namespace"
    )
    node = cluster.nodes[NODE]
    cluster.until(lambda: len(whole(cluster)) == 4, "both GPUs in both forms", timeout_seconds=60)
    cluster.apply(path)

    def running():
        pods = [pod for pod in cluster.pods() if pod["metadata"]["namespace"] == namespace]
        return [pod for pod in pods if pod["status"].get("phase") == "Running"]

    cluster.until(lambda: len(running()) == 1, "the pod to run", timeout_seconds=60)
    (view,) = node.kubelet.pods.get(running()[0]["metadata"]["uid"]).views.values()
    groups = {path for path in view.device_nodes if path.rpartition("/")[2].isdigit()}
    assert set(view.device_nodes) - groups == nodes
    assert len(groups) == left
    assert (view.gpus, view.libraries) == ((), {})
    cluster.until(
        lambda: sum(not each.startswith("gpu-vfio") for each in whole(cluster)) == left,
        "the GPUs in use to be hidden", timeout_seconds=60,
    )  # fmt: skip
    cluster.delete(path)
    cluster.until(lambda: len(whole(cluster)) == 4, "the GPUs to come back", timeout_seconds=60)
    assert {node.machine.pci.driver_of(gpu) for gpu in (0, 1)} == {"nvidia"}
