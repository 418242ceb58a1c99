"""The webhook does not answer. What has nothing to do with it goes on, and prepare checks what it would have checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.conftest import call
from tests.process.harness import DRIVER, RESOURCE_API
from tests.yaml_text import read_all

MANIFEST = Path(__file__).parents[2] / "deploy/manifests/webhook-configuration.yaml"
CLAIMS = f"{RESOURCE_API}/namespaces/default/resourceclaims"
HOOKS = "/apis/admissionregistration.k8s.io/v1"


def install(node, *, policy):
    """Install the configurations as they are shipped, with nobody behind the service."""
    for document in read_all(MANIFEST.read_text()):
        plural = {"V": "validatingwebhookconfigurations", "M": "mutatingwebhookconfigurations"}[
            document["kind"][0]
        ]
        if plural.startswith("v"):
            for hook in document["webhooks"]:
                assert hook["failurePolicy"] == "Fail"
                hook["failurePolicy"] = policy
        node.api.request("DELETE", f"{HOOKS}/{plural}/{document['metadata']['name']}")
        status, answer = node.api.request("POST", f"{HOOKS}/{plural}", document)
        assert status == 201, answer


def claim(name, *, config=None):
    request = {"name": "r0", "exactly": {"deviceClassName": DRIVER}}
    devices = {"requests": [request]}
    if config is not None:
        devices["config"] = [{"opaque": {"driver": DRIVER, "parameters": config}}]
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"}, "spec": {"devices": devices},
    }  # fmt: skip


BAD = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSharing"},
}


def allocate(node, name, device):
    """What the scheduler does: it copies the configuration into the allocation."""
    made = node.api.request("GET", f"{CLAIMS}/{name}")[1]
    configs = [{"source": "FromClaim", **each} for each in made["spec"]["devices"].get("config") or []]
    result = {"request": "r0", "driver": DRIVER, "pool": "node-a", "device": device}
    made["status"] = {
        "allocation": {"devices": {"results": [result], "config": configs}},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "uid-p"}],
    }
    status, answer = node.api.request("PUT", f"{CLAIMS}/{name}/status", made)
    assert status == 200, answer
    return answer


@pytest.mark.fault("F45", "F41")
def test_claims_without_our_configuration_are_made_and_the_others_as_the_policy_says_and_prepare_checks_again(
    node,
):
    node.daemon()
    connection = node.kubelet().wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    # Fail: only what it would have looked at is refused.
    install(node, policy="Fail")
    assert node.api.request("POST", CLAIMS, claim("plain"))[0] == 201
    status, answer = node.api.request("POST", CLAIMS, claim("configured", config=BAD))
    assert status == 500 and "webhook" in answer["message"], answer
    # Ignore: everything is made.
    install(node, policy="Ignore")
    assert node.api.request("POST", CLAIMS, claim("configured", config=BAD))[0] == 201
    # What is stored can be changed and can end, whatever the policy: only its configuration is looked at.
    install(node, policy="Fail")
    stored = node.api.request("GET", f"{CLAIMS}/configured")[1]
    stored["metadata"] |= {"labels": {"team": "a"}, "finalizers": []}
    assert node.api.request("PUT", f"{CLAIMS}/configured", stored)[0] == 200
    good, bad = allocate(node, "plain", "gpu-0"), allocate(node, "configured", "gpu-1")
    prepared, refused = call(connection.prepare, [good, bad])
    assert prepared.error == "" and prepared.devices[0].device_name == "gpu-0"
    assert "DRA-CONFIG" in refused.error and "TimeSharing" in refused.error
    assert node.records() == {good["metadata"]["uid"]}
    call(connection.unprepare, [good, bad])
    assert (node.records(), node.cdi_files()) == (set(), set())
