"""The daemon as a process: publishing, registering, preparing, stopping, being killed, living side by side."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta

import pytest

from dra.pb.grpc_health_pb2 import HealthCheckResponse
from dra.sim.kubelet import PrepareError
from tests.process.harness import DRIVER, FAST, new_uid, wait_until
from tests.process.invariants import check_invariants, published


def test_a_pod_gets_exactly_the_gpu_of_its_claim_and_nothing_is_left_afterwards(node):
    daemon, kubelet = node.daemon(), node.kubelet()
    node.wait_published()
    assert sorted(published(node)) == [f"gpu-{n}" for n in range(8)]
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    pod = node.pod("p", node.claim("c", "gpu-3"))
    view = kubelet.run_pod(pod).views["main"]
    assert view.gpus == (3,)
    assert view.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= set(view.libraries)
    assert "nvidia-smi" in view.binaries
    assert kubelet.pods.get("uid-p").ends["main"].output == "GPU 0: /dev/nvidia3\n"
    node.check_consistent()
    kubelet.stop_pod(pod)
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
    assert daemon.terminate(within_seconds=45) == 0


def test_the_kubelet_sees_the_health_of_each_device(node):
    node.daemon()
    kubelet = node.kubelet()
    kubelet.wait_health(
        DRIVER, lambda c: {c.health_of("node-a", f"gpu-{n}")[0] for n in range(8)} == {"Healthy"}
    )


@pytest.mark.fault("F1", "F2")
def test_a_restarted_kubelet_registers_the_driver_and_gets_the_wiped_slices_back(node):
    node.daemon()
    first = node.kubelet()
    before = node.wait_published()
    first.wait_registered(DRIVER, timeout_seconds=60)
    pod = node.pod("p", node.claim("c", "gpu-0"))
    first.run_pod(pod)
    first.stop()
    records = node.records()
    started = time.monotonic()
    second = node.kubelet()
    second.wait_registered(DRIVER, timeout_seconds=30)
    wait_until(lambda: "" in second.wiper.wiped, what="the slices are wiped")
    gone = {s["metadata"]["uid"] for s in before}
    again = wait_until(
        lambda: (
            None if gone & {s["metadata"]["uid"] for s in node.slices()} else node.wait_published(seconds=60)
        ),
        seconds=60,
        what="the slices are back",
    )
    assert time.monotonic() - started < 90
    assert [s["spec"] for s in again] == [s["spec"] for s in before]
    assert node.records() == records
    assert second.run_pod(pod).views["main"].gpus == (0,)
    check_invariants(node, noted=["pool_restored"])


@pytest.mark.fault("F3")
def test_sockets_of_a_killed_run_do_not_hinder_the_next(node):
    kubelet = node.kubelet()
    killed = node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    killed.kill()
    left = {path.name for path in node.registry.iterdir()}
    assert left == {f"{DRIVER}-reg.sock"}
    dead = kubelet.connection(DRIVER)
    wait_until(lambda: not dead.connected, what="the kubelet notices")
    daemon = node.daemon()
    (registered,) = wait_until(lambda: daemon.logged("kubelet_registered_driver"), seconds=60)
    # From the log: loading Python depends on how busy the machine is.
    (starting,) = daemon.logged("plugin_starting")
    took = datetime.fromisoformat(registered["timestamp"]) - datetime.fromisoformat(starting["timestamp"])
    assert took < timedelta(seconds=30)
    assert "in use" not in daemon.log.read_text()
    check_invariants(node, noted=["stale_socket_removed"])


@pytest.mark.fault("F3")
def test_sockets_of_a_killed_pod_are_removed_by_the_next(node):
    killed = node.daemon(pod_uid=new_uid())
    wait_until(lambda: list(node.registry.iterdir()))
    (stale,) = node.registry.iterdir()
    killed.kill()
    kubelet = node.kubelet()
    node.daemon(pod_uid=new_uid())
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    assert not stale.exists()
    check_invariants(node, noted=["stale_socket_removed"])


@pytest.mark.fault("F4")
def test_sigterm_while_idle_removes_the_sockets_and_keeps_slices_and_cdi_files(node):
    daemon, kubelet = node.daemon(), node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    kubelet.wait_health(DRIVER, lambda connection: connection.health_messages > 0)
    kubelet.run_pod(node.pod("p", node.claim("c", "gpu-0")))
    before = node.wait_published()
    assert daemon.terminate(within_seconds=45) == 0
    assert list(node.registry.iterdir()) == []
    assert list(node.state_dir.glob("*.sock")) == []
    assert node.slices() == before
    assert len(node.cdi_files()) == 1
    node.check_consistent()
    assert daemon.logged("plugin_stopped")


@pytest.mark.fault("F5")
def test_sigterm_during_a_prepare_call_lets_it_finish(node):
    daemon, kubelet = node.daemon(), node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-0"))
    # The second reading of the claim is the driver's; the first is the kubelet's own.
    connection = kubelet.connection(DRIVER)
    kubelet.manager.cache.claims.clear()
    fault = node.api.faults.set("delay", method="GET", path="/resourceclaims/c", seconds=1.0)
    outcome = []

    def run():
        try:
            outcome.append(kubelet.run_pod(pod))
        except PrepareError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: fault.hits >= 2, what="the driver asks for the claim")
    assert connection.connected
    assert daemon.terminate(within_seconds=45) == 0
    thread.join(10)
    node.check_consistent()
    if not isinstance(outcome[0], PrepareError):
        assert outcome[0].views["main"].gpus == (0,)
    node.api.faults.clear()
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    assert kubelet.run_pod(pod).views["main"].gpus == (0,)
    check_invariants(node)
    kubelet.stop_pod(pod)
    assert (node.records(), node.cdi_files()) == (set(), set())


@pytest.mark.fault("F27")
def test_two_instances_of_a_rolling_update_answer_alike_and_the_slices_stay(node):
    kubelet = node.kubelet(timings=FAST)
    old = node.daemon(pod_uid=new_uid())
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    pod = node.pod("p", node.claim("c", "gpu-5"))
    kubelet.run_pod(pod)
    before = node.wait_published()
    new = node.daemon(pod_uid=new_uid())
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instances=2)
    answers = []
    for connection in kubelet.registry.connections(DRIVER):
        cached = kubelet.manager.cache.claims["default", "c"]
        answers.append(connection.prepare([cached.ref]).claims[cached.ref.uid])
    assert answers[0] == answers[1]
    assert answers[0].devices[0].device_name == "gpu-5"
    assert old.terminate(within_seconds=45) == 0
    wait_until(lambda: len(kubelet.registry.connections(DRIVER)) == 1)
    assert kubelet.wait_registered(DRIVER, timeout_seconds=60).connected
    wait_until(lambda: new.logged("server_version_known"), what="the new instance publishes")
    check_invariants(node, new)
    kubelet.stop_pod(pod)
    assert (node.records(), node.cdi_files()) == (set(), set())
    assert [slice_["metadata"]["resourceVersion"] for slice_ in node.slices()] == [
        slice_["metadata"]["resourceVersion"] for slice_ in before
    ]


@pytest.mark.fault("F15")
def test_without_an_api_server_it_is_alive_registered_and_not_ready_until_that_comes_back(node):
    node.api.faults.refuse()
    daemon = node.daemon("--healthcheck-port=0")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    wait_until(lambda: daemon.logged("pool_publish_failed"))
    assert daemon.probe("liveness") == (HealthCheckResponse.SERVING, "")
    status, missing = daemon.probe("readiness")
    assert status == HealthCheckResponse.NOT_SERVING
    assert missing.startswith("pool: DRA-API-")
    assert "registered" not in missing
    node.api.faults.clear()
    node.wait_published(seconds=60)
    wait_until(lambda: daemon.probe("readiness") == (HealthCheckResponse.SERVING, ""))


def test_sigusr2_writes_the_stacks_of_all_threads_to_a_file(node):
    import signal

    daemon = node.daemon()
    wait_until(lambda: daemon.logged("plugin_started"))
    daemon.process.send_signal(signal.SIGUSR2)
    stacks = node.state_dir / "stacks.txt"
    wait_until(lambda: "most recent call first" in stacks.read_text() and "_serve" in stacks.read_text())


@pytest.mark.parametrize("arguments", [["--simulate=no-such-machine"], ["--node-name="]])
def test_what_cannot_work_ends_the_process_with_a_code_and_a_remedy(node, arguments):
    daemon = node.daemon(*arguments)
    assert daemon.wait(within_seconds=45) == 1
    (event,) = daemon.logged("plugin_not_started")
    assert event["error_code"].startswith("DRA-FLAG-")
