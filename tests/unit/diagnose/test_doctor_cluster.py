"""`dra doctor cluster` and `node/NAME` from afar: what the API alone tells."""

from __future__ import annotations

import pytest

from dra.diagnose.doctor.ladders import diagnose_cluster, diagnose_node_from_api
from dra.diagnose.doctor.model import EXIT_CODES, as_text
from dra.diagnose.doctor.published_rungs import look_at_slices
from dra.diagnose.explain.cluster import SLICE, Cluster, Collection
from tests.unit.diagnose.explain_world import cluster as world_of
from tests.unit.diagnose.explain_world import device_class, gpu, gpus, meta, slice_of
from tests.unit.diagnose.explain_world import node as node_object

GOOD = {"nodeInfo": {"kubeletVersion": "v1.36.1", "containerRuntimeVersion": "containerd://2.1.0"}}
CLASS = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": meta("gpu.nvidia.com"),
         "spec": {"extendedResourceName": "nvidia.com/gpu"}}  # fmt: skip


def plugin_pod(node, *, ready=True):
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": meta(f"plugin-{node}", "dra-driver-nvidia-gpu"),
        "spec": {"nodeName": node, "containers": [{"name": "gpus", "image": "dra", "command": ["dra", "plugin"]}],
                 "volumes": [{"name": "r", "hostPath": {"path": "/var/lib/kubelet/plugins_registry"}}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }  # fmt: skip


def node(name, **how):
    how.setdefault("status", GOOD)
    made = node_object(name, **how)
    made["metadata"]["labels"]["nvidia.com/gpu.present"] = "true"
    return made


def cluster(*objects, unread=None):
    collection = Collection()
    for each in objects:
        collection.add(each)
    return Cluster(collection.objects, unread or {}, "v1.36.1")


WHOLE = (CLASS, node("a"), plugin_pod("a"), gpus("a", 2))


def codes(report):
    return [finding.code for rung in report.rungs for finding in rung.findings]


def test_a_whole_cluster_is_well():
    report = diagnose_cluster(cluster(*WHOLE))
    assert report.exit_code == 0, as_text(report)
    assert "1 of 1 driver pods are ready" in as_text(report)


@pytest.mark.parametrize(
    ("objects", "rung", "code"),
    [
        (WHOLE[1:], "classes", "DRA-CLASS-MISSING"),
        ((CLASS, node("a"), gpus("a", 2)), "plugin-pods", "DRA-PLUGIN-POD-MISSING"),
        (
            (CLASS, node("a"), plugin_pod("a", ready=False), gpus("a", 2)),
            "plugin-pods",
            "DRA-PLUGIN-POD-DOWN",
        ),
        ((CLASS, node("a"), plugin_pod("a")), "nodes", "DRA-SLICES-MISSING"),
    ],
)
def test_the_first_broken_rung_of_the_cluster(objects, rung, code):
    report = diagnose_cluster(cluster(*objects))
    assert report.exit_code == EXIT_CODES[rung], as_text(report)
    assert code in [finding.code for finding in report.broken.findings]


def test_one_bad_node_of_several_is_a_warning_that_names_it():
    bad = {"nodeInfo": {"kubeletVersion": "v1.34.0", "containerRuntimeVersion": "docker://28.0.0"}}
    objects = (*WHOLE, node("b", status=bad, allocatable={"nvidia.com/gpu": "8"}), plugin_pod("b"))
    report = diagnose_cluster(cluster(*objects))
    assert report.exit_code == 3
    assert codes(report) == [
        "DRA-KUBELET-1340", "DRA-RUNTIME-UNSUPPORTED", "DRA-DEVICE-PLUGIN-ACTIVE", "DRA-SLICES-MISSING",
    ]  # fmt: skip


def test_pools_and_claims_that_hang_in_the_air():
    claim = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": meta("c", "default"),
        "status": {"allocation": {"devices": {"results": [
            {"request": "r", "driver": "gpu.nvidia.com", "pool": "gone", "device": "gpu-0"}]}}},
    }  # fmt: skip
    half = slice_of("z", [gpu(0)], count=2)
    second = {**CLASS, "metadata": meta("mine")}
    report = diagnose_cluster(cluster(*WHOLE, claim, half, second))
    found = [
        "DRA-EXTENDED-NAME-TWICE",
        "DRA-POOL-INCOMPLETE",
        "DRA-SLICE-OF-GONE-NODE",
        "DRA-CLAIM-POOL-GONE",
    ]
    assert codes(report) == found


def test_what_may_not_be_read_is_unknown_and_breaks_nothing():
    report = diagnose_cluster(cluster(*WHOLE, unread={"Node": "may not be read", SLICE: "may not be read"}))
    states = {rung.name: rung.state for rung in report.rungs}
    assert states["api"] == states["nodes"] == "unknown"
    assert report.exit_code == 0


def test_a_node_from_afar():
    report = diagnose_node_from_api(cluster(*WHOLE), "a")
    assert (report.exit_code, [rung.name for rung in report.rungs]) == (
        0,
        ["node", "plugin-pods", "slices", "claims"],
    )
    assert diagnose_node_from_api(cluster(*WHOLE), "x").exit_code == EXIT_CODES["node"]
    privileged = plugin_pod("a")
    privileged["metadata"] = meta("greedy", "default")
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    report = diagnose_node_from_api(cluster(*WHOLE, privileged), "a")
    assert "DRA-POD-PRIVILEGED" in codes(report) and report.exit_code == 0


@pytest.mark.parametrize("look", [diagnose_cluster, lambda world: diagnose_node_from_api(world, "a")])
def test_a_simulated_node_needs_no_pod_of_the_driver(look):
    simulated = {"nodeInfo": {"kubeletVersion": "v1.36.0-sim", "containerRuntimeVersion": "sim://1"}}
    report = look(cluster(CLASS, node("a", status=simulated), gpus("a", 2)))
    assert report.exit_code == 0, as_text(report)
    assert "simulated" in as_text(report)


def test_a_taint_is_said_once_for_a_gpu_with_all_its_partitions():
    taint = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
    parts = [{**gpu(n, taints=[taint]), "name": f"gpu-0-mig-{n}"} for n in range(20)]
    for part in parts:
        part["attributes"] = {"type": {"string": "mig"}}
    world = world_of(node_object("n1"), slice_of("n1", [gpu(0, taints=[taint]), gpu(1), *parts]))
    found = look_at_slices(world, "n1", "gpu.nvidia.com").findings
    assert [each.message for each in found if each.code == "DRA-DEVICE-TAINTED"] == [
        "gpu-0 of node n1 (with 20 partitions) is tainted gpu.nvidia.com/xid=79:NoSchedule"
    ]


def test_the_classes_of_mig_profiles_are_counted_and_not_listed():
    classes = [device_class(), *(device_class(f"mig-{n}g.10gb.nvidia.com", "mig") for n in range(30))]
    found = diagnose_cluster(world_of(node_object("n1"), gpus("n1"), *classes))
    (rung,) = [rung for rung in found.rungs if rung.name == "classes"]
    assert rung.text == "gpu.nvidia.com, 30 of MIG profiles"
