"""Sharing on a real cluster: time-slices, MPS, shares of a card and fractions, and that all of it is given back."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dra.sim.nvml.control import SimControl
from dra.sim.nvml.state import GpuState
from tests.e2e.real.cluster import EXAMPLES, IMAGE, RESOURCE, WAIT_FOR_EVER, Cluster
from tests.e2e.real.cluster_side import ClusterSide, claim_with
from tests.e2e.real.driver import DRIVER, SIMULATED
from tests.e2e.real.processes import Program, wait_until

pytestmark = pytest.mark.real

EXCLUSIVE_PROCESS = 3


class Keeper(Program):
    """The keeper of the node's MPS daemons, as the shipped DaemonSet runs it."""

    def __init__(self, on: Cluster) -> None:
        root = str(on.drivers.simulated_root)
        super().__init__(
            "mps-keeper",
            [
                sys.executable, "-m", "dra.cli.mps_keeper", "--simulate", "dgx-h100", "--host-root", root,
                "--nvidia-driver-root", root, "--kubelet-plugins-directory-path", str(on.node.plugins),
            ],
            log=on.directory / "keeper.log",
            environment={**os.environ, "DRA_SIM_LIFE": f"{os.getpid()} {start_ticks(os.getpid())}"},
        )  # fmt: skip
        self._table = on.node.plugins / DRIVER / "mps"

    def start(self) -> None:
        """Start it and wait until it listens."""
        super().start()
        wait_until(lambda: any(self._table.glob("*.sock")), seconds=60, what="the MPS keeper listens")

    def daemons(self) -> list[int]:
        """Give the process ids of the MPS daemons on this node."""
        return [int(path.read_text()) for path in self._table.glob("**/nvidia-cuda-mps-control.pid")]


def start_ticks(pid: int) -> str:
    """Give when a process began: its stand-ins of daemons end with it."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[19]


@pytest.fixture
def kept(on: Cluster) -> Iterator[tuple[Cluster, Keeper]]:
    """A node with the MPS keeper."""
    keeper = Keeper(on)
    keeper.start()
    yield on, keeper
    on.leave_nothing()
    wait_until(lambda: not keeper.daemons(), seconds=60, what="no MPS daemon is left")
    keeper.stop()


def gpu_of(on: Cluster, minor: int) -> GpuState:
    """Give what the hardware knows of a GPU."""
    return SimControl(on.drivers.simulated_root).state.gpus[minor]


def config(sharing: dict[str, Any]) -> dict[str, Any]:
    """Give a configuration for GPUs."""
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}


def configured_claim(on: Cluster, ns: str, name: str, sharing: dict[str, Any]) -> None:
    """Create a claim for a GPU that is shared in this way."""
    on.create(f"{RESOURCE}/namespaces/{ns}/resourceclaims", claim_with(config(sharing), name))


def two_containers() -> list[dict[str, Any]]:
    """Give two containers that use the claim `one`."""
    container = {"image": IMAGE, "command": ["bash", "-c", WAIT_FOR_EVER]}
    return [{"name": name, **container, "resources": {"claims": [{"name": "one"}]}} for name in ("a", "b")]


def environment(on: Cluster, ns: str, pod: str, container: str = "main") -> dict[str, str]:
    """Give the environment of a container's first process."""
    text = on.run_in(ns, pod, "env", container=container)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_a_time_slice_is_set_for_a_claim_and_put_back(on):
    ns = on.namespace()
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
    configured_claim(on, ns, "one", sharing)
    on.pod(ns, "user", "one", containers=two_containers())
    on.wait_phase(ns, "user")
    (minor,) = on.gpu_nodes(ns, "user", container="a")
    assert on.gpu_nodes(ns, "user", container="b") == {minor}
    assert gpu_of(on, minor).timeslice == 3
    on.delete_pod(ns, "user")
    wait_until(
        lambda: gpu_of(on, minor).timeslice == 0, seconds=60, what="the time-slice is the default again"
    )


def test_an_mps_daemon_serves_a_claims_containers_and_ends_with_it(kept):
    on, keeper = kept
    ns = on.namespace()
    limits = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}
    configured_claim(on, ns, "one", {"strategy": "MPS", "mpsConfig": limits})
    on.pod(ns, "user", "one", containers=two_containers())
    on.wait_phase(ns, "user", seconds=90)
    (minor,) = on.gpu_nodes(ns, "user", container="a")
    assert gpu_of(on, minor).compute_mode == EXCLUSIVE_PROCESS
    for container in ("a", "b"):
        pipe = environment(on, ns, "user", container)["CUDA_MPS_PIPE_DIRECTORY"]
        assert "control" in on.run_in(ns, "user", f"ls {pipe}", container=container)
    (before,) = keeper.daemons()
    # Neither the plugin nor the keeper takes the daemon with it.
    on.drivers.process.kill()
    keeper.kill()
    on.drivers.start()
    keeper.start()
    on.wait_registered()
    assert keeper.daemons() == [before]
    on.delete_pod(ns, "user")
    wait_until(lambda: not keeper.daemons(), seconds=60, what="the daemon has ended")
    wait_until(lambda: gpu_of(on, minor).compute_mode == 0, seconds=60, what="the compute mode is given back")


def test_a_killed_mps_daemon_is_started_again_where_containers_look_for_it(kept):
    on, keeper = kept
    ns = on.namespace()
    configured_claim(on, ns, "one", {"strategy": "MPS"})
    on.pod(ns, "user", "one", containers=two_containers())
    on.wait_phase(ns, "user", seconds=90)
    (before,) = keeper.daemons()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: keeper.daemons() not in ([], [before]), seconds=60, what="another daemon runs")
    pipe = environment(on, ns, "user", "b")["CUDA_MPS_PIPE_DIRECTORY"]
    assert "control" in on.run_in(ns, "user", f"ls {pipe}", container="b")


def test_mps_without_a_keeper_fails_the_pod_with_an_event_that_says_so(on):
    ns = on.namespace()
    configured_claim(on, ns, "one", {"strategy": "MPS"})
    on.pod(ns, "user", "one", containers=two_containers())
    wait_until(
        lambda: any("DRA-MPS-KEEPER" in text for text in on.messages(ns, "user")), seconds=60,
        what="an event of the pod names the keeper",
    )  # fmt: skip


def amounts(on: Cluster, ns: str) -> dict[str, list[dict[str, Any]]]:
    """Give the allocation results of a namespace's claims by device."""
    found: dict[str, list[dict[str, Any]]] = {}
    for claim in on.claims_of(ns).values():
        for result in claim["status"]["allocation"]["devices"]["results"]:
            found.setdefault(result["device"], []).append(result)
    return found


@pytest.fixture
def cut(node_cluster: Cluster) -> Iterator[Cluster]:
    """A node whose cards are cut into four shares."""
    node_cluster.use_driver(SIMULATED, "--mig-mode", "none", "--sharing", "4")
    yield node_cluster
    node_cluster.leave_nothing()


def test_four_pods_share_a_card_and_the_fifth_gets_another(cut):
    ns = cut.namespace()
    cut.template(ns, "share")
    names = [f"pod-{number}" for number in range(5)]
    for name in names:
        cut.pod(ns, name, "share", by="resourceClaimTemplateName")
    for name in names:
        cut.wait_phase(ns, name, seconds=90)
    given = amounts(cut, ns)
    assert sorted(len(results) for results in given.values()) == [1, 4]
    for results in given.values():
        assert len({result["shareID"] for result in results}) == len(results)
        assert all(result["consumedCapacity"]["shares"] == "1" for result in results)
    for name in names:
        (device,) = cut.allocated(ns, name)
        assert cut.gpu_nodes(ns, name) == {int(device.removeprefix("gpu-"))}
        told = environment(cut, ns, name)
        assert (told["GPUDRA_SHARE_PERCENT"], told["GPUDRA_SHARE_MEMORY_MIB"]) == ("25", "20389")
    # A claim that is unprepared leaves the others of its card alone.
    cut.delete_pod(ns, names[0])
    assert len(cut.gpu_nodes(ns, names[1])) == 1


def test_shares_of_a_real_size_are_added_up(cut):
    ns = cut.namespace()
    for name, shares in (("large", "3"), ("medium", "2"), ("small", "1")):
        cut.template(ns, name, capacity={"requests": {"shares": shares}})
        cut.pod(ns, name, name, by="resourceClaimTemplateName")
        cut.wait_phase(ns, name, seconds=90)
    for results in amounts(cut, ns).values():
        assert sum(int(result["consumedCapacity"]["shares"]) for result in results) <= 4
    assert len(amounts(cut, ns)) == 2


def test_an_amount_of_memory_is_a_share_of_a_card(node_cluster):
    on = node_cluster
    on.use_driver(SIMULATED, "--mig-mode", "none", "--sharing", "memory")
    ns = on.namespace()
    on.template(ns, "part", capacity={"requests": {"memory": "30Gi"}})
    for name in ("one", "two", "three"):
        on.pod(ns, name, "part", by="resourceClaimTemplateName")
    for name in ("one", "two", "three"):
        on.wait_phase(ns, name, seconds=90)
        assert environment(on, ns, name)["GPUDRA_SHARE_MEMORY_MIB"] == str(30 * 1024)
    assert sorted(len(results) for results in amounts(on, ns).values()) == [1, 2]
    on.leave_nothing()


def test_a_deployment_that_asks_for_a_fifth_of_a_gpu_gets_its_pods(node_cluster):
    on = node_cluster
    on.use_driver(SIMULATED, "--mig-mode", "none", "--sharing", "100")
    side = ClusterSide(on)
    try:
        side.start()
        on.kubectl("apply", "-f", str(EXAMPLES / "fractional.yaml"))
        path = "/api/v1/namespaces/fractional/pods"
        pods = wait_until(
            lambda: (found := on.get(path)["items"]) and len(found) == 2 and found, seconds=60,
            what="the Deployment has its pods",
        )  # fmt: skip
        for pod in pods:
            name = pod["metadata"]["name"]
            on.wait_phase("fractional", name, seconds=90)
            assert environment(on, "fractional", name)["GPUDRA_SHARE_PERCENT"] == "20"
            assert re.match(r"gpudra-", pod["spec"]["resourceClaims"][0]["name"])
        ((_, results),) = amounts(on, "fractional").items()
        assert [result["consumedCapacity"]["shares"] for result in results] == ["20", "20"]
    finally:
        on.kubectl("delete", "-f", str(EXAMPLES / "fractional.yaml"), "--wait=false", check=False)
        side.stop()
        on.leave_nothing()
