"""Tainted devices: not given out, and with NoExecute taken from the pods that have them."""

from __future__ import annotations

import pytest

from tests.unit.sim.control_cluster import CLAIMS, DRA, HELPLESS, PODS, ControlCluster, devices_of

TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoExecute"}


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cluster(clock):
    made = ControlCluster(clock=clock)
    made.gpu_class()
    made.template()
    made.gpu_node("node-a", 2)
    return made


def taint(cluster, device="gpu-0", **more):
    current = cluster.call("GET", f"{DRA}/resourceslices/node-a-slice")
    for entry in current["spec"]["devices"]:
        if entry["name"] == device:
            entry["taints"] = [{**TAINT, **more}]
    cluster.call("PUT", f"{DRA}/resourceslices/node-a-slice", current)


def rule(cluster, effect, **selector):
    body = {
        "apiVersion": "resource.k8s.io/v1beta2",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "drain"},
        "spec": {"deviceSelector": selector, "taint": {"key": "example.com/drain", "effect": effect}},
    }
    cluster.call("POST", "/apis/resource.k8s.io/v1beta2/devicetaintrules", body)


def is_leaving(cluster, pod):
    return "deletionTimestamp" in cluster.get_pod(pod)["metadata"]


def test_a_pod_whose_gpu_gets_a_no_execute_taint_is_deleted_and_its_neighbour_is_not(cluster):
    for name in ("first", "second"):
        cluster.pod(name, template="one-gpu")
    cluster.sync()
    victim = next(
        name for name in ("first", "second") if devices_of(cluster.claim_of(name)) == [("node-a", "gpu-0")]
    )
    other = "second" if victim == "first" else "first"
    taint(cluster)
    cluster.sync()
    assert is_leaving(cluster, victim) and not is_leaving(cluster, other)
    conditions = {c["type"]: c for c in cluster.get_pod(victim)["status"]["conditions"]}
    assert conditions["DisruptionTarget"]["reason"] == "DeletionByDeviceTaintManager"
    told = dict(cluster.events(victim))["DeviceTaintManagerEviction"]
    assert told.endswith("device gpu.nvidia.com/node-a/gpu-0 has taint gpu.nvidia.com/xid=79:NoExecute")


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_a_tainted_gpu_is_not_given_out(cluster, effect):
    taint(cluster, effect=effect)
    cluster.pod("first", template="one-gpu")
    cluster.sync()
    assert devices_of(cluster.claim_of("first")) == [("node-a", "gpu-1")]


def test_a_toleration_keeps_a_pod_and_one_with_seconds_keeps_it_so_long(cluster, clock):
    cluster.claim("forever", tolerations=[{"key": TAINT["key"], "operator": "Exists"}])
    seconds = {"key": TAINT["key"], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    cluster.claim("a-minute", tolerations=[seconds])
    for name in ("forever", "a-minute"):
        cluster.pod(name, claim=name)
    cluster.sync()
    for device in ("gpu-0", "gpu-1"):
        taint(cluster, device)
    cluster.sync()
    assert not is_leaving(cluster, "a-minute")
    assert cluster.control.sync() <= 60
    clock.now += 61
    cluster.sync()
    assert is_leaving(cluster, "a-minute") and not is_leaving(cluster, "forever")


def test_a_taint_rule_drains_one_gpu_and_keeps_it_empty_until_the_rule_is_gone(cluster):
    cluster.pod("first", template="one-gpu")
    cluster.sync()
    rule(cluster, "NoExecute", pool="node-a", device="gpu-0")
    cluster.sync()
    assert is_leaving(cluster, "first")
    cluster.call("DELETE", f"{PODS}/first", {"gracePeriodSeconds": 0})
    cluster.sync()
    assert cluster.call("GET", CLAIMS)["items"] == []
    for name in ("second", "third"):
        cluster.pod(name, template="one-gpu")
    cluster.sync()
    placed = [name for name in ("second", "third") if cluster.node_of(name)]
    assert [devices_of(cluster.claim_of(name)) for name in placed] == [[("node-a", "gpu-1")]]
    cluster.call("DELETE", "/apis/resource.k8s.io/v1beta2/devicetaintrules/drain")
    cluster.sync()
    assert all(cluster.node_of(name) for name in ("second", "third"))


def test_a_rule_with_an_empty_selector_taints_every_gpu(cluster):
    rule(cluster, "NoSchedule")
    cluster.pod("first", template="one-gpu")
    cluster.sync()
    assert cluster.reason(
        "first"
    ) == "0/1 nodes are available: 1 cannot allocate all claims." + HELPLESS.format(1)
