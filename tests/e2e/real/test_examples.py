"""The repository's examples on a real cluster, applied as they are: what a user sees in the API and in the container."""

from __future__ import annotations

import re

import pytest

from tests.e2e.real.cluster import Cluster
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real


def numbers(devices: set[str]) -> set[int]:
    """Give the minor numbers in the names of whole GPUs."""
    return {int(name.removeprefix("gpu-")) for name in devices}


def check_sees_its_gpus(
    on: Cluster, namespace: str, pod: str, *, count: int, container: str = "main"
) -> set[int]:
    """Check that a pod runs and its container has the nodes of exactly the GPUs that its claims were given."""
    on.wait_phase(namespace, pod)
    devices = on.allocated(namespace, pod)
    assert len(devices) == count
    seen = on.gpu_nodes(namespace, pod, container=container)
    assert seen == numbers(devices)
    return seen


def test_each_pod_of_a_template_gets_a_gpu_of_its_own(on_each):
    on_each.apply_example("gpu-per-pod")
    first = check_sees_its_gpus(on_each, "gpu-per-pod", "first", count=1)
    second = check_sees_its_gpus(on_each, "gpu-per-pod", "second", count=1)
    assert not first & second
    assert len(on_each.drivers.records()) == len(on_each.drivers.cdi_files()) == 2


def test_two_containers_of_a_pod_see_the_same_gpu(on_each):
    on_each.apply_example("gpu-shared-by-containers")
    left = check_sees_its_gpus(on_each, "shared-by-containers", "pair", count=1, container="left")
    right = check_sees_its_gpus(on_each, "shared-by-containers", "pair", count=1, container="right")
    assert left == right
    assert len(on_each.drivers.records()) == 1


def test_two_pods_with_the_same_claim_see_the_same_gpu(on_each):
    on_each.apply_example("gpu-shared-by-pods")
    writer = check_sees_its_gpus(on_each, "shared-by-pods", "writer", count=1)
    reader = check_sees_its_gpus(on_each, "shared-by-pods", "reader", count=1)
    assert writer == reader
    reserved = on_each.claims_of("shared-by-pods")["common-gpu"]["status"]["reservedFor"]
    assert {holder["name"] for holder in reserved} == {"writer", "reader"}
    on_each.delete_pod("shared-by-pods", "writer")
    # The claim is still in use: the other pod keeps its device.
    assert on_each.gpu_nodes("shared-by-pods", "reader") == reader
    assert len(on_each.drivers.cdi_files()) == 1


def test_a_pod_gets_two_gpus_of_one_request(on_each):
    on_each.apply_example("two-gpus")
    assert len(check_sees_its_gpus(on_each, "two-gpus", "trainer", count=2)) == 2


def test_a_selector_chooses_by_model_memory_and_driver_version(on_each):
    on_each.apply_example("selectors")
    check_sees_its_gpus(on_each, "selectors", "chooser", count=1)
    (name,) = on_each.allocated("selectors", "chooser")
    assert "H100" in on_each.devices()[name]["attributes"]["productName"]["string"]


def test_two_gpus_of_one_numa_node(on_each):
    if any("resource.kubernetes.io/numaNode" not in d["attributes"] for d in on_each.devices().values()):
        pytest.skip("the machine's GPUs have no NUMA node")
    on_each.apply_example("topology")
    check_sees_its_gpus(on_each, "topology", "trainer", count=2)
    nodes = {
        on_each.devices()[name]["attributes"]["resource.kubernetes.io/numaNode"]["int"]
        for name in on_each.allocated("topology", "trainer")
    }
    assert len(nodes) == 1


def test_the_extended_resource_name_of_old_manifests_gives_a_gpu(on_each):
    on_each.apply_example("extended-resource")
    check_sees_its_gpus(on_each, "extended-resource", "classic", count=1)


def test_admin_access_sees_all_gpus_also_those_in_use(on_each):
    on_each.apply_example("gpu-per-pod")
    for pod in ("first", "second"):
        check_sees_its_gpus(on_each, "gpu-per-pod", pod, count=1)
    on_each.apply_example("admin-access")
    everything = len(on_each.devices())
    assert len(check_sees_its_gpus(on_each, "gpu-monitoring", "watcher", count=everything)) == everything


def test_the_container_has_the_drivers_libraries_and_programs(on_each):
    on_each.apply_example("gpu-per-pod")
    on_each.wait_phase("gpu-per-pod", "first")
    text = on_each.run_in("gpu-per-pod", "first", "ls /dev; env; cat /proc/self/mountinfo")
    for node in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        assert re.search(rf"^{node}$", text, re.MULTILINE), text
    # Tells the older container toolkit to keep its hands off.
    assert "NVIDIA_VISIBLE_DEVICES=void" in text
    mounted = {line.split()[4] for line in text.splitlines() if re.match(r"\d+ \d+ \d+:\d+ ", line)}
    assert "/usr/bin/nvidia-smi" in mounted
    for library in ("libcuda.so", "libnvidia-ml.so"):
        versions = [point for point in mounted if re.search(rf"/{library}\.\d+\.[\d.]+$", point)]
        assert versions, mounted
        # By the name that programs are linked to.
        soname = versions[0].rpartition("/")[0] + f"/{library}.1"
        found = on_each.run_in(
            "gpu-per-pod",
            "first",
            f"cat {soname} | head -c4 2>/dev/null || cat {soname} >/dev/null && echo readable",
        )
        assert "readable" in found or "ELF" in found


def test_a_container_may_open_its_own_gpu_and_no_other(on_each):
    on_each.apply_example("gpu-per-pod")
    check_sees_its_gpus(on_each, "gpu-per-pod", "first", count=1)
    (mine,) = numbers(on_each.allocated("gpu-per-pod", "first"))
    other = (mine + 1) % len(on_each.devices())
    # No driver answers: the kernel says that there is no such device, unless the cgroup forbids even to ask.
    own = on_each.run_in("gpu-per-pod", "first", f"cat /dev/nvidia{mine}", check=False)
    assert "No such device" in own
    foreign = on_each.run_in(
        "gpu-per-pod", "first", f"mknod /tmp/stolen c 195 {other} && cat /tmp/stolen", check=False
    )
    assert "Operation not permitted" in foreign


def test_nvidia_smi_of_the_driver_root_runs_in_the_container(on_each):
    if on_each.drivers.kind != "driver-root":
        pytest.skip("the simulated machine's programs do not run")
    on_each.apply_example("two-gpus")
    on_each.wait_phase("two-gpus", "trainer")
    wait_until(
        lambda: len(re.findall(r"^GPU \d+: ", on_each.log_of("two-gpus", "trainer"), re.MULTILINE)) == 2,
        seconds=60, what="nvidia-smi has listed both GPUs",
    )  # fmt: skip
