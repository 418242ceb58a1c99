"""Health with partitions on demand and with shares; a scrape while a GPU hangs."""

from __future__ import annotations

import time
import urllib.request
import uuid

import pytest

from tests.process.conftest import call
from tests.process.harness import DRIVER, Node, wait_until
from tests.process.health_node import (
    LOST,
    XID,
    device_status,
    ill,
    reasons,
    started,
    taints,
    threads,
    wait_well,
)

PARTITION, OTHER = "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1"


@pytest.fixture(scope="module")
def dynamic():
    node = Node()
    daemon, kubelet = started(
        node, "--mig-mode=dynamic", "--http-endpoint=127.0.0.1:0", "--inventory-interval=1"
    )
    yield node, daemon, kubelet
    assert daemon.terminate(within_seconds=15) == 0
    node.close()


def test_an_xid_of_a_partition_that_was_made_for_a_claim_concerns_it_alone(dynamic):
    node, _, kubelet = dynamic
    wait_well(node)
    connection = kubelet.connection(DRIVER)
    one, two = node.claim("one", PARTITION, pods=("p1",)), node.claim("two", OTHER, pods=("p2",))
    for entry in call(connection.prepare, [one, two]):
        assert entry.devices, entry.error
    (instance, _) = next(gpu for gpu in node.machine.control.state.gpus if gpu.instances).instances
    gis = {instance.gi: instance for gpu in node.machine.control.state.gpus for instance in gpu.instances}
    first = min(gis.values(), key=lambda each: each.start)
    # The GPU's own name is not touched, nor is any other placement.
    wait_until(
        lambda: device_status(node, "one").get("Healthy") == ("True", "Healthy"), what="the claim is well"
    )
    node.machine.control.push_xid(0, 95, gi=first.gi, ci=0)
    wait_until(lambda: taints(node).get(PARTITION) == {XID: ("95", "NoSchedule")}, what="the partition")
    assert set(taints(node)) == {PARTITION}
    wait_until(lambda: list(ill(node, kubelet)) == [PARTITION], what="the kubelet is told")
    wait_until(lambda: reasons(node, "p1")["DeviceUnhealthy"], what="its pod is told")
    assert not reasons(node, "p2")["DeviceUnhealthy"]
    wait_until(
        lambda: device_status(node, "one").get("Healthy") == ("False", "Xid95"), what="the claim says so"
    )
    assert device_status(node, "two").get("Healthy") == ("True", "Healthy")
    # The partition goes, and with it what was held against it.
    assert [entry.error for entry in call(connection.unprepare, [one, two])] == ["", ""]
    node.machine.control.set_gpu(0, recovery_action=0)
    wait_well(node)


@pytest.mark.fault("F32")
def test_an_xid_of_a_gpu_concerns_all_that_could_be_cut_from_it_in_one_generation(dynamic):
    node, _, kubelet = dynamic
    wait_well(node)
    generations = {obj["spec"]["pool"]["generation"] for obj in node.slices()}
    node.machine.control.push_xid(3, 119)
    wait_until(lambda: "gpu-3" in taints(node), what="the GPU")
    wait_until(
        lambda: len(taints(node)) == len([d for d in kubelet_devices(node) if is_of(d, 3)]), what="all of it"
    )
    assert all(is_of(device, 3) for device in taints(node))
    assert {obj["spec"]["pool"]["generation"] for obj in node.slices()} == generations
    node.machine.control.recover_gpu(3)
    wait_well(node)


def kubelet_devices(node):
    return [device["name"] for obj in node.slices() for device in obj["spec"].get("devices") or ()]


def is_of(device, minor):
    return device == f"gpu-{minor}" or device.startswith(f"gpu-{minor}-")


def test_pods_with_shares_of_an_ill_gpu_all_see_it(dynamic):
    node, _, kubelet = dynamic
    wait_well(node)
    shares = [
        node.claim(f"share-{n}", "gpu-5", share=str(uuid.UUID(int=n + 1 << 96)), pods=(f"s{n}",))
        for n in range(2)
    ]
    pods = [node.pod(f"s{n}", claim) for n, claim in enumerate(shares)]
    for pod in pods:
        kubelet.pods.run(pod)
    node.machine.control.push_xid(5, 119)
    wait_until(lambda: "XID 119" in ill(node, kubelet).get("gpu-5", ""), what="the kubelet is told")
    for n in range(2):
        wait_until(lambda n=n: reasons(node, f"s{n}")["DeviceUnhealthy"], what="each pod is told")
        wait_until(
            lambda n=n: device_status(node, f"share-{n}").get("Healthy") == ("False", "Xid119"),
            what="each claim says so",
        )
    call(kubelet.connection(DRIVER).unprepare, shares)
    node.machine.control.recover_gpu(5)
    wait_well(node)


@pytest.mark.fault("F46", "F30")
def test_a_scrape_while_a_gpu_hangs_answers_and_piles_up_no_threads(dynamic):
    node, daemon, _ = dynamic
    wait_well(node)
    (bound,) = daemon.logged("http_endpoint_bound")
    url = f"http://127.0.0.1:{bound['port']}/metrics"

    def scrape():
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read().decode()

    scrape()
    node.machine.control.set_fault("nvmlDevice*", gpu=6, hang=True)
    wait_until(lambda: taints(node).get("gpu-6", {}).get(LOST) == ("hung", "NoSchedule"), what="it is known")
    before, began = threads(daemon.process.pid), time.monotonic()
    for _ in range(20):
        assert "dra_gpu_healthy" in scrape()
    assert time.monotonic() - began < 60  # a second each is promised, and a few milliseconds are usual
    assert threads(daemon.process.pid) < before + 15
    held = [
        line for line in scrape().splitlines() if line.startswith("dra_gpu_condition{") and "gpu-lost" in line
    ]
    assert held
    assert all('"gpu-6' in line for line in held)
    node.machine.control.clear()
    wait_well(node)
