"""Two replicas of `dra fleet` that want to lead, and work for whoever does: the status of one policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.process.harness import Node, Service, wait_until
from tests.yaml_text import read_all

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/dra-fleet"
POLICIES = "/apis/gpudra.dev/v1alpha1/gpunodepolicies"
GPU_NODES = "/apis/gpudra.dev/v1alpha1/gpunodes"
SHORT = {
    "dra.fleet.election:ElectionTimes.lease": 2.0,
    "dra.fleet.election:ElectionTimes.renew": 1.5,
    "dra.fleet.election:ElectionTimes.retry": 0.1,
    "dra.fleet.policy_status:PolicyStatus.gather_seconds": 0.2,
}


def replica(node: Node, identity: str, *arguments: str) -> Service:
    """Start a replica with short leases."""
    return node.fleet(identity, "--namespace=default", *arguments, periods=SHORT)


def holder(node: Node) -> str:
    """Give who has the lease; empty for nobody."""
    return str((node.api.request("GET", LEASE)[1].get("spec") or {}).get("holderIdentity") or "")


def install_policies(node: Node, root: Path) -> None:
    """Install our kinds from the repository at `root`, and create the policy `p`."""
    for path in sorted((root / "crds").glob("*.yaml")):
        for document in read_all(path.read_text()):
            node.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", document)
    for collection in (POLICIES, GPU_NODES):
        wait_until(
            lambda collection=collection: node.api.request("GET", collection)[0] == 200,
            what=f"{collection} is served",
        )
    policy = {
        "apiVersion": "gpudra.dev/v1alpha1", "kind": "GpuNodePolicy", "metadata": {"name": "p"},
        "spec": {"gpus": [{"timeSlice": "Short"}]},
    }  # fmt: skip
    node.api.create(POLICIES, policy)


def say_of_the_node(node: Node, state: str) -> None:
    """Write as the node's driver would what became of the policy there; with `Waiting` for the first time."""
    body: dict[str, Any] = {
        "apiVersion": "gpudra.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "node-a"},
        "status": {
            "policies": [{"name": "p", "generation": 1}],
            "gpus": [{"device": "gpu-0", "state": state, "message": state}],
        },
    }  # fmt: skip
    if state == "Waiting":
        node.api.create(GPU_NODES, {**body, "status": {}})
    stored = node.api.request("GET", f"{GPU_NODES}/node-a")[1]
    status, answer = node.api.request(
        "PUT", f"{GPU_NODES}/node-a/status", {**stored, **body, "metadata": stored["metadata"]}
    )
    assert status == 200, answer


def reason(node: Node) -> str | None:
    """Give what the leader has made of it in the policy's status."""
    conditions = node.api.request("GET", f"{POLICIES}/p")[1].get("status", {}).get("conditions") or [{}]
    return conditions[0].get("reason")
