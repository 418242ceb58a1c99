"""The definitions of `gpudra.dev`, and a table of policies they take and refuse: one file for both API servers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dra.api.policy import decode_policy
from dra.errors import ConfigError, KubeError
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, GPU_NODE_POLICIES, GPU_NODES
from dra.sim.apiserver import SimApiServer
from tests.real_apiserver import needs_real_apiserver, real_apiserver
from tests.yaml_text import read

ROOT = Path(__file__).parents[2]
UUID = "GPU-00000000-0000-0000-0000-000000000001"
SHORT = {"timeSlice": "Short"}
LABELS = {"matchLabels": {"pool": "a"}}


def expression(operator, *values):
    body = {"key": "pool", "operator": operator, **({"values": list(values)} if values else {})}
    return {"nodeSelector": {"matchExpressions": [body]}, "gpus": [SHORT]}


def of(**blocks):
    return {"gpus": [blocks]}


def mig(mode="static", **layout):
    return of(mig={"mode": mode, **({"layout": layout} if layout else {})})


TAKEN = {
    "least": of(**SHORT),
    "labels": {"nodeSelector": LABELS, "weight": 1000, "gpus": [SHORT]},
    "in": expression("In", "a", "b"),
    "not-in": expression("NotIn", "a"),
    "exists": expression("Exists"),
    "does-not-exist": expression("DoesNotExist"),
    "by-product": of(match={"product": "NVIDIA A100*"}, **SHORT),
    "by-uuid": of(match={"uuid": UUID}, **SHORT),
    "by-pci": of(match={"pciAddress": "0000:65:00.0"}, **SHORT),
    "long-pci": of(match={"pciAddress": "00000000:65:00.0"}, **SHORT),
    "exclusive": of(sharing={"strategy": "exclusive"}),
    "memory": of(sharing={"strategy": "memory", "enforcement": "required"}),
    "shares": of(sharing={"strategy": "shares", "shares": 1000}),
    "dynamic": mig("dynamic"),
    "found": mig(),
    "layout": mig(**{"3g.40gb": 1, "1g.10gb": 4}),
    "media": mig(**{"1g.10gb+me": 1, "1g.10gb": 6}),
    "reserved": of(reserved={}),
    "reserved-value": of(reserved={"value": "batch", "effect": "NoExecute"}),
    "attributes": of(attributes={"rail": {"int": 3}, "rack": {"string": "a"}, "v": {"version": "1.2.3-a"}}),
    "health": of(health={"xids": [{"xid": 48, "effect": "Ignore"}], "temperatureCelsius": 90}),
    "capabilities": of(driverCapabilities=["compute", "graphics"], telemetryIntervalSeconds=1),
    "whole-double": of(health={"temperatureCelsius": 90.0}),
    "two-groups": {"gpus": [SHORT, {"match": {"uuid": UUID}, **SHORT}]},
}  # fmt: skip
REFUSED = {
    "no-groups": {"gpus": []},
    "no-gpus": {"weight": 1},
    "says-nothing": of(match={"uuid": UUID}),
    "heavy": {"weight": 1001, "gpus": [SHORT]},
    "weight-text": {"weight": "1", "gpus": [SHORT]},
    "in-nothing": expression("In"),
    "exists-value": expression("Exists", "a"),
    "bad-operator": expression("Gt", "1"),
    "bad-uuid": of(match={"uuid": "GPU-1"}, **SHORT),
    "bad-pci": of(match={"pciAddress": "65:00"}, **SHORT),
    "no-number": of(sharing={"strategy": "shares"}),
    "number": of(sharing={"strategy": "memory", "shares": 2}),
    "too-many": of(sharing={"strategy": "shares", "shares": 1001}),
    "bad-strategy": of(sharing={"strategy": "mps"}),
    "layout-of-dynamic": mig("dynamic", **{"1g.10gb": 1}),
    "too-many-partitions": mig(**{"1g.10gb": 7, "2g.20gb": 2}),
    "bad-profile": mig(big=1),
    "no-partition": mig(**{"1g.10gb": 0}),
    "bad-value": of(reserved={"value": "not a label"}),
    "two-values": of(attributes={"rail": {"int": 1, "string": "x"}}),
    "no-value": of(attributes={"rail": {}}),
    "bad-name": of(attributes={"a-b": {"int": 1}}),
    "bad-version": of(attributes={"v": {"version": "1.2"}}),
    "bad-capability": of(driverCapabilities=["cuda"]),
    "same-match": {"gpus": [SHORT, {"sharing": {"strategy": "memory"}}]},
}  # fmt: skip


def installed(kubeconfig):
    client = KubeClient(Connection(KubeOptions(kubeconfig=str(kubeconfig))), field_manager="test")
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        client.create(CUSTOM_RESOURCE_DEFINITIONS, read(path.read_text()))
    for name in ("gpunodepolicies.gpudra.dev", "gpunodes.gpudra.dev"):
        wait_established(client, name)
    return client


def wait_established(client, name):
    end = time.monotonic() + 60
    while True:
        body = client.get(CUSTOM_RESOURCE_DEFINITIONS, name)
        conditions = {each["type"]: each for each in body.get("status", {}).get("conditions", ())}
        if conditions.get("Established", {}).get("status") == "True":
            assert conditions.get("NonStructuralSchema", {}).get("status") != "True"
            break
        assert time.monotonic() < end, conditions
        time.sleep(0.1)
    while True:
        try:
            client.list(GPU_NODE_POLICIES if "policies" in name else GPU_NODES)
        except KubeError:
            assert time.monotonic() < end
            time.sleep(0.1)
        else:
            return


@pytest.fixture(scope="module", params=["simulated", pytest.param("real", marks=needs_real_apiserver)])
def client(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("definitions")
    if request.param == "real":
        with real_apiserver(folder) as server:
            made = installed(server.admin_kubeconfig)
            yield made
            made.close()
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        server = SimApiServer().start()
        made = installed(server.write_kubeconfig(folder / "kubeconfig"))
        yield made
        made.close()
        server.stop()


def body(name, spec):
    return {
        "apiVersion": "gpudra.dev/v1alpha1", "kind": "GpuNodePolicy", "metadata": {"name": name}, "spec": spec,
    }  # fmt: skip


def test_the_table_is_as_large_as_was_asked_for():
    assert len(TAKEN) + len(REFUSED) >= 40


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_right_is_taken_and_read_back_by_us(client, name):
    made = client.create(GPU_NODE_POLICIES, body(f"taken-{name}", TAKEN[name]))
    assert decode_policy(made).name == f"taken-{name}"
    # What the server fills in says the same as nothing.
    assert decode_policy(made).layers == decode_policy(body(f"taken-{name}", TAKEN[name])).layers


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_the_server_and_by_us(client, name):
    with pytest.raises(KubeError) as caught:
        client.create(GPU_NODE_POLICIES, body(f"refused-{name}", REFUSED[name]))
    assert caught.value.status == 422
    with pytest.raises(ConfigError):
        decode_policy(body(f"refused-{name}", REFUSED[name]))


def test_the_status_of_a_node_is_written_by_server_side_apply(client):
    condition = {
        "type": "Applied", "status": "True", "reason": "Applied", "message": "8 GPUs",
        "lastTransitionTime": "2026-11-30T10:00:00Z",
    }  # fmt: skip
    head = {"apiVersion": "gpudra.dev/v1alpha1", "metadata": {"name": "n1"}}
    client.apply(GPU_NODES, "n1", head)
    status = {
        "policies": [{"name": "p", "generation": 1}],
        "gpus": [{"device": "gpu-0", "uuid": UUID, "product": "NVIDIA H100", "state": "Waiting", "claims": ["a/b"]}],
        "pending": 1,
        "conditions": [condition],
    }  # fmt: skip
    client.apply(GPU_NODES, "n1", {**head, "status": status}, subresource="status")
    assert client.get(GPU_NODES, "n1")["status"] == status
    with pytest.raises(KubeError):
        wrong = {**status, "gpus": [{"device": "gpu-0", "state": "Perhaps"}]}
        client.apply(GPU_NODES, "n1", {**head, "status": wrong}, subresource="status")
