"""A fleet of four simulated nodes follows GpuNodePolicies: drivers in processes, kubelets, pods."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from dra.cli.main import main
from dra.fleet.policy_status import PolicyStatus
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.sim.cluster import SimCluster
from tests.places import SHORT
from tests.yaml_text import read_all

ROOT = Path(__file__).parents[2]
API = "/apis/gpudra.dev/v1alpha1"


@pytest.fixture(scope="module")
def cluster():
    root = Path(tempfile.mkdtemp(prefix="dpo", dir=SHORT))
    nodes = [(f"h{n}", "dgx-h100") for n in range(2)] + [(f"l{n}", "l40s-x4") for n in range(2)]
    with SimCluster(root / "c", nodes, real=4) as made:
        made.wait_ready(timeout_seconds=120)
        for node in ("h0", "h1"):
            label(made, node, pool="inference")
        yield made
    shutil.rmtree(root, ignore_errors=True)


def label(cluster, node, **labels):
    status, _ = cluster.api.request(
        "PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}},
        content_type="application/merge-patch+json",
    )  # fmt: skip
    assert status == 200


def devices(cluster, node):
    path = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName={node}"
    items = cluster.api.request("GET", path)[1]["items"]
    return {device["name"]: device for each in items for device in each["spec"].get("devices", ())}


def until(cluster, condition, what):
    cluster.until(condition, what, timeout_seconds=120)


def draining(cluster, node):
    return {
        name
        for name, device in devices(cluster, node).items()
        if any(taint["key"].endswith("/draining") for taint in device.get("taints", ()))
    }


def policy_command(cluster, capsys, *words):
    capsys.readouterr()
    code = main(["policy", words[0], "--kubeconfig", str(cluster.kubeconfig), "-o", "json", *words[1:]])
    return code, json.loads(capsys.readouterr().out)


POD = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: busy, namespace: default}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: gpu.nvidia.com
        selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].productName.contains("L40S")'}}]
---
apiVersion: v1
kind: Pod
metadata: {name: busy, namespace: default}
spec:
  restartPolicy: Never
  resourceClaims: [{name: gpu, resourceClaimName: busy}]
  containers: [{name: main, image: cuda, command: [sleep, "3600"], resources: {claims: [{name: gpu}]}}]
"""


def test_a_fleet_follows_kubectl_apply_and_running_claims_are_left_alone(cluster, capsys, tmp_path):
    cluster.apply(ROOT / "deploy/manifests/deviceclasses.yaml")
    (tmp_path / "pod.yaml").write_text(POD)
    cluster.apply(tmp_path / "pod.yaml")

    def running():
        pod = cluster.api.request("GET", "/api/v1/namespaces/default/pods/busy")[1]
        return pod.get("status", {}).get("phase") == "Running" and pod

    until(cluster, running, "the pod runs")
    node = running()["spec"]["nodeName"]
    claim = cluster.api.request("GET", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/busy")[1]
    held = claim["status"]["allocation"]["devices"]["results"][0]["device"]
    example = ROOT / "examples/gpu-node-policy.yaml"

    code, diff = policy_command(cluster, capsys, "diff", str(example))
    assert code == 1
    assert {each["node"] for each in diff["changes"]} == {"h0", "h1", "l0", "l1"}
    assert [
        each["waits_for"] for each in diff["changes"] if (each["node"], each["device"]) == (node, held)
    ] == [["default/busy"]]
    before = devices(cluster, node)[held]

    cluster.apply(example)
    for name in ("l0", "l1"):
        until(
            cluster,
            lambda name=name: all(
                device.get("allowMultipleAllocations")
                for key, device in devices(cluster, name).items()
                if (name, key) != (node, held)
            ),
            f"{name} is shared",
        )
    for name in ("h0", "h1"):
        until(
            cluster,
            lambda name=name: len(devices(cluster, name)) == 40 and not draining(cluster, name),
            f"{name} is cut",
        )
        assert not [key for key in devices(cluster, name) if "-mig-" not in key]
    assert draining(cluster, node) == {held}
    assert {k: v for k, v in devices(cluster, node)[held].items() if k != "taints"} == before
    code, status = policy_command(cluster, capsys, "status")
    assert code == 1
    assert [(each["node"], each["device"], each["claims"]) for each in status["gpus"]] == [
        (node, held, ["default/busy"])
    ]
    rows = {row["name"]: row for row in status["policies"]}
    assert (rows["shared-l40s"]["matching"], rows["inference-partitions"]["matching"]) == (4, 2)
    assert running()["metadata"]["uid"] == claim["status"]["reservedFor"][0]["uid"]

    client = KubeClient(Connection(KubeOptions(kubeconfig=str(cluster.kubeconfig))), field_manager="fleet")
    PolicyStatus(client, driver="gpu.nvidia.com").gather()
    stored = cluster.api.request("GET", f"{API}/gpunodepolicies/shared-l40s")[1]["status"]
    assert stored["nodes"] == {"matching": 4, "applied": 3, "waiting": 1, "refused": 0}

    cluster.api.request("DELETE", "/api/v1/namespaces/default/pods/busy")
    cluster.api.request("DELETE", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/busy")
    until(
        cluster, lambda: devices(cluster, node)[held].get("allowMultipleAllocations"), "the last one follows"
    )
    until(cluster, lambda: policy_command(cluster, capsys, "status")[0] == 0, "everything is as it says")

    # A label goes: the policy is not for that node any more, and its GPUs are whole again.
    label(cluster, "h1", pool=None)
    until(
        cluster,
        lambda: "gpu-0" in devices(cluster, "h1") and not draining(cluster, "h1"),
        "h1 is as its flags say",
    )
    assert len(devices(cluster, "h0")) == 40
    for body in read_all(example.read_text()):
        cluster.api.request("DELETE", f"{API}/gpunodepolicies/{body['metadata']['name']}")
    for name in ("h0", "l0"):
        until(
            cluster,
            lambda name=name: (
                # One look: between two of them the pool may be written anew.
                (gpu := devices(cluster, name).get("gpu-0")) is not None
                and not gpu.get("allowMultipleAllocations")
                and not draining(cluster, name)
            ),
            f"{name} is as its flags say",
        )
    client.close()
