"""GpuNodePolicies with the real daemon: applied with kubectl's requests, seen in slices, GpuNode and Events."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.conftest import SOON, call
from tests.process.harness import DRIVER, wait_until
from tests.yaml_text import read

ROOT = Path(__file__).parents[2]
API = "/apis/gpudra.dev/v1alpha1"
# Whether the definition is there is asked every half second.
PERIODS = {
    **SOON,
    "dra.controller.policy_watch:PolicyWatch.ask_seconds": 0.5,
    "dra.controller.policy_watch:PolicyWatch.seldom_seconds": 0.5,
}
LAYOUT = {"mode": "static", "layout": {"3g.40gb": 1, "1g.10gb": 4}}


def install(node):
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        node.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", read(path.read_text()))
    wait_until(lambda: node.api.request("GET", f"{API}/gpunodepolicies")[0] == 200, what="it is served")


def put(node, name, *groups, **spec):
    path = f"{API}/gpunodepolicies"
    status, known = node.api.request("GET", f"{path}/{name}")
    body = {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": name},
        "spec": {"gpus": list(groups), **spec},
    }
    if status == 404:
        return node.api.request("POST", path, body)
    body["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
    return node.api.request("PUT", f"{path}/{name}", body)


def devices(node):
    return {device["name"]: device for each in node.slices() for device in each["spec"].get("devices", ())}


def report(node):
    status, body = node.api.request("GET", f"{API}/gpunodes/node-a")
    return body.get("status", {}) if status == 200 else {}


def gpu_state(node, device):
    return next((each for each in report(node).get("gpus", ()) if each["device"] == device), {})


@pytest.fixture
def kept(node):
    install(node)
    kubelet = node.kubelet()
    daemon = node.daemon(periods=PERIODS)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    node.kept = daemon
    return node


def uuid(node, device):
    return devices(node)[device]["attributes"]["uuid"]["string"]


def test_a_policy_changes_idle_gpus_waits_for_a_claim_and_tells_it(kept):
    node = kept
    connection = node._kubelets[0].wait_registered(DRIVER, timeout_seconds=60)
    claim = node.claim("train", "gpu-0")
    assert call(connection.prepare, [claim])[0].error == ""
    assert put(node, "shared", {"sharing": {"strategy": "shares", "shares": 10}})[0] == 201
    wait_until(lambda: devices(node)["gpu-7"].get("allowMultipleAllocations"), what="idle GPUs are shared")
    wait_until(lambda: gpu_state(node, "gpu-0").get("claims") == ["default/train"], what="it says what for")
    busy = devices(node)["gpu-0"]
    assert not busy.get("allowMultipleAllocations")
    assert [taint["key"] for taint in busy["taints"]] == ["gpu.nvidia.com/draining"]
    assert report(node)["pending"] == 1
    assert report(node)["policies"][0]["name"] == "shared"
    wait_until(
        lambda: any(
            event["reason"] == "PolicyWaiting"
            and event["involvedObject"]["kind"] == "GpuNodePolicy"
            and "default/train" in event["message"]
            for event in node.api.request("GET", "/api/v1/namespaces/default/events")[1]["items"]
        ),
        what="the event on the policy",
    )
    assert call(connection.unprepare, [claim])[0].error == ""
    node.api.request("DELETE", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/train")
    wait_until(lambda: devices(node)["gpu-0"].get("allowMultipleAllocations"), what="the last one follows")
    wait_until(lambda: "taints" not in devices(node)["gpu-0"], what="the taint goes")
    wait_until(lambda: report(node).get("pending") == 0, what="it says so")


def test_a_bad_policy_is_refused_by_the_server_and_one_that_goes_leaves_the_flags(kept):
    node = kept
    status, answer = put(node, "bad", {"sharing": {"strategy": "shares"}})
    assert status == 422, answer
    assert "shares is needed" in answer["message"]
    put(node, "p", {"match": {"uuid": uuid(node, "gpu-1")}, "attributes": {"rail": {"int": 3}}})
    wait_until(lambda: "gpudra.dev/rail" in devices(node)["gpu-1"]["attributes"], what="the attribute")
    assert "gpudra.dev/rail" not in devices(node)["gpu-2"]["attributes"]
    node.api.request("DELETE", f"{API}/gpunodepolicies/p")
    wait_until(lambda: "gpudra.dev/rail" not in devices(node)["gpu-1"]["attributes"], what="it goes")


@pytest.mark.parametrize("crash_at", ["layout:written", "layout:created#2", "policy:published"])
def test_killed_in_a_change_of_layout_it_goes_on_and_the_gpu_is_held_back_meanwhile(node, crash_at):
    install(node)
    first = node.daemon("--mig-mode", "static", crash_at=crash_at, periods=PERIODS)
    node.wait_published()
    target = uuid(node, "gpu-0")
    put(node, "cut", {"match": {"uuid": target}, "mig": LAYOUT})
    wait_until(lambda: first.process.poll() is not None, what="it dies on the way")
    assert all(
        any(taint["key"] == "gpu.nvidia.com/draining" for taint in device.get("taints", ()))
        for name, device in devices(node).items()
        if name.startswith("gpu-0")
    )
    node.daemon("--mig-mode", "static", periods=PERIODS)

    def made():
        found = [name for name in devices(node) if name.startswith("gpu-0")]
        return len(found) == 5 and all("taints" not in devices(node)[name] for name in found)

    wait_until(made, what="the layout is made and given out")
    wait_until(lambda: gpu_state(node, "gpu-0").get("state") == "Applied", what="it says so")


def test_what_containers_get_of_the_driver_follows_the_policy_of_their_gpu(kept):
    node = kept
    connection = node._kubelets[0].wait_registered(DRIVER, timeout_seconds=60)
    put(
        node, "narrow", {"match": {"uuid": uuid(node, "gpu-1")}, "driverCapabilities": ["utility"]},
    )  # fmt: skip
    wait_until(lambda: report(node).get("policies"), what="the node takes the policy")

    def libraries(claim):
        assert call(connection.prepare, [claim])[0].error == ""
        text = (node.root / f"var/run/cdi/k8s.{DRIVER}-claim_{claim['metadata']['uid']}.yaml").read_text()
        return "libcuda.so" in text, "libnvidia-ml.so" in text

    assert libraries(node.claim("narrow", "gpu-1")) == (False, True)
    assert libraries(node.claim("usual", "gpu-2")) == (True, True)
