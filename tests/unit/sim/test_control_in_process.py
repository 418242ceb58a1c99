"""In-process nodes: the same pool, records and CDI files as a driver process gives, without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dra.sim.in_process import InProcessNodes
from dra.sim.kubelet import Timings
from tests.unit.sim.control_cluster import DRA, PODS, ControlCluster, devices_of

DRIVER = "gpu.nvidia.com"


class Fleet(ControlCluster):
    """A control plane and in-process nodes, all running."""

    def __init__(self, root: Path, *, version: str = "1.36", **options) -> None:
        super().__init__(version=version)
        self.root = root
        self.fleet = InProcessNodes(
            self.server, root, driver=DRIVER, version=version,
            timings=Timings(prepare_retry=0.2, unprepare_retry=0.2), **options,
        )  # fmt: skip
        self.fleet.start()
        self.server.collector.start()
        self.control.start()

    def add(self, name: str, profile: str = "l40s-x4"):
        self.node(name)
        return self.fleet.add(name, profile)

    def close(self) -> None:
        self.control.stop()
        self.fleet.stop()
        self.server.collector.stop()

    def until(self, condition, what, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited for {what}"
            time.sleep(0.01)

    def phases(self) -> list[str]:
        return [pod["status"].get("phase", "") for pod in self.list("pods")]


@pytest.fixture
def fleet(tmp_path):
    made = Fleet(tmp_path)
    made.gpu_class()
    made.template()
    yield made
    made.close()


def test_the_pool_has_the_nodes_own_gpus_and_the_machines_facts(fleet):
    first, second = fleet.add("one"), fleet.add("two")
    slices = {
        item["spec"]["nodeName"]: item["spec"] for item in fleet.call("GET", f"{DRA}/resourceslices")["items"]
    }
    assert [device["name"] for device in slices["one"]["devices"]] == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
    uuids = [
        {device["attributes"]["uuid"]["string"] for device in slices[name]["devices"]}
        for name in ("one", "two")
    ]
    assert not uuids[0] & uuids[1]
    assert first.inventory.gpus[0].pci_address == second.inventory.gpus[0].pci_address
    assert slices["one"]["pool"] == {"name": "one", "generation": 1, "resourceSliceCount": 1}


def test_a_pod_is_prepared_runs_with_its_gpu_and_leaves_nothing_when_it_is_deleted(fleet):
    node = fleet.add("one")
    fleet.pod("user", template="one-gpu")
    fleet.until(lambda: fleet.phases() == ["Running"], "the pod to run")
    claim = fleet.claim_of("user")
    pod = fleet.get_pod("user")
    view = node.pods.get(pod["metadata"]["uid"]).views["main"]
    assert devices_of(claim) == [("one", f"gpu-{view.gpus[0]}")]
    assert view.libraries["libcuda.so.1"].is_file()
    assert [path.stem for path in (node.state_dir / "claims").glob("*.json")] == [claim["metadata"]["uid"]]
    assert len(list(node.cdi_root.iterdir())) == 1
    fleet.call("DELETE", f"{PODS}/user")
    fleet.until(lambda: not fleet.list("pods") and not fleet.list("resourceclaims"), "pod and claim to go")
    assert list(node.cdi_root.iterdir()) == list((node.state_dir / "claims").glob("*.json")) == []


def test_a_pod_that_ends_by_itself_succeeds_and_frees_its_gpu(fleet):
    fleet.add("one", "t4-x1")
    done = {
        "name": "main",
        "image": "i",
        "command": ["nvidia-smi", "-L"],
        "resources": {"claims": [{"name": "gpu"}]},
    }
    for name in ("a", "b", "c"):
        fleet.pod(name, template="one-gpu", containers=[done], restartPolicy="Never")
    fleet.until(lambda: fleet.phases() == ["Succeeded"] * 3, "three pods to use one GPU in turn")


def test_a_deleted_pod_gets_a_final_phase_before_it_goes(fleet):
    """Claims and foreground deletions wait for it."""
    fleet.add("one")
    seen = []
    fleet.server.storage.subscribe(
        lambda resource, change: (
            seen.append((change.after or {}).get("status", {}).get("phase")) if resource == "/pods" else None
        )
    )
    trapped = {"name": "main", "image": "i", "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 9"]}
    fleet.pod("polite", containers=[trapped])
    fleet.pod("blunt")
    fleet.until(lambda: fleet.phases() == ["Running"] * 2, "the pods to run")
    for name, phase in (("polite", "Succeeded"), ("blunt", "Failed")):
        del seen[:]
        fleet.call("DELETE", f"{PODS}/{name}")
        fleet.until(lambda: None in seen, "the pod to go")
        assert seen == ["Running", phase, None]


def test_a_claim_that_the_driver_refuses_is_told_in_the_pods_event_and_tried_again(fleet):
    node = fleet.add("one")
    whole, node.inventory = node.inventory, type(node.inventory)()
    fleet.pod("user", template="one-gpu")
    fleet.until(lambda: dict(fleet.events("user")).get("FailedPrepareDynamicResources"), "the event")
    assert "DRA-" in dict(fleet.events("user"))["FailedPrepareDynamicResources"]
    node.inventory = whole
    fleet.until(lambda: fleet.phases() == ["Running"], "the retry to work")


def test_the_claims_of_a_pod_that_was_deleted_by_force_are_unprepared(fleet):
    node = fleet.add("one")
    fleet.pod("user", template="one-gpu")
    fleet.until(lambda: fleet.phases() == ["Running"], "the pod to run")
    fleet.call("DELETE", f"{PODS}/user", {"gracePeriodSeconds": 0})
    fleet.until(lambda: not list(node.cdi_root.iterdir()), "the CDI file to go")
    assert node.pods.all() == []


def test_a_deleted_slice_comes_back(fleet):
    fleet.add("one")
    name = fleet.call("GET", f"{DRA}/resourceslices")["items"][0]["metadata"]["name"]
    fleet.call("DELETE", f"{DRA}/resourceslices/{name}")
    fleet.until(lambda: fleet.call("GET", f"{DRA}/resourceslices")["items"], "the slice to come back")


def test_200_nodes_with_1600_gpus_are_there_within_seconds_without_a_thread_each(tmp_path):
    import threading

    made = Fleet(tmp_path, mig_mode="static")
    try:
        made.gpu_class()
        made.template()
        threads, started = threading.active_count(), time.monotonic()
        for number in range(200):
            made.add(f"node-{number:03}", "dgx-h100")
        assert time.monotonic() - started < 60
        slices = made.call("GET", f"{DRA}/resourceslices")["items"]
        assert sum(len(item["spec"]["devices"]) for item in slices) == 1600
        for number in range(20):
            made.pod(f"pod-{number}", template="one-gpu")
        made.until(lambda: made.phases() == ["Running"] * 20, "20 pods to run")
        assert threading.active_count() - threads < 40
    finally:
        made.close()


def test_a_pod_gets_a_partition_that_is_made_for_it_and_gone_after_it(fleet):
    node = fleet.add("one", "dgx-h100")
    for kind in ("gpu", "mig"):
        typed = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
        fleet.gpu_class(f"{kind}.test", selectors=[{"cel": {"expression": typed}}])
        fleet.template(kind, deviceClassName=f"{kind}.test")
    for name in ("a", "b"):
        fleet.pod(name, template="mig")
    fleet.until(lambda: fleet.phases() == ["Running"] * 2, "the pods to run")
    given = {device for name in ("a", "b") for device in devices_of(fleet.claim_of(name))}
    assert given == {("one", "gpu-0-mig-1g10gb-19-5"), ("one", "gpu-0-mig-1g10gb-19-6")}
    views = [node.pods.get(fleet.get_pod(name)["metadata"]["uid"]).views["main"] for name in ("a", "b")]
    caps = [{path for path in view.device_nodes if "nvidia-cap" in path} for view in views]
    assert [len(each) for each in caps] == [2, 2]
    assert not caps[0] & caps[1]
    for name in ("a", "b"):
        fleet.call("DELETE", f"{PODS}/{name}")
    fleet.until(lambda: not fleet.list("resourceclaims"), "the claims to go")
    fleet.until(lambda: not list(node.cdi_root.iterdir()), "the CDI files to go")
    fleet.pod("user", template="gpu")
    fleet.until(lambda: fleet.phases() == ["Running"], "the pod with the whole GPU to run")
    assert devices_of(fleet.claim_of("user")) == [("one", "gpu-0")]


def test_an_older_server_gets_an_older_pool(tmp_path):
    made = Fleet(tmp_path, version="1.33")
    try:
        made.add("one", "t4-x1")
        items = made.call("GET", "/apis/resource.k8s.io/v1beta1/resourceslices")["items"]
        assert [device["name"] for device in items[0]["spec"]["devices"]] == ["gpu-0"]
    finally:
        made.close()
