"""What a real API server says to our manifests, and to the driver's requests under its own role and policy."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.e2e.real.cluster import MANIFESTS, PLUGIN_ACCOUNT, PLUGIN_NAMESPACE, SLICES, Cluster
from tests.e2e.real.control_plane import NODE_NAME
from tests.e2e.real.driver import SIMULATED, Drivers
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real

# API groups of what a cluster may have beside Kubernetes.
NOT_INSTALLED = frozenset({"cert-manager.io", "monitoring.coreos.com", "security.openshift.io"})


@pytest.fixture
def published(cluster: Cluster) -> Cluster:
    """The cluster with GPUs in the API, and a driver that has not yet undone what somebody else did (it takes more time
    each time).
    """
    if cluster.drivers.current is not None and cluster.drivers.process.logged("pool_restored"):
        cluster.drivers.stop()
    if cluster.why_no_node:
        if cluster.drivers.current is None:
            cluster.drivers.start(SIMULATED)
        cluster.wait_published()
    else:
        cluster.use_driver(SIMULATED)
    return cluster


def try_as(cluster: Cluster, token: str, *arguments: str, stdin: str = "") -> str:
    """Run kubectl with a token; gives what it said."""
    kubeconfig = cluster.control_plane.kubeconfig("somebody", token=token)
    return cluster.kubectl(f"--kubeconfig={kubeconfig}", *arguments, check=False, stdin=stdin)


def slice_of(node: str, name: str) -> str:
    """Give a small slice as JSON text."""
    return json.dumps(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name},
            "spec": {
                "driver": "other.example.com",
                "nodeName": node,
                "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "d"}],
            },
        }
    )


@pytest.mark.parametrize(
    "manifest", sorted(str(path.relative_to(MANIFESTS)) for path in MANIFESTS.rglob("*.yaml"))
)
def test_the_api_server_takes_the_manifest_without_a_warning(cluster, manifest):
    documents = yaml.safe_load_all((MANIFESTS / manifest).read_text())
    for document in documents:
        if document["apiVersion"].partition("/")[0] in NOT_INSTALLED:
            continue
        text = json.dumps(document)
        said = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
        # What kubectl itself says of an object that another test has created already is not the server's.
        warnings = [line for line in said.splitlines() if "Warning" in line and "last-applied" not in line]
        assert not warnings


def test_the_admission_policy_has_no_type_errors(cluster):
    if "kube-controller-manager" not in cluster.control_plane.programs:
        pytest.skip("types are checked by kube-controller-manager")
    path = (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/dra-driver-nvidia-gpu-own-slices"
    )
    status = wait_until(lambda: cluster.get(path).get("status", {}), seconds=60, what="types are checked")
    assert "observedGeneration" in status
    assert status.get("typeChecking", {}).get("expressionWarnings", []) == []


def test_the_plugin_publishes_the_gpus_of_its_node_with_the_rights_of_its_role(published):
    assert len(published.devices()) == 8
    (node,) = {item["spec"]["nodeName"] for item in published.slices()}
    owners = [owner for item in published.slices() for owner in item["metadata"]["ownerReferences"]]
    assert {(owner["kind"], owner["name"]) for owner in owners} == {("Node", node)}


def test_the_plugin_of_one_node_cannot_publish_for_another(cluster, tmp_path):
    cluster.create_node("node-b")
    drivers = Drivers(
        tmp_path, plugins=tmp_path / "p", registry=tmp_path / "r", cdi=tmp_path / "c",
        kubeconfig=cluster.control_plane.kubeconfig("plugin-of-a", token=cluster.plugin_token()),
    )  # fmt: skip
    instance = drivers.start(SIMULATED, node_name="node-b")
    try:
        failed = wait_until(
            lambda: instance.logged("pool_publish_failed"), seconds=60, what="publishing is refused"
        )
        assert (
            f"the plugin of node '{NODE_NAME}' may not change a slice of node 'node-b'" in failed[0]["error"]
        )
        assert all(item["spec"].get("nodeName") != "node-b" for item in cluster.get(SLICES)["items"])
    finally:
        drivers.close()
        cluster.control_plane.call("DELETE", "/api/v1/nodes/node-b")


def test_the_plugins_token_can_neither_change_nor_delete_slices_of_another_node(cluster):
    token = cluster.plugin_token()
    cluster.kubectl("create", "-f", "-", stdin=slice_of("node-z", "of-z"))
    refused = "may not change a slice of node 'node-z'"
    assert refused in try_as(cluster, token, "delete", "resourceslice", "of-z")
    assert refused in try_as(cluster, token, "replace", "-f", "-", stdin=slice_of("node-z", "of-z"))
    # To change parts of a slice it has no right at all.
    assert "cannot patch resource" in try_as(cluster, token, "label", "resourceslice", "of-z", "a=b")
    assert "created" in try_as(cluster, token, "create", "-f", "-", stdin=slice_of(NODE_NAME, "of-a"))
    assert "deleted" in try_as(cluster, token, "delete", "resourceslice", "of-a")
    cluster.kubectl("delete", "resourceslice", "of-z")


def test_a_token_that_is_bound_to_no_node_publishes_nothing(cluster):
    token = cluster.kubectl("create", "token", "-n", PLUGIN_NAMESPACE, PLUGIN_ACCOUNT).strip()
    said = try_as(cluster, token, "create", "-f", "-", stdin=slice_of(NODE_NAME, "of-nobody"))
    assert "the token is not bound to a node" in said


def test_a_slice_deleted_by_hand_comes_back(published):
    before = published.devices()
    names, uids = ({item["metadata"][key] for item in published.slices()} for key in ("name", "uid"))
    published.kubectl("delete", "resourceslice", *names)
    wait_until(lambda: published.devices() == before, seconds=60, what="the same devices are back")
    assert uids.isdisjoint(item["metadata"]["uid"] for item in published.slices())


def test_a_slice_edited_by_hand_is_set_right(published):
    before = published.devices()
    changed = next(item for item in published.slices() if item["spec"].get("devices"))["metadata"]["name"]
    patch = [{"op": "remove", "path": "/spec/devices/0"}]
    published.kubectl("patch", "resourceslice", changed, "--type=json", "-p", json.dumps(patch))
    wait_until(lambda: published.devices() == before, seconds=60, what="the removed device is back")


def test_a_slice_made_by_hand_in_the_drivers_name_is_removed(published):
    before = published.devices()
    stranger = json.loads(slice_of(NODE_NAME, "stranger"))
    stranger["spec"] |= {
        "driver": "gpu.nvidia.com",
        "pool": {"name": NODE_NAME, "generation": 0, "resourceSliceCount": 1},
    }
    published.kubectl("create", "-f", "-", stdin=json.dumps(stranger))
    wait_until(
        lambda: published.get(f"{SLICES}/stranger", missing=True) is None and published.devices() == before,
        seconds=60, what="the stranger is gone",
    )  # fmt: skip
