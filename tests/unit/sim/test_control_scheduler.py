"""The claim controller and the scheduler against the simulated API server, round by round without threads."""

from __future__ import annotations

import time

import pytest

from dra.sim.control.api import CLAIMS as CLAIM_COLLECTION
from dra.sim.control.api import PODS as POD_COLLECTION
from dra.sim.control.api import CallFailed, ControlApi
from tests.unit.sim.control_cluster import CLAIMS, DRA, DRIVER, HELPLESS, PODS, ControlCluster, devices_of

FINALIZER = "resource.kubernetes.io/delete-protection"


@pytest.fixture
def cluster():
    made = ControlCluster()
    made.gpu_class()
    made.template()
    return made


def test_each_pod_of_a_template_gets_a_claim_and_a_gpu_of_its_own(cluster):
    cluster.gpu_node("node-a", 2)
    for name in ("first", "second"):
        cluster.pod(name, template="one-gpu")
    cluster.sync()
    assert cluster.node_of("first") == cluster.node_of("second") == "node-a"
    found = [devices_of(cluster.claim_of(name)) for name in ("first", "second")]
    assert sorted(found) == [[("node-a", "gpu-0")], [("node-a", "gpu-1")]]
    claim = cluster.claim_of("first")
    pod = cluster.get_pod("first")
    assert claim["status"]["reservedFor"] == [
        {"resource": "pods", "name": "first", "uid": pod["metadata"]["uid"]}
    ]
    assert claim["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    assert claim["metadata"]["annotations"] == {"resource.kubernetes.io/pod-claim-name": "gpu"}
    assert FINALIZER in claim["metadata"]["finalizers"]
    assert cluster.events("first") == [("Scheduled", "Successfully assigned default/first to node-a")]


def test_pods_that_share_a_claim_get_one_gpu_on_one_node_and_both_reservations(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.gpu_node("node-b", 1)
    cluster.claim("common")
    for name in ("writer", "reader"):
        cluster.pod(name, claim="common")
    cluster.sync()
    assert cluster.node_of("writer") == cluster.node_of("reader") == "node-a"
    users = cluster.get_claim("common")["status"]["reservedFor"]
    assert sorted(user["name"] for user in users) == ["reader", "writer"]


def test_the_end_of_the_last_user_frees_a_shared_claim_and_the_next_pod_gets_the_gpu(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.claim("common")
    for name in ("writer", "reader"):
        cluster.pod(name, claim="common")
    cluster.sync()
    cluster.pod("late", template="one-gpu")
    cluster.sync()
    assert "cannot allocate all claims" in cluster.reason("late")
    cluster.end("writer")
    cluster.sync()
    assert [user["name"] for user in cluster.get_claim("common")["status"]["reservedFor"]] == ["reader"]
    assert cluster.node_of("late") == ""
    cluster.end("reader", "Failed")
    cluster.sync()
    claim = cluster.get_claim("common")
    assert "allocation" not in claim.get("status", {})
    assert FINALIZER not in claim["metadata"].get("finalizers", [])
    assert cluster.node_of("late") == "node-a"


def test_the_claim_of_a_template_goes_with_its_finished_pod(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.pod("job", template="one-gpu")
    cluster.sync()
    cluster.end("job")
    cluster.sync()
    assert cluster.list("resourceclaims") == []


def test_a_claim_in_use_is_deleted_only_after_its_pod(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.claim("common")
    cluster.pod("user", claim="common")
    cluster.sync()
    cluster.call("DELETE", f"{CLAIMS}/common")
    cluster.sync()
    assert cluster.get_claim("common")["status"]["allocation"]
    cluster.pod("newcomer", claim="common")
    cluster.sync()
    assert cluster.reason("newcomer") == 'resourceclaim "common" is being deleted'
    cluster.end("user")
    cluster.sync()
    assert cluster.list("resourceclaims") == []
    assert cluster.reason("newcomer") == 'resourceclaim "common" not found'


def test_an_unused_allocation_stays_until_the_claim_is_deleted(cluster):
    """As in kube-controller-manager: only the end of a reservation, or a deletion, takes an allocation away."""
    cluster.gpu_node("node-a", 1)
    claim = cluster.claim("held")
    result = {"request": "gpu", "driver": DRIVER, "pool": "node-a", "device": "gpu-0"}
    claim["metadata"]["finalizers"] = [FINALIZER]
    claim = cluster.call("PUT", f"{CLAIMS}/held", claim)
    status = {"allocation": {"devices": {"results": [result]}}}
    cluster.call("PUT", f"{CLAIMS}/held/status", {**claim, "status": status})
    cluster.sync()
    assert devices_of(cluster.get_claim("held")) == [("node-a", "gpu-0")]
    cluster.call("DELETE", f"{CLAIMS}/held")
    cluster.sync()
    assert cluster.list("resourceclaims") == []


def test_pods_that_came_before_template_class_and_slices_run_when_these_appear():
    cluster = ControlCluster()
    cluster.node("node-a")
    cluster.pod("early", template="one-gpu")
    cluster.sync()
    assert cluster.reason("early") == 'pod "default/early": ResourceClaim not created yet'
    told = 'PodResourceClaim gpu: resourceclaimtemplates.resource.k8s.io "one-gpu" not found'
    assert ("FailedResourceClaimCreation", told) in cluster.events("early")
    cluster.template()
    cluster.sync()
    assert "could not retrieve device class" in cluster.reason("early")
    cluster.gpu_class()
    cluster.sync()
    assert cluster.reason(
        "early"
    ) == "0/1 nodes are available: 1 cannot allocate all claims." + HELPLESS.format(1)
    cluster.gpus("node-a", 1)
    cluster.sync()
    assert cluster.node_of("early") == "node-a"
    # What was said once is not said again.
    assert len(cluster.events("early")) == len(set(cluster.events("early")))


def test_without_any_node_the_pod_says_so_and_a_node_helps(cluster):
    cluster.pod("early", template="one-gpu")
    cluster.sync()
    assert cluster.reason("early") == "no nodes available to schedule pods"
    cluster.gpu_node("node-a", 1)
    cluster.sync()
    assert cluster.node_of("early") == "node-a"


def test_a_pod_with_a_scheduling_gate_waits_until_the_gate_is_gone(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.pod("gated", template="one-gpu", schedulingGates=[{"name": "example.com/quota"}])
    cluster.sync()
    assert cluster.node_of("gated") == ""
    assert cluster.reason("gated") == "Scheduling is blocked due to non-empty scheduling gates"
    assert "allocation" not in cluster.claim_of("gated").get("status", {})
    pod = cluster.get_pod("gated")
    del pod["spec"]["schedulingGates"]
    cluster.call("PUT", f"{PODS}/gated", pod)
    cluster.sync()
    assert cluster.node_of("gated") == "node-a"


def test_a_pod_for_another_scheduler_is_left_alone(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.pod("theirs", template="one-gpu", schedulerName="theirs")
    cluster.sync()
    assert cluster.node_of("theirs") == "" and cluster.reason("theirs") == ""


def test_a_pod_with_a_higher_priority_comes_first(cluster):
    cluster.gpu_node("node-a", 1)
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}}
    cluster.call("POST", path, {**urgent, "value": 1000})
    cluster.pod("a-normal", template="one-gpu")
    cluster.pod("b-urgent", template="one-gpu", priorityClassName="urgent")
    cluster.sync()
    assert (cluster.node_of("b-urgent"), cluster.node_of("a-normal")) == ("node-a", "")


@pytest.mark.parametrize(
    ("node", "pod", "reason"),
    [
        ({"unschedulable": True}, {}, "node(s) were unschedulable"),
        (
            {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]},
            {},
            "node(s) had untolerated taint(s)",
        ),
        ({}, {"nodeSelector": {"zone": "west"}}, "node(s) didn't match Pod's node affinity/selector"),
        ({"allocatable": {"cpu": "1"}}, {}, "Insufficient cpu"),
        ({"allocatable": {"pods": "0"}}, {}, "Too many pods"),
    ],
)
def test_a_node_that_does_not_suit_the_pod_is_passed_over_and_named(cluster, node, pod, reason):
    cluster.gpu_node("node-a", 1, **node)
    spec = {"containers": [{"name": "main", "image": "i", "resources": {"requests": {"cpu": "2"}}}], **pod}
    cluster.pod("picky", **spec)
    cluster.sync()
    assert cluster.reason("picky").startswith(f"0/1 nodes are available: 1 {reason}")
    cluster.gpu_node("node-b", 1, labels={"zone": "west"})
    cluster.sync()
    assert cluster.node_of("picky") == "node-b"


def test_the_node_with_the_better_alternative_wins_over_the_first_one(cluster):
    def product(name):
        expression = f'device.attributes["{DRIVER}"].productName == "{name}"'
        return [{"cel": {"expression": expression}}]

    cluster.node("node-a")
    cluster.gpus("node-a", 1, product="L4")
    cluster.node("node-b")
    cluster.gpus("node-b", 1, product="H100")
    cluster.template(
        "best-gpu",
        alternatives=[
            {"name": "big", "deviceClassName": DRIVER, "selectors": product("H100")},
            {"name": "small", "deviceClassName": DRIVER, "selectors": product("L4")},
        ],
    )
    cluster.pod("one", template="best-gpu")
    cluster.sync()
    cluster.pod("two", template="best-gpu")
    cluster.sync()
    assert cluster.node_of("one") == "node-b"
    assert cluster.claim_of("one")["status"]["allocation"]["devices"]["results"][0]["request"] == "gpu/big"
    assert cluster.node_of("two") == "node-a"


def test_a_pod_goes_where_its_allocated_claim_is_and_else_the_claim_is_freed(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.gpu_node("node-b", 1)
    cluster.claim("common")
    cluster.pod("first", claim="common")
    cluster.sync()
    cluster.pod("second", claim="common", nodeSelector={"kubernetes.io/hostname": "node-b"})
    cluster.sync()
    text = cluster.reason("second")
    assert "1 resourceclaim not available on the node" in text
    assert devices_of(cluster.get_claim("common")) == [("node-a", "gpu-0")]  # somebody else uses it
    cluster.end("first")
    cluster.sync()
    assert cluster.node_of("second") == "node-b"
    assert devices_of(cluster.get_claim("common")) == [("node-b", "gpu-0")]


def test_a_claim_that_only_this_pod_reserved_is_given_up_when_its_node_is_out_of_reach(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.gpu_node("node-b", 1)
    pod = cluster.pod("mover", claim="common", nodeSelector={"kubernetes.io/hostname": "node-b"})
    claim = cluster.claim("common")
    result = {"request": "gpu", "driver": DRIVER, "pool": "node-a", "device": "gpu-0"}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]}
    allocation = {"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": [term]}}
    users = [{"resource": "pods", "name": "mover", "uid": pod["metadata"]["uid"]}]
    status = {"allocation": allocation, "reservedFor": users}
    cluster.call("PUT", f"{CLAIMS}/common/status", {**claim, "status": status})
    cluster.sync()
    assert cluster.node_of("mover") == "node-b"
    assert devices_of(cluster.get_claim("common")) == [("node-b", "gpu-0")]


def test_a_claim_that_vanishes_in_the_middle_of_a_round_costs_that_pod_only(cluster, monkeypatch):
    cluster.gpu_node("node-a", 2)
    cluster.claim("doomed")
    cluster.pod("a-victim", claim="doomed")
    cluster.pod("b-other", template="one-gpu")
    plain = ControlApi.replace

    def replace(self, collection, body, **options):
        if collection == CLAIM_COLLECTION and body["metadata"]["name"] == "doomed":
            monkeypatch.setattr(ControlApi, "replace", plain)
            cluster.call("DELETE", f"{CLAIMS}/doomed")
        return plain(self, collection, body, **options)

    monkeypatch.setattr(ControlApi, "replace", replace)
    cluster.sync()
    assert cluster.node_of("b-other") == "node-a"
    assert cluster.reason("a-victim") == 'resourceclaim "doomed" not found'


def test_writes_of_others_in_between_are_met_by_another_round(cluster, monkeypatch):
    """Every second write is beaten by somebody who touches the object first: 409, and the next round gets it right."""
    cluster.gpu_node("node-a", 4)
    plain, count = ControlApi.replace, [0]

    def replace(self, collection, body, **options):
        count[0] += 1
        if count[0] % 2 and collection in (CLAIM_COLLECTION, POD_COLLECTION):
            path = f"{CLAIMS if collection == CLAIM_COLLECTION else PODS}/{body['metadata']['name']}"
            current = cluster.call("GET", path)
            current["metadata"].setdefault("labels", {})["touched"] = str(count[0])
            cluster.call("PUT", path, current)
        return plain(self, collection, body, **options)

    monkeypatch.setattr(ControlApi, "replace", replace)
    for number in range(4):
        cluster.pod(f"pod-{number}", template="one-gpu")
    cluster.sync(rounds=60)
    found = [devices_of(cluster.claim_of(f"pod-{number}"))[0] for number in range(4)]
    assert sorted(found) == [("node-a", f"gpu-{number}") for number in range(4)]
    assert len(cluster.list("resourceclaims")) == 4


def test_a_refused_binding_leaves_no_second_claim_and_no_lost_gpu(cluster, monkeypatch):
    cluster = ControlCluster()
    cluster.gpu_class(extendedResourceName="nvidia.com/gpu")
    cluster.gpu_node("node-a", 1)
    container = {"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    cluster.pod("classic", containers=[container])
    plain = ControlApi.bind

    def bind(self, pod, node):
        monkeypatch.setattr(ControlApi, "bind", plain)
        raise CallFailed("POST", "binding", 409, {"message": "beaten"})

    monkeypatch.setattr(ControlApi, "bind", bind)
    cluster.sync()
    assert cluster.node_of("classic") == "node-a"
    claims = cluster.list("resourceclaims")
    assert [claim["metadata"]["name"] for claim in claims] == [
        cluster.get_pod("classic")["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    ]
    assert devices_of(claims[0]) == [("node-a", "gpu-0")]


def test_a_pod_bound_by_somebody_else_gets_its_reservation_from_the_controller(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.claim("common")
    cluster.pod("first", claim="common")
    cluster.sync()
    pod = cluster.pod("manual", claim="common", nodeName="node-a")
    cluster.sync()
    users = cluster.get_claim("common")["status"]["reservedFor"]
    assert pod["metadata"]["uid"] in {user["uid"] for user in users}


def test_a_faulty_claim_does_not_keep_the_others_waiting(cluster):
    cluster.gpu_node("node-a", 1)
    broken = [{"cel": {"expression": f'device.attributes["{DRIVER}"].noSuchThing == "x"'}}]
    cluster.template("broken", selectors=broken)
    cluster.pod("a-broken", template="broken")
    cluster.pod("b-fine", template="one-gpu")
    cluster.sync()
    assert "CEL runtime error" in cluster.reason("a-broken")
    assert cluster.node_of("b-fine") == "node-a"


@pytest.mark.parametrize("version", ["1.32", "1.33", "1.37"])
def test_other_versions_of_the_api_are_spoken_too(version):
    cluster = ControlCluster(version=version)
    served = "v1beta1" if version == "1.32" else "v1beta2" if version == "1.33" else "v1"
    base = f"/apis/resource.k8s.io/{served}"
    exact = {"deviceClassName": "any"}
    request = {"name": "gpu", **exact} if version == "1.32" else {"name": "gpu", "exactly": exact}
    device = {"name": "gpu-0", **({"basic": {}} if version == "1.32" else {})}
    pool = {"name": "node-a", "generation": 1, "resourceSliceCount": 1}
    slice_spec = {"driver": DRIVER, "nodeName": "node-a", "pool": pool, "devices": [device]}
    objects = [
        ("deviceclasses", "DeviceClass", "any", {}),
        ("resourceslices", "ResourceSlice", "slice", slice_spec),
        ("namespaces/default/resourceclaimtemplates", "ResourceClaimTemplate", "one-gpu", {"spec": {"devices": {"requests": [request]}}}),
    ]  # fmt: skip
    for path, kind, name, spec in objects:
        body = {
            "apiVersion": f"resource.k8s.io/{served}",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        cluster.call("POST", f"{base}/{path}", body)
    cluster.node("node-a")
    cluster.pod("user", template="one-gpu")
    cluster.sync()
    assert cluster.node_of("user") == "node-a"
    claims = cluster.call("GET", f"{base}/namespaces/default/resourceclaims")["items"]
    assert devices_of(claims[0]) == [("node-a", "gpu-0")]


def test_56_pods_with_claims_find_their_place_on_8_nodes_within_seconds(cluster):
    for number in range(8):
        cluster.gpu_node(f"node-{number}")
    for number in range(56):
        cluster.pod(f"pod-{number:02}", template="one-gpu")
    started = time.monotonic()
    cluster.sync()
    assert time.monotonic() - started < 60
    found = [devices_of(claim)[0] for claim in cluster.list("resourceclaims")]
    assert len(set(found)) == 56


def test_a_full_cluster_is_asked_once_for_a_thousand_equal_pods(cluster, monkeypatch):
    from dra.allocator.allocate import Allocator

    asked = []
    plain = Allocator.allocate
    monkeypatch.setattr(
        Allocator, "allocate", lambda self, node, claims: asked.append(node) or plain(self, node, claims)
    )
    cluster.gpu_node("node-a", 1)
    for number in range(30):
        cluster.pod(f"pod-{number}", template="one-gpu")
    cluster.sync()
    assert len(asked) <= 4
    asked.clear()
    cluster.call(
        "POST", "/api/v1/namespaces", {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "x"}}
    )
    cluster.control.sync()
    assert asked == []


def test_slices_are_read_again_only_when_they_change(cluster, monkeypatch):
    from dra.allocator import pools

    read = []
    plain = pools.parse_slices
    monkeypatch.setattr(pools, "parse_slices", lambda slices: read.append(1) or plain(slices))
    cluster.gpu_node("node-a", 4)
    for number in range(3):
        cluster.pod(f"pod-{number}", template="one-gpu")
        cluster.sync()
    assert len(read) == 1
    current = cluster.call("GET", f"{DRA}/resourceslices/node-a-slice")
    current["spec"]["devices"] = current["spec"]["devices"][:3]
    cluster.call("PUT", f"{DRA}/resourceslices/node-a-slice", current)
    cluster.pod("last", template="one-gpu")
    cluster.sync()
    assert len(read) == 2
    assert cluster.node_of("last") == ""


def test_the_event_says_what_the_real_scheduler_says_about_every_node_and_about_preemption(cluster):
    cluster.gpu_node("node-a", 1)
    cluster.gpu_node("node-b", 1, labels={"zone": "b"})
    cluster.claim("two", count=2)
    cluster.pod("big", claim="two", nodeSelector={"zone": "b"})
    cluster.sync()
    text = "0/2 nodes are available: 1 cannot allocate all claims, 1 node(s) didn't match Pod's node affinity/selector."
    assert cluster.reason("big") == text + HELPLESS.format(2)
    assert ("FailedScheduling", cluster.reason("big")) in cluster.events("big")


@pytest.mark.parametrize(
    ("cpu", "more", "suffix"),
    [
        ("7", {}, "0/1 nodes are available: 1 No preemption victims found for incoming pod."),
        ("9", {}, "0/1 nodes are available: 1 Preemption is not helpful for scheduling."),
        ("7", {"preemptionPolicy": "Never"}, "not eligible due to preemptionPolicy=Never."),
    ],
)
def test_a_pod_without_claims_is_told_whether_others_could_make_room(cluster, cpu, more, suffix):
    cluster.node("node-a")

    def containers(amount):
        return [{"name": "main", "image": "i", "resources": {"requests": {"cpu": amount}}}]

    cluster.pod("first", containers=containers("7"))
    cluster.sync()
    cluster.pod("second", containers=containers(cpu), **more)
    cluster.sync()
    assert cluster.reason("second") == (
        f"0/1 nodes are available: 1 Insufficient cpu. no new claims to deallocate, preemption: {suffix}"
    )
