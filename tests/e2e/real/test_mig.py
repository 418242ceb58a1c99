"""MIG on a real cluster: partitions that are made for claims, and those that an administrator made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from dra.sim.nvml.control import SimControl
from tests.e2e.real.cluster import IMAGE, RESOURCE, WAIT_FOR_EVER, Cluster, devices_of
from tests.e2e.real.driver import DRIVER, SIMULATED
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real

MIG_CLASS = "mig.nvidia.com"
NAME = re.compile(r"gpu-(\d+)-mig-(\w+)-\d+-\d+")


@pytest.fixture
def made(node_cluster: Cluster) -> Iterator[Cluster]:
    """A node on which partitions are made on demand; afterwards the hardware has none."""
    node_cluster.use_driver(SIMULATED, "--mig-mode", "dynamic")
    yield node_cluster
    node_cluster.leave_nothing()
    wait_until(lambda: not capabilities(node_cluster), seconds=60, what="no partition is left")


@pytest.fixture
def by_hand(node_cluster: Cluster) -> Iterator[Cluster]:
    """A node whose GPUs 0 and 1 an administrator has partitioned."""
    node_cluster.use_driver(SIMULATED, "--mig-mode", "static")
    control = hardware(node_cluster)
    for gpu in (0, 1):
        control.set_mig_layout(gpu, [("1g.10gb", 0), ("1g.10gb", 1), ("2g.20gb", 2), ("3g.40gb", 4)])
    wait_until(
        lambda: len(node_cluster.devices("mig")) == 8 and len(node_cluster.devices()) == 6, seconds=90,
        what="the partitions made by hand are published",
    )  # fmt: skip
    yield node_cluster
    node_cluster.leave_nothing()
    for gpu in (0, 1):
        control.set_mig_layout(gpu, [])
        control.set_mig_mode(gpu, enabled=False)
    wait_until(
        lambda: len(node_cluster.devices()) == 8, seconds=90, what="the whole GPUs are published again"
    )


def hardware(on: Cluster) -> SimControl:
    """Give the administrator's hand on the simulated machine."""
    return SimControl(on.drivers.simulated_root)


def of_profile(profile: str) -> list[dict[str, Any]]:
    """Give the selector that manifests for MIG have."""
    return [{"cel": {"expression": f"device.attributes['{DRIVER}'].profile == '{profile}'"}}]


def minor_of(text: str) -> int:
    """Read the minor number in an access file."""
    found = re.search(r"DeviceFileMinor: (\d+)", text)
    assert found is not None, text
    return int(found[1])


def capabilities(on: Cluster, gpu: int | str = "*") -> set[int]:
    """Give the minors of the capability nodes of all instances that the hardware has at this moment."""
    proc = on.drivers.simulated_root / "proc/driver/nvidia/capabilities"
    return {minor_of(path.read_text()) for path in proc.glob(f"gpu{gpu}/mig/gi*/**/access")}


def seen(on: Cluster, ns: str, pod: str, container: str = "main") -> set[int]:
    """Give the minors of the capability nodes in a container."""
    listed = on.run_in(ns, pod, "ls /dev/nvidia-caps", container=container)
    return {int(number) for number in re.findall(r"nvidia-cap(\d+)", listed)}


def parent(device: str) -> int:
    """Give the minor number of the GPU in a partition's name."""
    found = NAME.fullmatch(device)
    assert found is not None, device
    return int(found[1])


def modes(on: Cluster) -> list[int]:
    """Give the MIG modes of the hardware."""
    return [gpu.mig_current for gpu in hardware(on).state.gpus]


def mig_pod(on: Cluster, ns: str, name: str, profile: str = "1g.10gb") -> str:
    """Run a pod with a partition from a template; gives the partition's name."""
    on.template(ns, f"for-{name}", deviceClassName=MIG_CLASS, selectors=of_profile(profile))
    on.pod(ns, name, f"for-{name}", by="resourceClaimTemplateName")
    on.wait_phase(ns, name)
    (device,) = on.allocated(ns, name)
    return device


def test_a_partition_is_made_for_a_pod_and_goes_with_it(made):
    ns = made.namespace()
    device = mig_pod(made, ns, "small")
    gpu = parent(device)
    assert made.gpu_nodes(ns, "small") == {gpu}
    nodes = seen(made, ns, "small")
    assert len(nodes) == 2
    assert nodes == capabilities(made)
    assert modes(made)[gpu] == 1
    made.delete_pod(ns, "small")
    wait_until(lambda: not capabilities(made) and not any(modes(made)), seconds=60, what="MIG is off again")


def test_partitions_of_one_gpu_go_to_pods_that_do_not_see_each_others(made):
    ns = made.namespace()
    first, second = mig_pod(made, ns, "first"), mig_pod(made, ns, "second", "2g.20gb")
    assert parent(first) == parent(second)
    one, other = seen(made, ns, "first"), seen(made, ns, "second")
    assert (len(one), len(other)) == (2, 2)
    assert one | other == capabilities(made)
    made.delete_pod(ns, "first")
    wait_until(lambda: capabilities(made) == other, seconds=60, what="only the other one's partition is left")
    assert seen(made, ns, "second") == other


def test_a_gpu_with_a_partition_is_not_given_out_as_a_whole(made):
    ns = made.namespace()
    gpu = parent(mig_pod(made, ns, "small"))
    made.claim(ns, "all", count=8)
    made.pod(ns, "greedy", "all")
    made.claim(ns, "others", count=7)
    made.pod(ns, "large", "others")
    made.wait_phase(ns, "large")
    assert made.gpu_nodes(ns, "large") == set(range(8)) - {gpu}
    made.wait_phase(ns, "greedy", "Pending")
    for pod in ("small", "large"):
        made.delete_pod(ns, pod)
    for claim in ("others",):
        made.kubectl("delete", "resourceclaim", "-n", ns, claim)
    made.wait_phase(ns, "greedy", seconds=60)
    assert made.gpu_nodes(ns, "greedy") == set(range(8))


def four_partitions(on: Cluster, ns: str) -> None:
    """Create a template for one GPU in four parts, each for another container (as NVIDIA's gpu-test4 does)."""
    profiles = {"a": "1g.10gb", "b": "1g.10gb", "c": "2g.20gb", "d": "3g.40gb"}
    requests = [
        {"name": name, "exactly": {"deviceClassName": MIG_CLASS, "selectors": of_profile(profile)}}
        for name, profile in profiles.items()
    ]
    constraint = {"requests": [], "matchAttribute": f"{DRIVER}/parentUUID"}
    devices = {"requests": requests, "constraints": [constraint]}
    on.create(
        f"{RESOURCE}/namespaces/{ns}/resourceclaimtemplates",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": "parts"},
            "spec": {"spec": {"devices": devices}},
        },
    )


def pod_in_four(on: Cluster, ns: str, name: str) -> None:
    """Create a pod with a container for each part."""
    container = {"image": IMAGE, "command": ["bash", "-c", WAIT_FOR_EVER]}
    on.pod(
        ns, name, "parts", by="resourceClaimTemplateName",
        containers=[
            {"name": part, **container, "resources": {"claims": [{"name": "parts", "request": part}]}}
            for part in "abcd"
        ],
    )  # fmt: skip


def test_one_claim_parts_a_gpu_and_each_container_sees_its_part(made):
    ns = made.namespace()
    four_partitions(made, ns)
    pod_in_four(made, ns, "first")
    pod_in_four(made, ns, "second")
    gpus = set()
    for pod in ("first", "second"):
        made.wait_phase(ns, pod)
        devices = made.allocated(ns, pod)
        assert len(devices) == 4
        (gpu,) = {parent(device) for device in devices}
        parts = [seen(made, ns, pod, container) for container in "abcd"]
        assert [len(part) for part in parts] == [2] * 4
        assert set.union(*parts) == capabilities(made, gpu)
        assert len(set.union(*parts)) == 8
        gpus.add(gpu)
    assert len(gpus) == 2


def test_the_old_resource_name_of_a_mig_profile_makes_a_partition(made):
    expression = (
        f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'mig' && "
        f"device.attributes['{DRIVER}'].profile == '1g.20gb'"
    )
    made.create(
        f"{RESOURCE}/deviceclasses",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "mig-1g-20gb"},
            "spec": {
                "selectors": [{"cel": {"expression": expression}}],
                "extendedResourceName": "nvidia.com/mig-1g.20gb",
            },
        },
    )
    ns = made.namespace()
    try:
        container = {
            "name": "main",
            "image": IMAGE,
            "command": ["bash", "-c", WAIT_FOR_EVER],
            "resources": {"limits": {"nvidia.com/mig-1g.20gb": 1}},
        }
        made.pod(ns, "classic", containers=[container])
        made.wait_phase(ns, "classic")
        (device,) = made.allocated(ns, "classic")
        assert NAME.fullmatch(device)[2] == "1g20gb"
        assert seen(made, ns, "classic") == capabilities(made, parent(device))
    finally:
        made.control_plane.call("DELETE", f"{RESOURCE}/deviceclasses/mig-1g-20gb")


def test_a_driver_killed_with_partitions_in_use_leaves_none_behind(made):
    ns = made.namespace()
    stays, goes = mig_pod(made, ns, "stays"), mig_pod(made, ns, "goes")
    kept = seen(made, ns, "stays")
    made.drivers.process.kill()
    made.control_plane.call("DELETE", f"/api/v1/namespaces/{ns}/pods/goes?gracePeriodSeconds=1")
    made.drivers.start()
    made.wait_registered()
    made.wait_gone(ns, "goes")
    wait_until(lambda: capabilities(made) == kept, seconds=60, what="the deleted pod's partition is gone")
    assert seen(made, ns, "stays") == kept
    assert stays != goes


def test_a_kubelet_restart_costs_no_partition(made):
    ns = made.namespace()
    mig_pod(made, ns, "user")
    before = seen(made, ns, "user")
    made.node.kubelet.stop()
    made.node.start_kubelet()
    made.wait_published()
    assert capabilities(made) == before
    # It serves its old pods again when it has started a new one.
    mig_pod(made, ns, "next")
    assert seen(made, ns, "user") == before
    assert len(capabilities(made)) == 4


def test_partitions_made_by_hand_are_given_out_and_stay(by_hand):
    ns = by_hand.namespace()
    there = capabilities(by_hand)
    four_partitions(by_hand, ns)
    pod_in_four(by_hand, ns, "user")
    by_hand.wait_phase(ns, "user")
    devices = by_hand.allocated(ns, "user")
    (gpu,) = {parent(device) for device in devices}
    parts = [seen(by_hand, ns, "user", container) for container in "abcd"]
    assert set.union(*parts) == capabilities(by_hand, gpu)
    on_the_other = mig_pod(by_hand, ns, "next", "2g.20gb")
    assert parent(on_the_other) == 1 - gpu
    # The GPUs that are not partitioned are whole ones.
    by_hand.claim(ns, "whole", allocationMode="All")
    by_hand.pod(ns, "whole", "whole")
    by_hand.wait_phase(ns, "whole")
    assert devices_of(by_hand.claims_of(ns)["whole"]) == {f"gpu-{number}" for number in range(2, 8)}
    for pod in ("user", "next", "whole"):
        by_hand.delete_pod(ns, pod)
    wait_until(lambda: not by_hand.drivers.leftovers(), seconds=60, what="the claims are unprepared")
    assert capabilities(by_hand) == there
