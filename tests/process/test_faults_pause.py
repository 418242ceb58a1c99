"""A leader that is stopped for longer than its lease is good, and goes on: one writer at any time.

What was written by whom is read from the API server's log of requests, in the order in which it answered them.
"""

from __future__ import annotations

import json

import pytest

from dra.api.fraction_pods import rewrite_pod
from dra.api.fractions import FractionRules
from tests.process.fleet_leaders import holder, install_policies, reason, replica, say_of_the_node
from tests.process.harness import DRIVER, RESOURCE_API, new_uid, wait_until
from tests.process.invariants import check_invariants, expected, published

TEMPLATES = f"{RESOURCE_API}/namespaces/default/resourceclaimtemplates"


def pod_with_a_share(node, name, fraction):
    """Create a pod as the webhook writes it; gives the name of the template that it needs."""
    plain = {
        "metadata": {"name": name},
        "spec": {
            "containers": [
                {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": fraction}}}
            ]
        },
    }
    pod = {"apiVersion": "v1", "kind": "Pod", **rewrite_pod(plain, FractionRules())}
    made = node.api.create("/api/v1/namespaces/default/pods", pod)
    return made["spec"]["resourceClaims"][0]["resourceClaimTemplateName"]


def templates(node):
    return {each["metadata"]["name"] for each in node.api.request("GET", TEMPLATES)[1]["items"]}


def writers(node, agent):
    """Give (who wrote, who had the lease when it was answered, request) for each write but those of the lease."""
    leader, found = "", []
    for entry in node.api.requests.find():
        if entry.method == "GET" or not entry.user_agent.startswith(agent):
            continue
        if "/leases" in entry.target:
            if entry.status in (200, 201):
                leader = json.loads(entry.body)["spec"]["holderIdentity"]
            continue
        found.append((entry.user_agent.partition("(")[2].rstrip(")"), leader, entry))
    return found


def stale(node):
    """Give the writes that were answered when another replica had the lease."""
    return [entry for who, leader, entry in writers(node, "dra-fleet") if who != leader]


@pytest.mark.fault("F44")
def test_a_replica_that_was_stopped_past_its_lease_sends_nothing_when_it_wakes(node):
    first = replica(node, "a")
    wait_until(lambda: holder(node) == "a", what="a leads")
    one = pod_with_a_share(node, "one", "0.2")
    wait_until(lambda: one in templates(node), what="a makes the template")
    replica(node, "b")
    first.pause()
    wait_until(lambda: holder(node) == "b", what="b takes over")
    two = pod_with_a_share(node, "two", "0.5")
    wait_until(lambda: two in templates(node), what="b makes the next one")
    # Something to do for whoever looks, and nobody can learn who leads: only the leads themselves say that they are over.
    refused = node.api.faults.set("error", method="POST", path="/resourceclaimtemplates", code=503)
    three = pod_with_a_share(node, "three", "0.7")
    wait_until(lambda: refused.hits, what="b tries to make the third")
    node.api.faults.set("freeze", method="GET", path="/leases/")
    first.resume()
    wait_until(
        lambda: [
            line
            for line in first.logged("claim_template_failed")
            if line["error_code"] == "DRA-FLEET-NOT-LEADING"
        ],
        what="a keeps the write to itself",
    )
    node.api.faults.clear()
    pod_with_a_share(node, "four", "0.7")
    wait_until(lambda: three in templates(node), what="whoever leads makes the third")
    written = writers(node, "dra-fleet")
    assert stale(node) == []
    assert {"a", "b"} <= {who for who, _, _ in written}
    made = [entry.status for _, _, entry in written if entry.method == "POST" and "templates" in entry.target]
    assert made.count(201) == 3


@pytest.mark.fault("F44")
def test_a_write_that_a_stopped_leader_had_sent_is_refused_once_another_leader_has_written(
    node, pytestconfig
):
    install_policies(node, pytestconfig.rootpath)
    say_of_the_node(node, "Waiting")
    first = replica(node, "a")
    wait_until(lambda: reason(node) == "Waiting", what="a counts the node")
    second = replica(node, "b")
    # On its way to the API server, and there it waits.
    held = node.api.faults.set(
        "delay", method="PATCH", path="/gpunodepolicies/p/status", times=1, seconds=600
    )
    say_of_the_node(node, "Refused")
    wait_until(lambda: held.hits, what="a writes")
    first.pause()
    wait_until(lambda: reason(node) == "Refused", what="b takes over and writes")
    say_of_the_node(node, "Applied")
    wait_until(lambda: reason(node) == "Applied", what="b writes what is new")
    node.api.faults.clear(held)
    wait_until(lambda: stale(node), what="the held write is answered")
    assert [entry.status for entry in stale(node)] == [409]
    first.resume()
    wait_until(lambda: first.logged("not_leading"), what="a notices")
    assert reason(node) == "Applied"
    assert second.logged("leading")
    assert [entry.status for entry in stale(node)] == [409]


def slice_writes(node):
    """Give (instance, status) of each write of a ResourceSlice by a driver, in order."""
    return [
        (entry.user_agent.partition("(")[2].rstrip(")"), entry.status)
        for entry in node.api.requests.find("*", "/resourceslices")
        if entry.method != "GET" and entry.user_agent.startswith(f"dra/{DRIVER}")
    ]


@pytest.mark.fault("F44")
def test_of_two_drivers_of_a_node_one_publishes_however_long_it_is_stopped(node):
    uids = {"first": new_uid(), "second": new_uid()}
    kubelet = node.kubelet()
    first = node.daemon("--mig-mode=static", "--inventory-interval=1", pod_uid=uids["first"])
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    second = node.daemon("--mig-mode=static", "--inventory-interval=1", pod_uid=uids["second"])
    wait_until(lambda: second.logged("publisher_waiting"), what="the second waits for the lock")
    # A write that the first had sent when it was stopped, and an edit of a person before it arrives.
    held = node.api.faults.set("delay", method="PUT", path="/resourceslices", times=1, seconds=600)
    node.machine.control.lose_gpu(3)
    wait_until(lambda: held.hits, what="the first writes the taint")
    first.pause()
    (stored,) = node.slices()
    stored["spec"]["devices"] = stored["spec"]["devices"][:1]
    path = f"{RESOURCE_API}/resourceslices/{stored['metadata']['name']}"
    assert node.api.request("PUT", f"{path}?fieldManager=a-person", stored)[0] == 200
    before = len(slice_writes(node))
    node.api.faults.clear(held)
    wait_until(lambda: len(slice_writes(node)) > before, what="the held write is answered")
    assert slice_writes(node)[before:] == [(uids["first"], 409)]
    # It sees the loss of the GPU too, and would undo the edit at once if the lock were its own.
    wait_until(lambda: second.logged("health_condition_set"), what="the second knows of the lost GPU")
    assert not second.logged("pool_published")
    first.resume()
    wait_until(lambda: published(node) == expected(node), what="the first goes on")
    assert {instance for instance, _ in slice_writes(node)} == {uids["first"]}
    # The kernel lets go of the lock of a process that ends, stopped or not.
    first.pause()
    first.kill()
    handed = len(slice_writes(node))
    node.machine.control.lose_gpu(5)
    wait_until(lambda: published(node) == expected(node), what="the second takes over")
    assert {instance for instance, _ in slice_writes(node)[handed:]} == {uids["second"]}
    check_invariants(node, second)
