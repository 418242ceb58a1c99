"""What nodes say of policies is counted in the policy's status; what gone nodes left is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dra.fleet.policy_status import PolicyStatus, policy_status
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.sim.apiserver import SimApiServer
from tests.yaml_text import read

ROOT = Path(__file__).parents[3]
API = "/apis/gpudra.dev/v1alpha1"
NOW = "2026-11-30T10:00:00Z"


def policy(name="p", generation=2, **spec):
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": name, "generation": generation, "creationTimestamp": NOW},
        "spec": {"gpus": [{"timeSlice": "Short"}], **spec},
    }


def node(name, **labels):
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def gpu_node(name, *gpus, generation=2, policies=("p",)):
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNode",
        "metadata": {"name": name},
        "status": {
            "policies": [{"name": each, "generation": generation} for each in policies],
            "gpus": list(gpus),
        },
    }


APPLIED = {"device": "gpu-0", "state": "Applied"}
WAITING = {"device": "gpu-1", "state": "Waiting", "message": "gpu-1 waits for team/train"}
REFUSED = {"device": "gpu-2", "state": "Refused", "message": "gpu-2 is no A100"}


def test_nodes_are_counted_and_those_that_wait_or_refuse_are_named():
    status = policy_status(
        policy(nodeSelector={"matchLabels": {"pool": "a"}}),
        nodes=[node(f"n{n}", pool="a") for n in range(5)] + [node("other", pool="b")],
        gpu_nodes=[
            gpu_node("n0", APPLIED),
            gpu_node("n1", APPLIED, WAITING),
            gpu_node("n2", WAITING, REFUSED),
            gpu_node("n3", APPLIED, generation=1),
            gpu_node("other", APPLIED, policies=()),
        ],
        now=NOW,
    )
    assert status["nodes"] == {"matching": 4, "applied": 1, "waiting": 2, "refused": 1}
    assert [(each["node"], each["state"]) for each in status["problems"]] == [
        ("n1", "Waiting"), ("n2", "Waiting"), ("n2", "Refused"), ("n3", "Waiting"),
    ]  # fmt: skip
    (condition,) = status["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "Refused")
    assert "team/train" in condition["message"]
    assert status["observedGeneration"] == 2


def test_the_moment_of_a_transition_stays_while_the_state_does():
    first = policy_status(policy(), nodes=[node("n")], gpu_nodes=[gpu_node("n", WAITING)], now=NOW)
    later = "2026-11-30T11:00:00Z"
    again = policy_status(
        {**policy(), "status": first}, nodes=[node("n")], gpu_nodes=[gpu_node("n", WAITING)], now=later
    )
    assert again["conditions"][0]["lastTransitionTime"] == NOW
    done = policy_status(
        {**policy(), "status": first}, nodes=[node("n")], gpu_nodes=[gpu_node("n", APPLIED)], now=later
    )
    assert (done["conditions"][0]["status"], done["conditions"][0]["lastTransitionTime"]) == ("True", later)


def test_a_policy_that_no_node_can_read_says_why_and_many_problems_are_cut():
    bad = policy_status({**policy(), "spec": {"gpus": []}}, nodes=[], gpu_nodes=[], now=NOW)
    assert bad["conditions"][0]["reason"] == "Invalid"
    assert "spec.gpus" in bad["conditions"][0]["message"]
    nodes = [node(f"n{n:03}") for n in range(100)]
    many = policy_status(
        policy(), nodes=nodes, gpu_nodes=[gpu_node(f"n{n:03}", REFUSED) for n in range(100)], now=NOW
    )
    assert many["nodes"]["refused"] == 100
    assert len(many["problems"]) == 20
    none = policy_status(policy(), nodes=[], gpu_nodes=[], now=NOW)
    assert none["conditions"][0]["reason"] == "NoNodes"


def test_nodes_that_an_invalid_policy_chooses_are_counted_as_waiting():
    still = gpu_node("n1", APPLIED, policies=())
    still["status"]["conditions"] = [{"reason": "PolicyInvalid", "message": "nothing is changed"}]
    bad = policy(gpus=[{"timeSlice": "Forever"}], nodeSelector={"matchLabels": {"pool": "a"}})
    found = policy_status(
        bad,
        nodes=[node("n1", pool="a"), node("n2", pool="b")],
        gpu_nodes=[still, gpu_node("n2", APPLIED, policies=())],
        now=NOW,
    )
    assert found["nodes"] == {"matching": 1, "applied": 0, "waiting": 1, "refused": 0}
    assert found["problems"] == [{"node": "n1", "state": "Waiting", "message": "nothing is changed"}]
    (condition,) = found["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "Invalid")
    assert "timeSlice" in condition["message"]


@pytest.fixture
def api(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = SimApiServer()
    server.start()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    yield server
    server.stop()


@pytest.fixture
def client(api, tmp_path):
    made = KubeClient(
        Connection(KubeOptions(kubeconfig=str(tmp_path / "kubeconfig"))), field_manager="dra-fleet"
    )
    yield made
    made.close()


def install(api):
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", read(path.read_text()))


def test_it_is_written_into_the_api_once_and_again_when_it_changes(api, client):
    install(api)
    part = PolicyStatus(client, driver="gpu.nvidia.com")
    part.gather()
    api.create("/api/v1/nodes", node("n"))
    made = policy(generation=1)
    del made["metadata"]["generation"], made["metadata"]["creationTimestamp"]
    api.create(f"{API}/gpunodepolicies", made)
    report = gpu_node("n", WAITING, generation=1)
    api.create(f"{API}/gpunodes", {key: report[key] for key in ("apiVersion", "kind", "metadata")})
    client.apply(client_resource("gpunodes"), "n", report, subresource="status")
    part.gather()
    first = api.request("GET", f"{API}/gpunodepolicies/p")[1]
    assert first["status"]["nodes"] == {"matching": 1, "applied": 0, "waiting": 1, "refused": 0}
    part.gather()
    same = api.request("GET", f"{API}/gpunodepolicies/p")[1]
    assert same["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    client.apply(client_resource("gpunodes"), "n", gpu_node("n", APPLIED, generation=1), subresource="status")
    part.gather()
    status = api.request("GET", f"{API}/gpunodepolicies/p")[1]["status"]
    assert status["nodes"]["applied"] == 1
    assert status["problems"] == []


def client_resource(plural):
    from dra.kube import resources

    return {"gpunodes": resources.GPU_NODES, "gpunodepolicies": resources.GPU_NODE_POLICIES}[plural]


def slice_of(name, node_name, driver="gpu.nvidia.com"):
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node_name,
            "pool": {"name": node_name, "generation": 1, "resourceSliceCount": 1},
            "devices": [],
        },
    }


def slices(api):
    items = api.request("GET", "/apis/resource.k8s.io/v1/resourceslices")[1]["items"]
    return sorted(each["metadata"]["name"] for each in items)


def test_what_gone_nodes_left_goes_after_a_while_and_nothing_else(api, client):
    install(api)

    class Clock:
        time = 0.0

        def now(self):
            return self.time

        def wall(self):
            return self.time

        def wait(self, event, _seconds):
            return event.is_set()

    clock = Clock()
    part = PolicyStatus(client, driver="gpu.nvidia.com", gone_seconds=60, clock=clock)
    for made in (
        slice_of("ours", "gone"),
        slice_of("theirs", "gone", "other.example"),
        slice_of("kept", "n"),
    ):
        api.create("/apis/resource.k8s.io/v1/resourceslices", made)
    for name in ("gone", "n"):
        api.create(f"{API}/gpunodes", {k: v for k, v in gpu_node(name).items() if k != "status"})
    # No Node at all: not to be believed.
    for clock.time in (0.0, 100.0):
        part.sweep()
    assert slices(api) == ["kept", "ours", "theirs"]
    api.create("/api/v1/nodes", node("n"))
    part.sweep()
    clock.time = 130.0
    part.sweep()
    assert slices(api) == ["kept", "ours", "theirs"]
    clock.time = 200.0
    part.sweep()
    assert slices(api) == ["kept", "theirs"]
    left = api.request("GET", f"{API}/gpunodes")[1]["items"]
    assert [each["metadata"]["name"] for each in left] == ["n"]
