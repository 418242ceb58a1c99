"""MIG end to end, by the examples: real driver process, partitions on demand and by hand, what each container sees."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from dra.inventory.names import MigName, parse_device_name
from dra.sim.cluster import SimCluster
from dra.sim.tree.proc import compute_instance_minor, gpu_instance_minor
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
NODE = "node-1"


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="dsm", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), [(NODE, "dgx-h100")]) as made:
            made.wait_ready(timeout_seconds=60)
            for name in ("deviceclasses", "deviceclasses-mig"):
                made.apply(ROOT / f"deploy/manifests/{name}.yaml")
            yield made


@pytest.fixture
def example(cluster):
    """Applies an example, waits until its pods run, and takes it away at the end; gives what they have and see."""
    files = []

    def run(name):
        file = ROOT / f"examples/{name}.yaml"
        files.append(file)
        pods = {p["metadata"]["uid"] for p in cluster.apply(file) if p["kind"] == "Pod"}
        return running(cluster, pods)

    yield run
    cluster.delete(*files)
    cluster.until(lambda: not cluster.claims(), "the claims to go", timeout_seconds=60)
    node = cluster.nodes[NODE]
    cluster.until(lambda: not list(node.cdi_root.glob("*claim_*")), "the CDI files to go", timeout_seconds=60)
    cluster.until(lambda: not ours(node), "our partitions to go", timeout_seconds=60)


def ours(node):
    """The partitions that the driver made and the GPUs whose mode it switched, by its marks."""
    return list((node.state_dir / "mig").glob("*.json"))


def running(cluster, uids):
    """Give {pod/container: (devices of its claims' results, view)} once all pods run."""

    def up():
        found = [pod for pod in cluster.pods() if pod["metadata"]["uid"] in uids]
        return found if all(pod["status"].get("phase") == "Running" for pod in found) else None

    node = cluster.nodes[NODE]
    seen = {}
    for pod in cluster.until(up, "the pods to run", timeout_seconds=60, log=node.log):
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        results = {
            result["request"]: result["device"]
            for claim in cluster.claims()
            if any(user["uid"] == uid for user in claim["status"].get("reservedFor") or ())
            for result in claim["status"]["allocation"]["devices"]["results"]
        }
        for container, view in node.kubelet.pods.get(uid).views.items():
            seen[f"{name}/{container}"] = (results, view)
    return seen


def instances_seen(node, view):
    """Give the names of the partitions that a container can open, by capability nodes of instances that exist."""
    found = set()
    caps = {
        path.rpartition("nvidia-cap")[2] for path in view.device_nodes if "nvidia-caps/nvidia-cap" in path
    }
    table = {19: "1g10gb", 14: "2g20gb", 9: "3g40gb", 5: "4g40gb", 15: "1g20gb"}
    for slot, gpu in zip(node.machine.profile.gpus, node.machine.control.state.gpus, strict=True):
        for instance in gpu.instances:
            pair = {
                str(gpu_instance_minor(slot.minor, instance.gi)),
                str(compute_instance_minor(slot.minor, instance.gi, instance.computes[0].ci)),
            }
            if pair <= caps:
                found.add(
                    str(MigName(slot.minor, table[instance.profile_id], instance.profile_id, instance.start))
                )
                caps -= pair
    assert not caps, "it can open what is no partition"
    return found


def test_a_partition_for_each_pod_is_made_at_its_place_and_seen_by_its_container_alone(cluster, example):
    seen = example("mig")
    node = cluster.nodes[NODE]
    own = {pod: instances_seen(node, view) for pod, (_, view) in seen.items()}
    assert own == {pod: set(results.values()) for pod, (results, _) in seen.items()}
    assert [len(each) for each in own.values()] == [1, 1, 1]
    assert len(set.union(*own.values())) == 3
    profiles = {pod: parse_device_name(*each).profile for pod, each in own.items()}
    assert profiles == {"first/main": "1g10gb", "second/main": "1g10gb", "larger/main": "2g20gb"}


def test_partitions_of_several_sizes_for_the_containers_of_a_pod_are_parts_of_one_gpu(cluster, example):
    seen = example("mig-layout")
    node = cluster.nodes[NODE]
    results, _ = seen["team/trainer"]
    own = {pod: instances_seen(node, view) for pod, (_, view) in seen.items()}
    assert {pod: sorted(parse_device_name(d).profile for d in each) for pod, each in own.items()} == {
        "team/trainer": ["3g40gb"],
        "team/server": ["2g20gb"],
        "team/helpers": ["1g10gb", "1g10gb"],
    }
    everything = set.union(*own.values())
    assert everything == set(results.values()) or len(everything) == 4
    assert len({parse_device_name(device).minor for device in everything}) == 1


def test_whole_gpus_and_partitions_go_side_by_side_on_one_node(cluster, example):
    seen = example("mig-beside-whole-gpus")
    node = cluster.nodes[NODE]
    (whole,) = seen["trainer/main"][1].gpus
    assert instances_seen(node, seen["trainer/main"][1]) == set()
    (part,) = instances_seen(node, seen["notebook/main"][1])
    assert parse_device_name(part).minor != whole
    assert seen["notebook/main"][0] == {"accelerator/part": part}


def test_a_pod_gets_a_partition_through_the_extended_resource(cluster, example):
    seen = example("mig-extended-resource")
    (results, view) = seen["classic/main"]
    (part,) = instances_seen(cluster.nodes[NODE], view)
    assert parse_device_name(part).profile == "1g10gb"
    assert results == {"container-0-request-0": part}
    (claim,) = cluster.claims()
    assert claim["metadata"]["annotations"]["resource.kubernetes.io/extended-resource-claim"] == "true"


def test_all_examples_at_once_beside_a_monitor_that_sees_every_gpu(cluster, example):
    seen = {}
    # The monitor comes while whole GPUs are in use, and stays while others are cut.
    names = ("gpu-per-pod", "admin-access", "mig-layout", "mig-beside-whole-gpus", "mig-extended-resource")
    for name in names:
        seen |= example(name)
    node = cluster.nodes[NODE]
    assert sorted(seen["watcher/main"][1].gpus) == list(range(8))
    taken = [
        device
        for pod, (_, view) in seen.items()
        if pod != "watcher/main"
        for device in instances_seen(node, view) or {f"gpu-{minor}" for minor in view.gpus}
    ]
    assert len(taken) == len(set(taken)) == 2 + 4 + 2 + 1
    wholes = {device for device in taken if "mig" not in device}
    assert not {f"gpu-{parse_device_name(d).minor}" for d in taken if "mig" in d} & wholes


def test_where_an_administrator_has_cut_a_gpu_the_same_manifests_use_what_is_there(cluster, example):
    node = cluster.nodes[NODE]
    layout = [("3g.40gb", 4), ("2g.20gb", 0), ("1g.10gb", 2), ("1g.10gb", 3)]
    try:
        for gpu in range(8):
            node.machine.control.set_mig_layout(gpu, layout)
        cluster.until(lambda: len(published(cluster)) == 8 * 4, "the layout is published", timeout_seconds=90)
        assert all("uuid" in device["attributes"] for device in published(cluster).values())
        before = instances(node)
        seen = example("mig-layout") | example("mig")
        results, _ = seen["team/trainer"]
        assert results.keys() == {"trainer", "server", "helpers"}
        assert ours(node) == []
        assert {d for _, view in seen.values() for d in instances_seen(node, view)} <= set(published(cluster))
        assert instances(node) == before
    finally:
        cluster.delete(*(ROOT / f"examples/{name}.yaml" for name in ("mig-layout", "mig")))
        cluster.until(lambda: not cluster.claims(), "the claims to go", timeout_seconds=60)
        for gpu in range(8):
            node.machine.control.set_mig_mode(gpu, enabled=False)
        cluster.until(lambda: len(published(cluster)) == 8 * 26, "all is offered again", timeout_seconds=90)


def published(cluster):
    return {d["name"]: d for item in cluster.slices() for d in item["spec"].get("devices") or ()}


def instances(node):
    return [[(i.profile_id, i.start) for i in gpu.instances] for gpu in node.machine.control.state.gpus]
