"""Node labels and links: done where asked for, never in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dra.errors import KubeError
from dra.host.paths import HostPaths
from dra.inventory.gfd import ATTRIBUTE_OF, labels_of
from dra.inventory.model import Inventory
from dra.inventory.scan import scan
from dra.nvml.node import session_of
from dra.plugin.node_upkeep import (
    DevicePluginWatch,
    NodeLabeller,
    deployment_deleter,
    link_devices,
    write_feature_file,
)
from dra.plugin.settings import PluginSettings
from dra.sim.node import SimulatedNode
from tests.places import SHORT
from tests.process.harness import wait_until


def inventory_of(root, profile):
    node = SimulatedNode(profile, root, real_nodes=False)
    paths = HostPaths(**node.paths_kwargs())
    session = session_of(paths, library=node.library)
    try:
        return scan(session, paths), paths
    finally:
        session.close()


def test_the_labels_are_those_of_gpu_feature_discovery(tmp_path):
    inventory, _ = inventory_of(tmp_path, "dgx-h100")
    labels = labels_of(inventory)
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert labels["nvidia.com/gpu.count"] == "8" and labels["nvidia.com/gpu.present"] == "true"
    assert labels["nvidia.com/gpu.family"] == "hopper" and labels["nvidia.com/gpu.compute.major"] == "9"
    assert labels["nvidia.com/mig.capable"] == "true"
    assert set(labels) <= set(ATTRIBUTE_OF) | {"nvidia.com/gpu.compute.minor"}
    assert labels_of(Inventory()) == {}


def test_of_different_gpus_the_commonest_names_the_node(tmp_path):
    inventory, _ = inventory_of(tmp_path, "dgx-h100")
    odd = replace(inventory.gpus[0], product_name="NVIDIA L4")
    assert "H100" in labels_of(replace(inventory, gpus=(odd, *inventory.gpus[1:])))["nvidia.com/gpu.product"]


def test_the_feature_file_is_written_whole_and_anew(tmp_path):
    inventory, paths = inventory_of(tmp_path, "t4-x1")
    write_feature_file(paths, inventory)
    file = tmp_path / "etc/kubernetes/node-feature-discovery/features.d/dra-gpu"
    assert "nvidia.com/gpu.count=1\n" in file.read_text()
    write_feature_file(paths, Inventory())
    assert file.read_text() == ""


def test_links_that_cannot_be_made_are_only_logged(tmp_path):
    _, paths = inventory_of(tmp_path, "t4-x1")
    (tmp_path / "dev/char").write_text("in the way")
    link_devices(paths)


class Client:
    def __init__(self, failures=0):
        self.failures, self.patched, self.deleted, self.error = failures, [], [], ""

    def patch(self, resource, name, body):
        if self.failures:
            self.failures -= 1
            raise KubeError("DRA-API-FORBIDDEN", "no right", status=403)
        self.patched.append((resource.plural, name, body))

    def delete(self, resource, name, namespace, **_):
        self.deleted.append((resource.full_name, namespace, name))
        if self.error:
            raise KubeError(self.error, "no", status=404)


def test_the_node_is_labelled_tried_again_and_old_labels_go(tmp_path):
    inventory, _ = inventory_of(tmp_path, "t4-x1")
    client = Client(failures=2)
    labeller = NodeLabeller(client, "node-a", retry_seconds=0.01)
    labeller.want(inventory)
    wait_until(lambda: client.patched, what="the node is labelled")
    _, name, body = client.patched[-1]
    assert name == "node-a" and body["metadata"]["labels"]["nvidia.com/gpu.count"] == "1"
    labeller.want(Inventory())
    wait_until(lambda: client.patched[-1][2]["metadata"]["labels"]["nvidia.com/gpu.count"] is None)


@pytest.mark.parametrize("error", ["", "DRA-API-NOT-FOUND"])
def test_deployments_are_deleted_by_name_in_the_drivers_namespace_only_when_asked_for(error):
    client = Client()
    client.error = error
    assert deployment_deleter(client, PluginSettings("n")) is None
    delete = deployment_deleter(client, PluginSettings("n", namespace="gpu", clean_up_mps_deployments=True))
    delete("mps-control-daemon-x")
    assert client.deleted == [("deployments.apps", "gpu", "mps-control-daemon-x")]
    client.error = "DRA-API-FORBIDDEN"
    with pytest.raises(KubeError):
        delete("mps-control-daemon-x")


class Events:
    def __init__(self):
        self.told = []

    def emit(self, about, kind, reason, text):
        self.told.append((about.kind, about.name, kind, reason, text))


def test_a_device_plugin_beside_us_is_told_once_on_the_node(tmp_path_factory):
    import socket
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dpw", dir=SHORT) as place:
        root = Path(place)
        inventory, paths = inventory_of(root, "t4-x1")
        events = Events()
        watch = DevicePluginWatch(paths, "node-a", events)
        assert not watch.look(inventory)
        folder = root / "var/lib/kubelet/device-plugins"
        folder.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "nvidia-gpu.sock"))
            listener.listen()
            assert watch.look(inventory) and watch.look(inventory)
            assert not watch.look(Inventory()), "a node without GPUs shares none"
        # It ended: its socket is dead. It comes again: that is told again.
        assert not watch.look(inventory)
        assert [each[:4] for each in events.told] == [("Node", "node-a", "Warning", "DevicePluginActive")]
        assert "DRA-DEVICE-PLUGIN-ACTIVE" in events.told[0][4]
