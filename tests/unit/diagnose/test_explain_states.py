"""`dra explain` on pods and claims that are not simply unscheduled, on what cannot be read, and on odd clusters."""

from __future__ import annotations

import json

import pytest

from dra.diagnose.explain.flaws import parse_version
from dra.diagnose.explain.render import as_json, text
from dra.errors import ConfigError
from tests.unit.diagnose.explain_world import (
    DRIVER,
    H200,
    ask,
    cel,
    claim,
    device_class,
    event,
    gpu,
    gpus,
    held,
    holder_pod,
    node,
    pod,
    request,
    slice_of,
)

N1 = [node("n1"), gpus("n1")]
WAITS = [pod("train", "want"), claim("want")]
MODEL = f"device.attributes['{DRIVER}'].productName == '{H200}'"


def codes(answer):
    return [reason.code for reason in answer.reasons]


# -- pods ------------------------------------------------------------------------------------------


def test_a_running_pod_is_no_problem_and_its_devices_are_named():
    answer = ask(
        *N1,
        pod("train", "mine", spec={"nodeName": "n1"}, status={"phase": "Running"}),
        held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
    )
    assert (answer.state, answer.exit_code) == ("running", 0)
    assert text(answer) == "pod team-a/train: it runs on node n1 with gpu-0 of n1"


def test_a_running_pod_with_a_share_says_how_much_it_has():
    share = {"shareID": "s", "consumedCapacity": {"gpu.nvidia.com/shares": "20", "memory": "0"}}
    answer = ask(
        *N1,
        pod("train", "mine", spec={"nodeName": "n1"}, status={"phase": "Running"}),
        held("mine", "n1", "gpu-0", namespace="team-a", pod="train", **share),
    )
    assert text(answer) == "pod team-a/train: it runs on node n1 with gpu-0 (shares 20) of n1"


def test_an_ended_pod_is_no_problem():
    answer = ask(*N1, pod("train", status={"phase": "Succeeded"}))
    assert (answer.state, answer.exit_code) == ("ended", 0)


def test_a_pod_that_is_prepared_without_a_failure_is_said_to_be_so():
    answer = ask(
        *N1,
        pod("train", "mine", spec={"nodeName": "n1"}),
        held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
    )
    assert codes(answer) == ["preparing"]
    assert "no failure is reported" in answer.verdict


def test_a_container_that_waits_for_its_image_is_no_matter_of_devices():
    waiting = {"containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    answer = ask(
        *N1,
        pod("train", "mine", spec={"nodeName": "n1"}, status=waiting),
        held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
    )
    assert codes(answer) == ["not-devices"]
    assert "container main waits: ImagePullBackOff" in answer.verdict


def test_a_pod_put_on_a_node_by_hand_has_no_reserved_claim():
    answer = ask(*N1, pod("train", "want", spec={"nodeName": "n1"}), claim("want"))
    assert codes(answer) == ["not-reserved"]
    assert "spec.nodeName" in text(answer)


def test_a_bound_pod_on_a_vanished_node_must_be_made_anew():
    answer = ask(
        pod("train", "mine", spec={"nodeName": "n1"}),
        held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
        node("n2"),
    )
    assert codes(answer) == ["node-gone"]


def test_a_failure_of_another_driver_is_shown_as_it_is():
    stuck = pod("train", "mine", spec={"nodeName": "n1"})
    answer = ask(
        *N1,
        stuck,
        held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
        event(stuck, "FailedPrepareDynamicResources", "Failed to prepare: strict decoding error"),
    )
    assert "node n1 could not prepare it last at" in answer.verdict
    assert answer.verdict.endswith("strict decoding error")


def test_events_of_an_earlier_pod_with_the_same_name_do_not_count():
    old = pod("train", "mine", spec={"nodeName": "n1"})
    told = event(old, "FailedPrepareDynamicResources", "DRA-X: old")
    told["involvedObject"]["uid"] = "another"
    answer = ask(*N1, old, held("mine", "n1", "gpu-0", namespace="team-a", pod="train"), told)
    assert codes(answer) == ["preparing"]


def test_a_pod_without_claims_may_still_be_kept_away_and_that_is_said():
    answer = ask(node("n1", cpu="2"), pod("train", cpu="8"))
    assert codes(answer) == ["pod-unschedulable"]
    assert answer.verdict.startswith("the pod may not go to n1: Insufficient cpu")
    assert "no claims" in answer.warnings[0]


def test_a_node_that_is_cordoned_is_named_with_the_free_devices():
    cordoned = node("n1")
    cordoned["spec"]["unschedulable"] = True
    answer = ask(cordoned, gpus("n1"), *WAITS)
    assert (
        "the devices are free on n1, but the pod may not go there: node(s) were unschedulable"
        in answer.verdict
    )
    assert "Uncordon the node." in text(answer)


def test_a_second_obstacle_on_the_same_node_is_told_too():
    answer = ask(node("n1", cpu="1"), gpus("n1"), pod("train", "want", cpu="2"), claim("want"),
                 held("big", "n1", "gpu-0", "gpu-1"), holder_pod(cpu="0"))  # fmt: skip
    assert codes(answer) == ["held"]
    assert "besides, the pod may not go to n1: Insufficient cpu" in text(answer)


def test_a_missing_claim_and_a_deleted_one_are_told_apart():
    answer = ask(*N1, pod("train", "gone"))
    assert codes(answer) == ["claim-missing"]
    going = claim("want", metadata={"deletionTimestamp": "2026-09-01T11:00:00Z"})
    answer = ask(*N1, pod("train", "want"), going)
    assert codes(answer) == ["claim-deleting"]
    assert "is being deleted since 2026-09-01T11:00:00Z (60m)" in answer.verdict


def test_a_claim_that_was_made_for_another_pod_is_refused():
    other = claim(
        "made-1",
        metadata={"ownerReferences": [{"kind": "Pod", "name": "old", "uid": "x", "controller": True}]},
    )
    waits = pod(
        "train",
        template="t",
        status={"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "made-1"}]},
    )
    answer = ask(*N1, waits, other)
    assert codes(answer) == ["claim-foreign"]
    assert "it belongs to Pod old" in answer.verdict


def test_a_claim_with_256_consumers_takes_no_more():
    full = held("both", "n1", "gpu-0", namespace="team-a")
    full["status"]["reservedFor"] = [
        {"resource": "pods", "name": f"p{n}", "uid": f"u{n}"} for n in range(256)
    ]
    assert codes(ask(*N1, pod("train", "both"), full))[0] == "claim-full"


def test_the_controllers_refusal_of_a_claim_is_shown():
    waits = pod("train", template="t")
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t", "namespace": "team-a"},
        "spec": {"spec": {"devices": {"requests": [request()]}}},
    }
    told = event(waits, "FailedResourceClaimCreation", "PodResourceClaim made: quota exceeded")
    answer = ask(*N1, waits, template, told)
    assert codes(answer) == ["claim-not-created"]
    assert "quota exceeded" in answer.verdict


def test_every_alternative_of_a_request_is_explained():
    want = claim("want", {"name": "gpu", "firstAvailable": [
        {"name": "big", "deviceClassName": "gpu.nvidia.com", "selectors": cel(MODEL)},
        {"name": "any", "deviceClassName": "gpu.nvidia.com"},
    ]})  # fmt: skip
    answer = ask(*N1, pod("train", "want"), want, held("big", "n1", "gpu-0", "gpu-1"), holder_pod())
    assert {(reason.code, reason.request) for reason in answer.reasons} == {
        ("held", "gpu/any"),
        ("no-match", "gpu/big"),
    }


def test_one_alternative_that_fits_is_enough():
    want = claim("want", {"name": "gpu", "firstAvailable": [
        {"name": "big", "deviceClassName": "gpu.nvidia.com", "selectors": cel(MODEL)},
        {"name": "any", "deviceClassName": "gpu.nvidia.com"},
    ]})  # fmt: skip
    assert codes(ask(*N1, pod("train", "want"), want)) == ["fits-now"]


def test_several_free_devices_that_are_too_few_are_counted():
    answer = ask(
        node("n1"), gpus("n1", 8), pod("train", "want"), claim("want", request(count=8)),
        held("one", "n1", "gpu-3"), holder_pod(),
    )  # fmt: skip
    assert (
        answer.verdict
        == "1 of 8 matching devices on n1 are held by other claims; 8 free on one node are needed"
    )


def test_admin_access_does_not_mind_holders():
    answer = ask(
        *N1, pod("train", "want"), claim("want", request(adminAccess=True)), held("big", "n1", "gpu-0", "gpu-1"),
        holder_pod(),
    )  # fmt: skip
    assert codes(answer) == ["fits-now"]


def test_a_tolerated_taint_is_no_obstacle():
    tainted = slice_of("n1", [gpu(0, taints=[{"key": "k", "effect": "NoSchedule"}])])
    want = claim("want", request(tolerations=[{"key": "k", "operator": "Exists"}]))
    assert codes(ask(node("n1"), tainted, pod("train", "want"), want)) == ["fits-now"]


def test_a_selector_error_on_a_node_that_the_pod_cannot_use_ends_nothing():
    bad = f"device.attributes['{DRIVER}'].rack == 'a'"
    good = gpu(0, attributes={"rack": {"string": "a"}})
    answer = ask(
        node("n1"), slice_of("n1", [good]),
        node("n2", taints=[{"key": "k", "effect": "NoSchedule"}]), gpus("n2"),
        pod("train", "want"), claim("want", request(selectors=cel(bad))),
    )  # fmt: skip
    assert codes(answer) == ["fits-now"]


def test_an_unreached_term_is_still_weighed_for_the_nearest_miss():
    expression = f"device.attributes['{DRIVER}'].uuid == 'none' && device.attributes['{DRIVER}'].productName == '{H200}'"
    devices = [gpu(0), gpu(1, H200)]
    answer = ask(
        node("n1"),
        slice_of("n1", devices),
        pod("train", "want"),
        claim("want", request(selectors=cel(expression))),
    )
    # gpu-1 lacks one term, gpu-0 both, though both stop at the first.
    assert "nearest miss: gpu-1 on n1" in text(answer)
    assert 'values in the cluster: "GPU-0000", "GPU-0001"' in text(answer)


def test_slices_of_a_vanished_node_are_pointed_out():
    answer = ask(node("n1"), gpus("gone-node"), *WAITS)
    assert codes(answer) == ["no-devices"]
    assert any("stale slices" in line and "gone-node" in line for line in answer.warnings)


def test_what_is_not_looked_at_is_said():
    answer = ask(*N1, pod("train", "want", spec={"topologySpreadConstraints": [{}]}), claim("want"))
    assert "not looked at: topologySpreadConstraints of the pod" in answer.warnings


# -- claims ----------------------------------------------------------------------------------------


def test_an_allocated_claim_names_devices_and_consumers():
    answer = ask(*N1, held("big", "n1", "gpu-0"), holder_pod(), subject="claim/big", namespace="team-b")
    assert (answer.state, answer.exit_code) == ("allocated", 0)
    assert answer.verdict == "it is allocated: gpu-0 of n1, reserved for pod train-0"


def test_an_allocated_claim_that_cannot_be_prepared_counts_as_pending():
    stuck = pod("train-0", "big", namespace="team-b", spec={"nodeName": "n1"})
    told = event(stuck, "FailedPrepareDynamicResources", "DRA-DEVICE-LOST: gpu-0 is lost. Reset it.")
    answer = ask(*N1, held("big", "n1", "gpu-0"), stuck, told, subject="claim/big", namespace="team-b")
    assert (answer.state, answer.exit_code) == ("pending", 1)
    assert "DRA-DEVICE-LOST: gpu-0 is lost" in text(answer)


def test_a_claim_that_no_pod_uses_is_told_so_and_whether_it_would_fit():
    answer = ask(*N1, claim("want"), subject="claim/want")
    assert codes(answer) == ["no-consumer", "fits-now"]
    assert answer.exit_code == 1


def test_a_pending_claim_is_explained_by_its_pod():
    answer = ask(
        node("n1", cpu="1"), gpus("n1"), pod("train", "want", cpu="2"), claim("want"), subject="claim/want"
    )
    assert answer.verdict.startswith("pod train waits with it: the devices are free on n1")


def test_a_bare_name_finds_the_pod_first():
    assert ask(*N1, pod("x", "x"), claim("x"), subject="x").kind == "Pod"
    assert ask(*N1, claim("x"), subject="x").kind == "ResourceClaim"


@pytest.mark.parametrize(
    ("subject", "code"),
    [
        ("pod/trai", "DRA-EXPLAIN-NOT-FOUND"),
        ("node/n1", "DRA-EXPLAIN-SUBJECT"),
        ("pod/", "DRA-EXPLAIN-SUBJECT"),
    ],
)
def test_what_is_not_there_is_refused_with_a_hint(subject, code):
    with pytest.raises(ConfigError) as caught:
        ask(*N1, *WAITS, subject=subject)
    assert caught.value.code == code
    if code == "DRA-EXPLAIN-NOT-FOUND":
        assert caught.value.remedy == "Did you mean train?"


def test_without_a_namespace_two_of_a_name_are_ambiguous():
    with pytest.raises(ConfigError, match="team-a, team-b"):
        ask(pod("train"), pod("train", namespace="team-b"), namespace=None)


# -- what cannot be read ---------------------------------------------------------------------------


def test_without_slices_nothing_is_guessed():
    answer = ask(node("n1"), *WAITS, unread={"ResourceSlice": "may not be read"})
    assert codes(answer) == ["not-read"]
    assert "ResourceSlices may not be read" in answer.verdict
    assert answer.exit_code == 1


def test_without_nodes_the_devices_are_still_explained():
    answer = ask(gpus("n1"), *WAITS, held("big", "n1", "gpu-0", "gpu-1"), unread={"Node": "may not be read"})
    assert codes(answer) == ["held"]
    assert "node taints" in answer.unread["Node"]


def test_without_all_claims_a_fit_is_only_as_far_as_could_be_read():
    answer = ask(*N1, *WAITS, unread={"ResourceClaim": "only namespace team-a may be read"})
    assert answer.verdict == "as far as could be read, it fits on n1"
    assert "devices that other claims hold may look free" in text(answer)


def test_an_unknown_claim_is_not_called_missing_when_claims_cannot_be_read():
    answer = ask(*N1, pod("train", "want"), unread={"ResourceClaim": "may not be read"})
    assert codes(answer)[0] == "not-read"


def test_without_classes_a_class_is_not_called_missing():
    answer = ask(
        *N1,
        pod("train", "want"),
        claim("want", request(deviceClassName="other")),
        unread={"DeviceClass": "x"},
    )
    assert codes(answer) == ["not-read"]


# -- versions --------------------------------------------------------------------------------------


def counted(node_name: str, **more):
    counters = {"sharedCounters": [{"name": "s", "counters": {"memory": {"value": "80Gi"}}}]}
    return slice_of(node_name, [], name=f"{node_name}-counters", count=2, **counters, **more)


@pytest.mark.parametrize(("version", "warned"), [("v1.36.2", True), ("v1.36.3", False), ("v1.35.0", False)])
def test_a_scheduler_that_mixes_up_pools_of_two_drivers_is_warned_of(version, warned):
    other = slice_of("n1", [{"name": "nic-0"}], name="nic", driver="nic.example.com")
    answer = ask(
        node("n1"), counted("n1"), gpus("n1", count=2) | {"spec": gpus("n1")["spec"] | {"pool": {
            "name": "n1", "generation": 1, "resourceSliceCount": 2}}},
        other, *WAITS, version=version,
    )  # fmt: skip
    assert any("#140434" in line for line in answer.warnings) is warned


def test_an_old_scheduler_that_uses_incomplete_pools_is_warned_of():
    partial = slice_of("n1", [gpu(0)], count=2)
    answer = ask(node("n1"), partial, *WAITS, version="v1.34.1")
    assert codes(answer) == ["pool-incomplete"]
    assert any("also allocates from pools" in line for line in answer.warnings)
    assert not ask(node("n1"), partial, *WAITS, version="v1.36.3").warnings


def test_without_the_servers_version_the_kubelets_is_used_with_a_condition():
    old = node("n1", status={"nodeInfo": {"kubeletVersion": "v1.34.2"}})
    answer = ask(old, slice_of("n1", [gpu(0)], count=2), *WAITS)
    assert answer.warnings[0].startswith("if the scheduler is of the kubelets' version v1.34.2")


def test_versions_of_vendors_are_read():
    assert parse_version("v1.36.2-gke.100") == (1, 36, 2)
    assert parse_version("unknown") is None


# -- forms -----------------------------------------------------------------------------------------


def test_the_json_form_is_complete_and_stable():
    answer = ask(*N1, node("n2"), *WAITS, held("big", "n1", "gpu-0", "gpu-1"), holder_pod())
    document = json.loads(json.dumps(as_json(answer)))
    assert list(document) == [
        "kind", "namespace", "name", "state", "verdict", "reasons", "claims", "nodes", "schedulerMessage", "warnings",
        "notKnown",
    ]  # fmt: skip
    assert list(document["reasons"][0]) == [
        "code",
        "message",
        "remedy",
        "details",
        "claim",
        "request",
        "nodes",
    ]
    first = document["nodes"][0]
    assert (first["name"], first["devicesFit"], first["requests"][0]["counts"]) == ("n1", False, {"held": 2})
    assert first["requests"][0]["devices"][1] == {
        "driver": DRIVER, "pool": "n1", "device": "gpu-1", "stage": "held", "detail": "team-b/big (pod train-0)",
    }  # fmt: skip
    assert document["claims"] == [
        {"namespace": "team-a", "name": "want", "allocated": False, "devices": [], "reservedFor": []}
    ]


def test_the_wide_form_shows_every_node_and_device():
    answer = ask(*N1, node("n2", cpu="0"), *WAITS, held("big", "n1", "gpu-0"), holder_pod())
    wide = text(answer, wide=True)
    assert "node n1: devices free" in wide
    assert "    gpu-0: held: team-b/big (pod train-0)" in wide
    assert "    gpu-1: free" in wide
    assert "node n2: devices not to be had\n  pod: Insufficient cpu" in wide


def test_the_short_form_stays_short_in_a_large_cluster():
    objects = [device_class(), *WAITS]
    for number in range(60):
        name = f"n{number:02}"
        objects += [node(name), gpus(name), held(f"h{number}", name, "gpu-0", "gpu-1", pod=f"p{number}")]
        objects.append(holder_pod(f"p{number}", name))
    answer = ask(*objects)
    assert len(text(answer).splitlines()) < 10
    assert "all 120 matching devices on 60 nodes (n00, n01 …) are held" in text(answer)
    assert "… and 56 more" in text(answer)


def test_a_search_without_end_is_given_up_and_said_so():
    devices = [gpu(index, attributes={"group": {"int": index // 7}}) for index in range(63)]
    want = claim("want", request(count=8), constraints=[{"matchAttribute": f"{DRIVER}/group"}])
    other = claim("other", request(count=16), constraints=[{"distinctAttribute": f"{DRIVER}/group"}])
    answer = ask(node("n1"), slice_of("n1", devices), pod("train", "want", "other"), want, other)
    assert codes(answer)[0] in {"too-long", "constraint"}
    assert answer.exit_code == 1


def test_a_nearer_cause_makes_the_others_short():
    answer = ask(
        node("n1"), gpus("n1", product=H200), node("n2"), gpus("n2"), pod("train", "want"),
        claim("want", request(selectors=cel(MODEL))), held("big", "n1", "gpu-0", "gpu-1"), holder_pod(),
    )  # fmt: skip
    assert codes(answer) == ["held", "no-match"]
    assert text(answer).splitlines()[-1] == (
        "also: none of the 2 devices on n2 matches the selectors of request gpu"
    )
    assert "nearest miss" in text(answer, wide=True)
