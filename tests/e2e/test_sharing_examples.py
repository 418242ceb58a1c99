"""Time-slicing and MPS end to end, by the examples: real driver and keeper processes, and what each container sees."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from dra.host.processes import start_ticks
from dra.sim.cluster import SimCluster
from dra.sim.switchboard import Switchboard
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
NODE = "node-1"
EXCLUSIVE = 3


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="dss", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), [(NODE, "l40s-x4")]) as made:
            made.wait_ready(timeout_seconds=60)
            made.apply(ROOT / "deploy/manifests/deviceclasses.yaml")
            yield made


@pytest.fixture
def example(cluster):
    """Applies an example and waits until its pods run; nothing of it is left at the end."""
    files = []

    def run(name):
        file = ROOT / f"examples/{name}.yaml"
        files.append(file)
        cluster.apply(file)

        def up():
            found = [pod for pod in cluster.pods() if pod["metadata"]["namespace"] == name]
            return found if all(pod["status"].get("phase") == "Running" for pod in found) else None

        pods = cluster.until(up, f"the pods of {name}", timeout_seconds=60, log=cluster.nodes[NODE].log)
        node = cluster.nodes[NODE]
        return {
            f"{pod['metadata']['name']}/{container}": view
            for pod in pods
            for container, view in node.kubelet.pods.get(pod["metadata"]["uid"]).views.items()
        }

    yield run
    cluster.delete(*files)
    cluster.until(lambda: not namespaces(cluster), "the namespaces to go", timeout_seconds=60)
    node = cluster.nodes[NODE]
    cluster.until(lambda: is_clean(node), "everything to be given back", timeout_seconds=60)


def namespaces(cluster):
    names = {item["metadata"]["name"] for item in cluster.items("/api/v1/namespaces")}
    return names & {"mps", "time-slicing"}


def is_clean(node):
    modes = {(gpu.compute_mode, gpu.timeslice) for gpu in node.machine.control.state.gpus}
    left = [
        *node.cdi_root.glob("*claim_*"),
        *(path for path in node.keeper.folder.iterdir() if path.is_dir()),
    ]
    return modes == {(0, 0)} and not left and not node.keeper.daemons()


def gpu_of(cluster, view):
    """The hardware that a container sees: the state of its one GPU."""
    (minor,) = view.gpus
    node = cluster.nodes[NODE]
    uuid = next(slot.uuid for slot in node.machine.profile.gpus if slot.minor == minor)
    return next(gpu for gpu in node.machine.control.state.gpus if gpu.uuid == uuid)


def events(cluster, reason):
    return [event for event in cluster.items("/api/v1/events") if event["reason"] == reason]


def test_time_slicing(cluster, example):
    seen = example("time-slicing")
    assert seen["first/main"].gpus == seen["second/main"].gpus
    gpu = gpu_of(cluster, seen["first/main"])
    assert (gpu.timeslice, gpu.compute_mode) == (3, 0)


def test_mps(cluster, example):
    seen = example("mps")
    gpu = gpu_of(cluster, seen["pair/left"])
    assert gpu.compute_mode == EXCLUSIVE
    (row,) = cluster.nodes[NODE].keeper.daemons()
    assert row.spec.active_thread_percentage == 50
    assert row.spec.pinned_memory_mib == {gpu.uuid: 10240}
    for view in seen.values():
        assert view.env["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
        assert view.mounts["/tmp/nvidia-mps"].source.endswith(f"/mps/{row.spec.id}/pipe")
        assert view.mounts["/dev/shm"].source.endswith(f"/mps/{row.spec.id}/shm")


def test_mps_while_daemon_plugin_and_keeper_are_killed(cluster, example):
    example("mps")
    node, switchboard = cluster.nodes[NODE], Switchboard(cluster)
    (before,) = node.keeper.daemons()
    switchboard.switch_on(NODE, "plugin-kill", {})
    cluster.wait_ready(timeout_seconds=60)
    switchboard.switch_on(NODE, "keeper-kill", {})
    cluster.until(lambda: node.keeper.listens, "the keeper to be back", timeout_seconds=60)
    assert node.keeper.daemons() == (before,)
    assert start_ticks(before.pid) == before.started
    switchboard.switch_on(NODE, "mps-kill", {})
    (told,) = cluster.until(
        lambda: events(cluster, "MpsDaemonRestarted"), "the Event to be there", timeout_seconds=60
    )
    assert told["involvedObject"]["kind"] == "ResourceClaim"
    assert told["involvedObject"]["namespace"] == "mps"
    (after,) = node.keeper.daemons()
    assert after.pid != before.pid and after.ready
    assert after.spec == before.spec


def test_the_keeper_is_away_when_a_pod_comes(cluster, example):
    node = cluster.nodes[NODE]
    node.keeper.stop()
    file = ROOT / "examples/mps.yaml"
    cluster.apply(file)
    told = cluster.until(
        lambda: [e for e in events(cluster, "PrepareFailed") if "DRA-MPS-KEEPER-ABSENT" in e["message"]],
        "the Event to be there",
        timeout_seconds=60,
    )
    assert "mps-keeper.yaml" in told[0]["message"]
    node.keeper.start()
    # The kubelet tries again by itself.
    example("mps")
