"""What `dra explain` says to do, in terms of what the user wrote: a line of resources, a claim, or a template."""

from __future__ import annotations

from typing import Any

import pytest

from dra.api.fraction_pods import rewritten
from dra.api.fractions import FractionRules, asks_of_pod
from dra.diagnose.explain.render import text
from tests.unit.diagnose.explain_world import (
    ask,
    cel,
    claim,
    device_class,
    gpu,
    gpus,
    held,
    holder_pod,
    meta,
    node,
    pod,
    request,
    slice_of,
)  # fmt: skip

Json = dict[str, Any]
N1 = [node("n1"), gpus("n1")]
XID = {"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}
WHOLE = device_class(
    "whole.gpu.nvidia.com",
    selectors=cel(
        "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
        " && device.attributes['gpudra.dev'].?sharing.orValue('exclusive') in ['exclusive', 'memory']"
    ),
    extendedResourceName="nvidia.com/gpu",
)


def wants(limits: Json) -> Json:
    return pod("train", spec={"containers": [{"name": "main", "resources": {"limits": limits}}]})


def fraction(limits: Json, *, template: bool = True) -> list[Json]:
    """A pod as the webhook rewrites it, with the template that the fleet makes and the claim made from that."""
    made = rewritten(wants(limits), FractionRules())
    (ask_,) = asks_of_pod(made["metadata"]["annotations"]).values()
    if not template:
        known = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
        return [made, {**known, "metadata": meta("other", "team-a"), "spec": {"spec": {}}}]
    owner = {
        "kind": "Pod",
        "name": "train",
        "uid": made["metadata"]["uid"],
        "controller": True,
        "apiVersion": "v1",
    }
    got = claim("train-x1", metadata={"ownerReferences": [owner]})
    got["spec"] = ask_.claim_spec()
    made["status"]["resourceClaimStatuses"] = [{"name": "gpudra-main", "resourceClaimName": "train-x1"}]
    return [made, got]


def shared(sharing: str, *, of: int = 0, used: Json | None = None) -> list[Json]:
    """A node with one GPU that is shared."""
    attributes: Json = {"gpudra.dev/sharing": {"string": sharing}}
    capacity: Json = {"memory": {"value": "80Gi", "requestPolicy": {"default": "0"}}}
    if of:
        attributes["gpudra.dev/replicas"] = {"int": of}
        capacity["shares"] = {"value": str(of), "requestPolicy": {"default": "1"}}
    device = gpu(0, allowMultipleAllocations=True, attributes=attributes, capacity=capacity)
    holders = [held("part", "n1", "gpu-0", shareID="s1", consumedCapacity=used)] if used else []
    return [node("n1"), slice_of("n1", [device]), *holders, holder_pod()]


FIFTH, MEMORY = {"nvidia.com/gpu": "0.2"}, {"nvidia.com/gpumem": "3000"}
CASES: dict[str, tuple[list[Json], str, list[str]]] = {
    "a fraction, and no GPU is shared": (
        [*fraction(FIFTH), *N1],
        "no-match",
        ["matches what nvidia.com/gpu: 0.2 of container main needs", "Have GPUs cut into 100 shares: --sharing 100"],
    ),
    "a fraction, and GPUs are cut into another number": (
        [*fraction(FIFTH), *shared("shares", of=10)],
        "no-match",
        ["?replicas is optional.of(10)", "--shares-per-card of the webhook must be the same number"],
    ),
    "an amount of memory, and no GPU is shared by memory": (
        [*fraction(MEMORY), *N1],
        "no-match",
        ["matches what nvidia.com/gpumem: 3000 of container main needs", "Have GPUs shared by memory: --sharing memory"],
    ),
    "both": (
        [*fraction({**FIFTH, **MEMORY}), *N1],
        "no-match",
        ["what nvidia.com/gpu: 0.2 with nvidia.com/gpumem: 3000 of container main needs"],
    ),
    "a fraction, and the shares are taken": (
        [*fraction(FIFTH), *shared("shares", of=100, used={"shares": "90", "memory": "0"})],
        "short",
        ["left: gpu-0 10 of shares", "ask for a smaller piece"],
    ),
    "more memory than a GPU has": (
        [*fraction({"nvidia.com/gpumem": "90000"}), *shared("memory")],
        "capacity",
        ["ask for less than nvidia.com/gpumem: 90000 of container main"],
    ),
    "a fraction, and the fleet has made no template": (
        [*fraction(FIFTH, template=False), *N1],
        "template-missing",
        ["dra fleet makes it of what the pod asks for", "check that it runs"],
    ),
    "an amount of memory that the webhook did not see": (
        [wants(MEMORY), *N1],
        "pod-unschedulable",
        ["kubectl label namespace team-a gpudra.dev/fractions=enabled", "make the pod anew"],
    ),
    "a MIG profile that no class stands for": (
        [wants({"nvidia.com/mig-1g.99gb": "1"}), *N1],
        "pod-unschedulable",
        ["Check the name of the profile; dra fleet makes the DeviceClass for nvidia.com/mig-1g.99gb"],
    ),
    "a resource of a device plugin that has none left": (
        [wants({"example.com/nic": "3"}), node("n1", allocatable={"example.com/nic": "2"})],
        "pod-unschedulable",
        ["Wait until the device plugin has some left, or ask for less."],
    ),
    "a whole GPU, where a policy has them cut into shares": (
        [wants({"nvidia.com/gpu": "1"}), WHOLE, *shared("shares", of=10)],
        "no-match",
        ["class whole.gpu.nvidia.com, which stands for nvidia.com/gpu: 1 of container main",
         "The GPUs are published in shares", "nvidia.com/gpu.shared: 1", "GpuNodePolicy"],
    ),
    "a whole GPU, where all have a taint": (
        [wants({"nvidia.com/gpu": "1"}), WHOLE, node("n1"), slice_of("n1", [gpu(0, taints=[XID])])],
        "taint",
        ["a claim of its own in place of nvidia.com/gpu: 1 of container main"],
    ),
    "more GPUs than a claim may have": (
        [wants({"nvidia.com/gpu": "40"}), WHOLE, *N1],
        "too-many-devices",
        ["the claim for the pod's extended resources asks for 40 devices", "Spread the devices over several pods"],
    ),
    "a class that fits nothing, without a selector of the user's": (
        [pod("train", "want"), claim("want", request(deviceClassName="mig.nvidia.com")), *N1,
         device_class("mig.nvidia.com", "mig")],
        "no-match",
        ["to do: Name a class that has such devices; a claim cannot be changed, so make it and the pod anew"],
    ),
    "GPU node without the driver": (
        [pod("train", "want"), claim("want"), node("n1", nvidia_com__gpu_present="true")],
        "slice-missing",
        ["no pod of a DRA driver runs there", "see why its DaemonSet leaves the node out"],
    ),
    "distinct devices, some of them in use": (
        [pod("train", "want"), *N1, held("big", "n1", "gpu-0"), holder_pod(), gpus("n2", 2), node("n2"),
         claim("want", request(count=2), constraints=[{"distinctAttribute": "gpu.nvidia.com/productName"}])],
        "constraint",
        ["Relax the constraint."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_is_about_what_the_user_wrote(name):
    objects, code, words = CASES[name]
    answer = ask(*objects)
    written = text(answer)
    assert answer.reasons[0].code == code, written
    for each in words:
        assert each in written, written


@pytest.mark.parametrize("name", [name for name in CASES if "claim" not in name and "class that" not in name])
def test_who_wrote_no_selector_is_not_told_to_correct_one(name):
    assert "selector" not in " ".join(reason.remedy for reason in ask(*CASES[name][0]).reasons)


def test_a_claim_made_from_a_template_is_corrected_there():
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "train",
        "uid": "uid-team-a-train",
        "controller": True,
    }
    want = claim(
        "train-made-x",
        request(selectors=cel("device.attributes['gpu.nvidia.com'].productName == 'X'")),
        metadata={"ownerReferences": [owner]},
    )
    made = [{"name": "made", "resourceClaimName": "train-made-x"}]
    answer = ask(*N1, pod("train", template="one-gpu", status={"resourceClaimStatuses": made}), want)
    assert answer.reasons[0].code == "no-match"
    assert "in template one-gpu; then make the pod anew" in answer.reasons[0].remedy


def test_a_slip_in_a_name_is_corrected_first():
    bad = request(selectors=cel("device.attributes['gpu.nvidia.com'].productname == 'X'"))
    answer = ask(*N1, pod("train", "want"), claim("want", bad))
    assert answer.reasons[0].remedy.startswith("Write productName if that is meant.")
