"""Extended resources that a DeviceClass stands for: the claim the scheduler makes, and device plugins beside it."""

from __future__ import annotations

import pytest

from tests.unit.sim.control_cluster import ControlCluster, devices_of

GPU = "nvidia.com/gpu"


@pytest.fixture
def cluster():
    made = ControlCluster()
    made.gpu_class(extendedResourceName=GPU)
    return made


def container(name, gpus, **more):
    return {"name": name, "image": "i", "resources": {"limits": {GPU: str(gpus)}}, **more}


def extended_claim(cluster, pod):
    status = cluster.get_pod(pod)["status"]["extendedResourceClaimStatus"]
    return cluster.get_claim(status["resourceClaimName"]), status["requestMappings"]


def test_two_containers_and_an_init_container_have_a_request_each(cluster):
    cluster.gpu_node("node-a", 4)
    cluster.pod(
        "mixed",
        initContainers=[container("setup", 1)],
        containers=[container("left", 1), {"name": "plain", "image": "i"}, container("right", 2)],
    )
    cluster.sync()
    claim, mappings = extended_claim(cluster, "mixed")
    requests = {r["name"]: r["exactly"]["count"] for r in claim["spec"]["devices"]["requests"]}
    assert requests == {"container-0-request-0": 1, "container-1-request-0": 1, "container-3-request-0": 2}
    assert [(m["containerName"], m["resourceName"], m["requestName"]) for m in mappings] == [
        ("setup", GPU, "container-0-request-0"),
        ("left", GPU, "container-1-request-0"),
        ("right", GPU, "container-3-request-0"),
    ]
    assert len(set(devices_of(claim))) == 4
    pod = cluster.get_pod("mixed")
    assert claim["status"]["reservedFor"][0]["uid"] == pod["metadata"]["uid"]
    assert claim["metadata"]["annotations"] == {"resource.kubernetes.io/extended-resource-claim": "true"}


def test_the_claim_goes_with_the_pod_and_the_gpus_are_free_again(cluster):
    cluster.gpu_node("node-a", 2)
    cluster.pod("first", containers=[container("main", 2)])
    cluster.pod("second", containers=[container("main", 1)])
    cluster.sync()
    assert cluster.node_of("second") == ""
    cluster.end("first")
    cluster.sync()
    assert cluster.node_of("second") == "node-a"
    assert len(cluster.list("resourceclaims")) == 1


def test_a_node_with_a_device_plugin_serves_the_resource_without_a_claim(cluster):
    cluster.node("plugin-node", allocatable={GPU: "2"})
    for name in ("one", "two", "three"):
        cluster.pod(name, containers=[container("main", 1)])
    cluster.sync()
    on_plugin = [name for name in ("one", "two", "three") if cluster.node_of(name) == "plugin-node"]
    assert len(on_plugin) == 2
    assert cluster.list("resourceclaims") == []
    waiting = next(name for name in ("one", "two", "three") if name not in on_plugin)
    assert cluster.reason(waiting) == (
        f"0/1 nodes are available: 1 Insufficient {GPU}. no new claims to deallocate, preemption: "
        "0/1 nodes are available: 1 No preemption victims found for incoming pod."
    )
    cluster.gpu_node("z-node", 1)
    cluster.sync()
    assert cluster.node_of(waiting) == "z-node"
    assert extended_claim(cluster, waiting)[0]


def test_a_resource_that_nobody_has_is_insufficient(cluster):
    cluster.gpu_node("node-a", 1)
    other = {"name": "main", "image": "i", "resources": {"limits": {"example.com/fpga": "1"}}}
    cluster.pod("odd", containers=[other])
    cluster.sync()
    assert cluster.reason("odd") == (
        "0/1 nodes are available: 1 Insufficient example.com/fpga. no new claims to deallocate, preemption: "
        "0/1 nodes are available: 1 Preemption is not helpful for scheduling."
    )


def test_claims_and_extended_resources_of_one_pod_are_met_together(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.gpu_node("node-b", 2)
    cluster.template()
    cluster.pod("both", template="one-gpu", containers=[container("main", 1)])
    cluster.sync()
    assert cluster.node_of("both") == "node-b"
    claim, _ = extended_claim(cluster, "both")
    assert sorted(devices_of(claim) + devices_of(cluster.claim_of("both"))) == [
        ("node-b", "gpu-0"),
        ("node-b", "gpu-1"),
    ]
