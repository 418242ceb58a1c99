"""What breaks on real nodes: kubelet, driver, API server and files, with pods on the node."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real


def one_pod(on, name: str = "user", **more) -> str:
    """Have a pod with one GPU running in a new namespace, and give that."""
    ns = on.namespace()
    on.claim(ns, "one")
    on.pod(ns, name, "one", **more)
    on.wait_phase(ns, name)
    return ns


def container_of(on, ns: str, pod: str) -> tuple[str, int]:
    """Give what tells that a container was not restarted."""
    (status,) = on.read_pod(ns, pod)["status"]["containerStatuses"]
    assert "running" in status["state"]
    return status["containerID"], status["restartCount"]


def slice_uids(on) -> set[str]:
    """Give the UIDs of the published slices."""
    return {item["metadata"]["uid"] for item in on.slices()}


def test_a_kubelet_restart_costs_neither_pods_nor_the_published_gpus(on):
    ns = one_pod(on)
    container, devices, slices = container_of(on, ns, "user"), on.devices(), slice_uids(on)
    registrations = len(on.drivers.process.logged("kubelet_registered_driver"))
    on.node.kubelet.stop()
    on.node.kubelet.start()
    # A starting kubelet deletes all slices of its node.
    wait_until(
        lambda: not slices & slice_uids(on), seconds=60, what="the kubelet has wiped the slices", every=0.02
    )
    wait_until(lambda: on.devices() == devices, seconds=60, what="the slices are back", every=0.02)
    on.node.wait_for_kubelet()
    on.wait_registered(times=registrations + 1)
    assert container_of(on, ns, "user") == container
    # The kubelet can use the driver again.
    on.claim(ns, "two")
    on.pod(ns, "next", "two")
    on.wait_phase(ns, "next")


def test_a_killed_driver_that_comes_back_forgets_no_claim(on):
    ns = one_pod(on)
    container, slices = container_of(on, ns, "user"), slice_uids(on)
    on.drivers.process.kill()
    on.drivers.start()
    on.wait_registered()
    assert container_of(on, ns, "user") == container
    assert slice_uids(on) == slices
    on.delete_pod(ns, "user")
    wait_until(lambda: not on.drivers.leftovers(), seconds=60, what="the claim is unprepared")


def test_a_pod_deleted_while_the_driver_is_down_goes_when_it_is_back(on):
    ns = one_pod(on)
    on.drivers.process.kill()
    on.control_plane.call("DELETE", f"/api/v1/namespaces/{ns}/pods/user?gracePeriodSeconds=1")
    wait_until(
        lambda: any("Failed" in text or "Killing" in text for text in on.messages(ns, "user")),
        seconds=60, what="the kubelet has begun to end the pod",
    )  # fmt: skip
    on.drivers.start()
    on.wait_registered()
    on.wait_gone(ns, "user")


def test_a_pod_created_while_the_driver_is_down_runs_when_it_is_back(on):
    ns = on.namespace()
    on.claim(ns, "one")
    on.drivers.process.kill()
    on.pod(ns, "early", "one")
    wait_until(
        lambda: any("FailedPrepareDynamicResources" in text for text in on.messages(ns, "early")),
        seconds=60, what="the kubelet says that it cannot prepare",
    )  # fmt: skip
    on.drivers.start()
    on.wait_phase(ns, "early")


def test_a_rolling_update_is_invisible_to_pods_and_scheduler(on):
    on.drivers.stop()
    old = on.drivers.start(pod_uid=str(uuid.uuid4()))
    on.wait_registered()
    ns = one_pod(on, "before")
    slices = slice_uids(on)
    new = on.drivers.start(pod_uid=str(uuid.uuid4()), current=False)
    on.claim(ns, "meanwhile")
    on.pod(ns, "during", "meanwhile")
    wait_until(
        lambda: new.logged("kubelet_registered_driver"), seconds=60, what="the new instance is registered"
    )
    assert old.terminate() == 0
    on.drivers.current, on.drivers.extra = new, []
    on.wait_phase(ns, "during")
    on.claim(ns, "two")
    on.pod(ns, "after", "two")
    on.wait_phase(ns, "after")
    for pod in ("before", "during", "after"):
        assert len(on.gpu_nodes(ns, pod)) == 1
        on.delete_pod(ns, pod)
    wait_until(lambda: not on.drivers.leftovers(), seconds=60, what="the claims are unprepared")
    assert slice_uids(on) == slices


def test_the_gpu_of_a_force_deleted_pod_goes_to_the_next_and_never_to_two(on):
    ns = on.namespace()
    on.template(ns, "all", allocationMode="All")
    # It does not hear the signal to end, and holds its GPUs until it is killed.
    on.pod(
        ns,
        "stubborn",
        "all",
        by="resourceClaimTemplateName",
        command="trap '' TERM; sleep 9999 & wait; sleep 9999",
    )
    on.wait_phase(ns, "stubborn")
    (old,) = on.drivers.records()
    container = container_of(on, ns, "stubborn")[0].removeprefix("containerd://")
    assert container in on.node.ctr("tasks", "ls", "-q").split()
    on.kubectl("delete", "pod", "-n", ns, "stubborn", "--grace-period=0", "--force")
    on.pod(ns, "heir", "all", by="resourceClaimTemplateName")
    on.wait_phase(ns, "heir", seconds=60)
    assert container not in on.node.ctr("tasks", "ls", "-q").split()
    (new,) = on.drivers.records()
    assert new != old
    assert on.drivers.cdi_files() == {new}
    assert len(on.gpu_nodes(ns, "heir")) == len(on.devices())


def test_an_api_server_killed_during_a_prepare_only_delays_the_pod(on):
    ns = on.namespace()
    claim = on.claim(ns, "one")
    driver = on.drivers.process
    failures = len(driver.logged("claim_prepare_failed"))
    os.kill(driver.process.pid, signal.SIGSTOP)
    on.pod(ns, "user", "one")
    # The kubelet notes the claim before it calls the driver.
    state = on.node.kubelet_root / "dra_manager_state"
    wait_until(
        lambda: state.exists() and claim["metadata"]["uid"] in state.read_text(), seconds=60,
        what="the kubelet calls the driver",
    )  # fmt: skip
    try:
        on.control_plane.api_server.kill()
        os.kill(driver.process.pid, signal.SIGCONT)
        wait_until(
            lambda: len(driver.logged("claim_prepare_failed")) > failures, seconds=60, what="prepare fails"
        )
        failed = driver.logged("claim_prepare_failed")[failures]
        assert failed["error_code"] == "DRA-API-UNREACHABLE"
        assert failed["remedy"]
    finally:
        on.control_plane.start_api_server()
    on.wait_phase(ns, "user")
    assert len(on.gpu_nodes(ns, "user")) == 1


def test_claims_are_unprepared_while_the_api_server_is_away(on):
    ns = one_pod(on, command="sleep 3")
    try:
        on.control_plane.api_server.kill()
        wait_until(
            lambda: not on.drivers.leftovers(), seconds=60, what="the finished pod's claim is unprepared"
        )
    finally:
        on.control_plane.start_api_server()
    on.wait_phase(ns, "user", "Succeeded")


def test_lost_cdi_files_are_written_again_for_the_pod_that_is_created_anew(on):
    ns = one_pod(on)
    for path in on.node.cdi.iterdir():
        path.unlink()
    on.delete_pod(ns, "user")
    on.pod(ns, "user", "one")
    on.wait_phase(ns, "user")
    assert len(on.gpu_nodes(ns, "user")) == 1


def test_lost_cdi_files_are_written_again_before_a_container_is_restarted(on):
    ns = one_pod(on, restartPolicy="Always")
    for path in on.node.cdi.iterdir():
        path.unlink()
    # No prepare call comes: the kubelet knows the names of the devices already.
    on.run_in(ns, "user", "kill -TERM 1", check=False)

    def runs_again() -> bool:
        (container,) = on.read_pod(ns, "user")["status"]["containerStatuses"]
        return container["restartCount"] >= 1 and "running" in container["state"]

    wait_until(runs_again, seconds=60, what="the container runs again")
    assert len(on.gpu_nodes(ns, "user")) == 1


def test_lost_cdi_files_are_written_again_for_the_second_pod_of_a_shared_claim(on):
    ns = one_pod(on)
    for path in on.node.cdi.iterdir():
        path.unlink()
    on.pod(ns, "second", "one")
    on.wait_phase(ns, "second", seconds=60)
    assert on.gpu_nodes(ns, "second") == on.gpu_nodes(ns, "user")


def test_gpus_of_a_pod_deleted_by_force_while_the_kubelet_was_down_are_given_to_the_next(on):
    ns = on.namespace()
    on.template(ns, "all", allocationMode="All")
    on.pod(ns, "lost", "all", by="resourceClaimTemplateName")
    on.wait_phase(ns, "lost")
    (old,) = on.drivers.records()
    on.node.kubelet.kill()
    on.kubectl("delete", "pod", "-n", ns, "lost", "--grace-period=0", "--force")
    wait_until(lambda: not on.claims_of(ns), seconds=60, what="the claim is gone with its pod")
    on.node.start_kubelet()
    on.wait_published()
    on.pod(ns, "heir", "all", by="resourceClaimTemplateName")
    on.wait_phase(ns, "heir", seconds=60)
    (new,) = on.drivers.records()
    assert new != old
