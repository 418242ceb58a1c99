"""Pending situations and what `dra explain` says to each: the table that users meet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from dra.diagnose.explain.render import text
from tests.unit.diagnose.explain_world import (
    DRIVER,
    H100,
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
    meta,
    node,
    pod,
    request,
    slice_of,
)  # fmt: skip

MODEL = f"device.attributes['{DRIVER}'].productName == '{H200}'"
BAD_KEY = f"device.attributes['{DRIVER}'].productname == '{H200}'"
TAINT = {
    "key": "gpu.nvidia.com/xid",
    "value": "79",
    "effect": "NoExecute",
    "timeAdded": "2026-09-01T10:00:00Z",
}


@dataclass(frozen=True)
class Case:
    """A situation: the objects, the code of the first cause, and words that the answer must have."""

    name: str
    objects: list[dict[str, Any]]
    code: str
    says: list[str]
    also: list[str] = field(default_factory=list)


def mig(index: int, start: int, size: int, gpu_index: int = 0) -> dict[str, Any]:
    """A partition of `size` memory slices from `start`."""
    counters = {f"memory-slice-{position}": {"value": "1"} for position in range(start, start + size)}
    counters["memory"] = {"value": f"{size * 10}Gi"}
    return {
        "name": f"gpu-{gpu_index}-mig-{size}g-{index}",
        "attributes": {"type": {"string": "mig"}, "profile": {"string": f"{size}g"}},
        "capacity": {"memory": {"value": f"{size * 10}Gi"}},
        "consumesCounters": [{"counterSet": f"gpu-{gpu_index}-counter-set", "counters": counters}],
    }


def whole(index: int) -> dict[str, Any]:
    """A GPU that several claims may hold, as this driver publishes it where partitions are made on demand."""
    counters = {f"memory-slice-{position}": {"value": "1m"} for position in range(8)}
    consumes = [{"counterSet": f"gpu-{index}-counter-set", "counters": counters}]
    return gpu(index, allowMultipleAllocations=True, consumesCounters=consumes)


def mig_node(name: str, *devices: dict[str, Any], gpus_: int = 1) -> list[dict[str, Any]]:
    sets = [
        {
            "name": f"gpu-{index}-counter-set",
            "counters": {
                "memory": {"value": "80Gi"},
                **{f"memory-slice-{position}": {"value": "1"} for position in range(8)},
            },
        }
        for index in range(gpus_)
    ]
    return [
        slice_of(name, [], name=f"{name}-0", count=2, sharedCounters=sets),
        slice_of(name, list(devices), name=f"{name}-1", count=2),
    ]


def mig_request(profile: str, **more: Any) -> dict[str, Any]:
    return request(
        deviceClassName="mig.nvidia.com",
        selectors=cel(f"device.attributes['{DRIVER}'].profile == '{profile}'"),
        **more,
    )


def shares(name: str, used: str) -> list[dict[str, Any]]:
    """Two GPUs that several claims may share, each used up to `used`."""
    devices = [gpu(index, allowMultipleAllocations=True) for index in range(2)]
    holders = [
        held(f"part-{index}", name, f"gpu-{index}", shareID=f"s{index}", consumedCapacity={"memory": used})
        for index in range(2)
    ]
    return [node(name), slice_of(name, devices), *holders, holder_pod(node_name=name)]


def cut(name: str) -> list[dict[str, Any]]:
    """A GPU that is cut into two shares, both held, whose memory nobody named."""
    policies = {
        "memory": {"value": "80Gi", "requestPolicy": {"default": "0"}},
        "shares": {"value": "2", "requestPolicy": {"default": "1"}},
    }
    device = gpu(0, allowMultipleAllocations=True, capacity=policies)
    taken = {"memory": "0", "shares": "1"}
    holders = [held(f"part-{n}", name, "gpu-0", shareID=f"s{n}", consumedCapacity=taken) for n in range(2)]
    return [node(name), slice_of(name, [device]), *holders, holder_pod(node_name=name)]


def driver_pod(node_name: str, status: dict[str, Any]) -> dict[str, Any]:
    return pod(
        f"dra-driver-nvidia-gpu-kubelet-plugin-{node_name}",
        namespace="dra-driver-nvidia-gpu",
        spec={
            "nodeName": node_name,
            "volumes": [{"name": "registry", "hostPath": {"path": "/var/lib/kubelet/plugins_registry"}}],
        },
        status=status,
    )


CRASHING = {
    "phase": "Running",
    "containerStatuses": [
        {
            "name": "gpus",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"finishedAt": "2026-09-01T09:00:00Z"}},
        }
    ],
}
N1 = [node("n1"), gpus("n1")]
ASKS = [pod("train", "want"), claim("want")]
ADMIN_TEMPLATE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaimTemplate",
    "metadata": meta("monitor", "team-a"),
    "spec": {"spec": {"devices": {"requests": [request(adminAccess=True)]}}},
}
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": meta("team-a", labels={})}

CASES = [
    Case(
        "no node has a GPU",
        [node("n1"), node("n2"), *ASKS],
        "no-devices",
        ["no node has published devices of gpu.nvidia.com", "Install the driver"],
    ),
    Case(
        "all GPUs are taken",
        [*N1, *ASKS, held("big", "n1", "gpu-0", "gpu-1"), holder_pod()],
        "held",
        ["all 2 matching devices on n1 are held", "gpu-0, gpu-1 by team-b/big (pod train-0)"],
    ),
    Case(
        "the selector matches nothing",
        [*N1, pod("train", "want"), claim("want", request(selectors=cel(MODEL)))],
        "no-match",
        ["nearest miss: gpu-0 on n1 (and 1 like it)", f'{MODEL} is false: productName is "{H100}"'],
    ),
    Case(
        "every GPU has a taint that is not tolerated",
        [node("n1"), slice_of("n1", [gpu(0, taints=[TAINT])]), *ASKS],
        "taint",
        ["1 matching device is tainted", "gpu.nvidia.com/xid=79:NoExecute since 2026-09-01T10:00:00Z: gpu-0 on n1"],
    ),
    Case(
        "the node has too little CPU",
        [*N1, pod("train", "want", cpu="100"), claim("want")],
        "pod-unschedulable",
        ["the devices are free on n1", "Insufficient cpu", "asks 100 cpu, 64 of 64 is free"],
    ),
    Case(
        "one node is full, the other has too little CPU",
        [*N1, node("n2", cpu="2"), gpus("n2"), pod("train", "want", cpu="4"), claim("want"),
         held("big", "n1", "gpu-0", "gpu-1"), holder_pod()],
        "pod-unschedulable",
        ["n2: the pod asks 4 cpu, 2 of 2 is free", "all 2 matching devices on n1 are held"],
        also=["held"],
    ),
    Case(
        "some GPUs are held, the rest tainted",
        [node("n1"), slice_of("n1", [gpu(0), gpu(1, taints=[TAINT])]), *ASKS, held("one", "n1", "gpu-0"),
         holder_pod()],
        "held",
        ["1 of 2 matching devices on n1 are held", "gpu-0 by team-b/one", "tainted", "gpu-1 on n1"],
        also=["taint"],
    ),
    Case(
        "enough memory in total, not on one GPU",
        [*shares("n1", "48Gi"), pod("train", "want"),
         claim("want", request(capacity={"requests": {"memory": "40Gi"}}))],
        "fragmented",
        ["enough is free in total, but not on one GPU", "gpu-0 32Gi, gpu-1 32Gi of memory"],
    ),
    Case(
        "not enough memory left anywhere",
        [*shares("n1", "70Gi"), pod("train", "want"),
         claim("want", request(capacity={"requests": {"memory": "40Gi"}}))],
        "short",
        ["not enough is left", "gpu-0 10Gi, gpu-1 10Gi of memory"],
    ),
    Case(
        "all shares are held, though memory is left",
        [*cut("n1"), pod("train", "want"), claim("want")],
        "short",
        ["not enough is left", "gpu-0 0 of shares"],
    ),
    Case(
        "more GPUs than a node has",
        [*N1, node("n2"), gpus("n2", 8), pod("train", "want"), claim("want", request(count=16))],
        "too-many",
        ["it needs 16 matching devices on one node, the largest node has 8 (n2)"],
    ),
    Case(
        "the driver's pod crashes",
        [node("n1", nvidia_com__gpu_present="true"), driver_pod("n1", CRASHING), *ASKS],
        "slice-missing",
        ["is not running: CrashLoopBackOff since 2026-09-01T09:00:00Z (3h)", "dra doctor"],
    ),
    Case(
        "the node with the GPU is not ready",
        [node("n1", nvidia_com__gpu_present="true", status={"conditions": [
            {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-09-01T11:00:00Z"}]}), *ASKS],
        "slice-missing",
        ["the node is not ready since 2026-09-01T11:00:00Z"],
    ),
    Case(
        "the pool is incomplete",
        [node("n1"), slice_of("n1", [gpu(0)], count=2, generation=4), *ASKS],
        "pool-incomplete",
        ["pool gpu.nvidia.com/n1 is incomplete", "1 of 2 slices of generation 4"],
    ),
    Case(
        "only slices of an old generation have the GPU",
        [node("n1"), gpus("n1", name="old", generation=1), slice_of("n1", [], name="new", generation=2), *ASKS],
        "pool-empty",
        ["its driver has published no devices", "dra doctor"],
    ),
    Case(
        "the class does not exist",
        [*N1, pod("train", "want"), claim("want", request(deviceClassName="gpu.nvidia.co"))],
        "class-missing",
        ["names DeviceClass 'gpu.nvidia.co', which does not exist", "Did you mean gpu.nvidia.com?"],
    ),
    Case(
        "the class is another than meant",
        [*N1, device_class(), device_class("mig.nvidia.com", "mig"), pod("train", "want"),
         claim("want", request(deviceClassName="mig.nvidia.com"))],
        "no-match",
        ["matches class mig.nvidia.com", 'type is "gpu"'],
    ),
    Case(
        "the selector fails on a device",
        [*N1, pod("train", "want"), claim("want", request(selectors=cel(BAD_KEY)))],
        "cel-runtime",
        ["selector #0 of the request fails (no such key: productname) on device gpu-0 (driver gpu.nvidia.com) of node n1",
         "the device has productName", "ends the scheduling attempt for all nodes"],
    ),
    Case(
        "the selector does not compile",
        [*N1, pod("train", "want"), claim("want", request(selectors=cel("device.atributes['x'].y == 1")))],
        "cel-compile",
        ["does not compile", "undefined field 'atributes'", "^"],
    ),
    Case(
        "no two GPUs are on one PCIe root",
        [node("n1"), slice_of("n1", [
            gpu(index, attributes={"resource.kubernetes.io/pcieRoot": {"string": f"pci000{index}"}})
            for index in range(2)]),
         pod("train", "want"),
         claim("want", request(count=2), constraints=[{"matchAttribute": "resource.kubernetes.io/pcieRoot"}])],
        "constraint",
        ["matchAttribute resource.kubernetes.io/pcieRoot cannot be met", "pci0000 ×1, pci0001 ×1"],
    ),
    Case(
        "admin access in a namespace that is not labelled",
        [*N1, NAMESPACE, ADMIN_TEMPLATE, pod("train", template="monitor")],
        "admin-namespace",
        ["kubectl label namespace team-a resource.kubernetes.io/admin-access=true"],
    ),
    Case(
        "the template does not exist",
        [*N1, pod("train", template="nothing")],
        "template-missing",
        ["template nothing, which does not exist in team-a"],
    ),
    Case(
        "another pod holds the shared claim on a full node",
        [node("n1", cpu="2"), gpus("n1"), node("n2"), gpus("n2"), pod("train", "both", cpu="4"),
         held("both", "n1", "gpu-0", namespace="team-a", pod="first"),
         holder_pod("first", "n1", "team-a")],
        "pod-unschedulable",
        ["usable on n1, but the pod may not go there: Insufficient cpu",
         "claim both is allocated already (gpu-0 of n1), reserved for pod first", "claim both is not usable on n2"],
        also=["claim-elsewhere"],
    ),
    Case(
        "the pod's nodeSelector fits no node with GPUs",
        [*N1, pod("train", "want", spec={"nodeSelector": {"zone": "b"}}), claim("want")],
        "pod-unschedulable",
        ["nodeSelector wants zone=b, the node has no such label"],
    ),
    Case(
        "more devices than a claim can have",
        [*N1, pod("train", "want"), claim("want", request(count=33))],
        "too-many-devices",
        ["asks for 33 devices; a claim can have 32", "several claims"],
    ),
    Case(
        "a request of capacity that no GPU has",
        [*N1, pod("train", "want"), claim("want", request(capacity={"requests": {"memory": "120Gi"}}))],
        "capacity",
        ["memory: asks 120Gi, the device has 80Gi"],
    ),
    Case(
        "room on the GPU, but not in one piece",
        [node("n1"), *mig_node("n1", mig(0, 0, 4), mig(1, 4, 4), mig(2, 2, 2), mig(3, 6, 1)),
         device_class("mig.nvidia.com", "mig"), pod("train", "want"), claim("want", mig_request("4g")),
         held("a", "n1", "gpu-0-mig-2g-2"), held("b", "n1", "gpu-0-mig-1g-3"), holder_pod()],
        "fragmented",
        ["enough is free, but not in one piece", "gpu-0 50Gi of memory"],
    ),
    Case(
        "GPUs that are held as a whole and take next to nothing of each place, so that shares go beside each other",
        [node("n1"), *mig_node("n1", whole(0), mig(0, 0, 4), mig(1, 4, 4)),
         device_class("mig.nvidia.com", "mig"), pod("train", "want"), claim("want", mig_request("4g")),
         held("a", "n1", "gpu-0", shareID="s0"), holder_pod()],
        "short",
        ["n1: not enough is left; left: gpu-0 0 of memory\n", "in use: gpu-0 by team-b/a"],
    ),
    Case(
        "two requests want the same device",
        [node("n1"), gpus("n1", 1), pod("train", "want"), claim("want", request("one"), request("two"))],
        "compete",
        ["it could be met alone, but not beside request one"],
    ),
    Case(
        "the pool names a device twice",
        [node("n1"), slice_of("n1", [gpu(0), gpu(0)]), *ASKS],
        "pool-invalid",
        ["device gpu-0 is listed twice"],
    ),
    Case(
        "all devices are asked for while a pool is updated",
        [node("n1"), slice_of("n1", [gpu(0)], count=2), pod("train", "want"),
         claim("want", request(allocationMode="All"))],
        "pool-incomplete",
        ["asks for all devices, but resource pool gpu.nvidia.com/n1 is currently being updated"],
    ),
    Case(
        "a scheduling gate",
        [*N1, pod("train", "want", spec={"schedulingGates": [{"name": "quota"}]}), claim("want")],
        "scheduling-gated",
        ["gates are not lifted: quota"],
    ),
    Case(
        "the holder's pod is gone",
        [*N1, *ASKS, held("big", "n1", "gpu-0", "gpu-1")],
        "held",
        ["team-b/big (its pod train-0 is gone)", "Nobody uses team-b/big any more"],
    ),
    Case(
        "nothing is in the way any more",
        [*N1, pod("train", "want", message="0/1 nodes are available: 1 cannot allocate all claims."), claim("want")],
        "fits-now",
        ["it fits on n1 now", "scheduler: 0/1 nodes are available"],
    ),
    Case(
        "an extended resource without a class or a plugin",
        [*N1, pod("train", spec={"containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]})],
        "pod-unschedulable",
        ["no nvidia.com/gpu from a device plugin, and no DeviceClass stands for that name"],
    ),
    Case(
        "an extended resource of a class, all taken",
        [*N1, device_class(extendedResourceName="nvidia.com/gpu"),
         pod("train", spec={"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}),
         held("big", "n1", "gpu-0", "gpu-1"), holder_pod()],
        "held",
        ["all 2 matching devices on n1 are held"],
    ),
    Case(
        "preparing fails with a code of ours",
        [*N1, stuck := pod("train", "mine", spec={"nodeName": "n1"}),
         held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
         event(stuck, "FailedPrepareDynamicResources", "Failed to prepare dynamic resources: NodePrepareResources failed"
               " for ResourceClaim mine: DRA-DEVICE-HELD: gpu-0 is held by team-b/big. Delete its pod.", count=4)],
        "prepare-failed",
        ["node n1 could not prepare it, 4 times last at 2026-09-01T11:58:00Z", "DRA-DEVICE-HELD: gpu-0 is held by team-b/big",
         "to do: Delete its pod."],
    ),
    Case(
        "the driver is not registered where the pod runs",
        [node("n1"), gpus("n1"), driver_pod("n1", CRASHING), stuck2 := pod("train", "mine", spec={"nodeName": "n1"}),
         held("mine", "n1", "gpu-0", namespace="team-a", pod="train"),
         event(stuck2, "FailedPrepareDynamicResources",
               "Failed to prepare dynamic resources: prepare resources: DRA driver gpu.nvidia.com is not registered")],
        "driver-not-registered",
        ["driver gpu.nvidia.com is not registered with the kubelet of node n1", "CrashLoopBackOff"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_cause_is_named_and_what_to_do(case):
    answer = ask(*case.objects)
    written = text(answer)
    assert answer.reasons[0].code == case.code, written
    assert answer.exit_code == 1
    for words in case.says:
        assert words in written, written
    codes = [reason.code for reason in answer.reasons]
    assert set(case.also) <= set(codes), codes


def test_the_table_has_the_situations_that_users_report():
    assert len(CASES) >= 20
    assert len({case.name for case in CASES}) == len(CASES)
