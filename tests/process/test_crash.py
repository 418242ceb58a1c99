"""Killed at every step of the journal: after a restart the retry succeeds and nothing is left over."""

from __future__ import annotations

import pytest

from dra.prepare.steps import prepare_steps, rollback_steps, unprepare_steps
from dra.sim.kubelet import PrepareError, UnprepareError
from tests.process.harness import DRIVER
from tests.process.invariants import check_invariants


@pytest.mark.parametrize("step", prepare_steps())
@pytest.mark.fault("F6")
def test_killed_in_prepare(node, step):
    """The retry gives the same device to the same claim, and the device is free for others afterwards."""
    kubelet = node.kubelet()
    doomed = node.daemon(crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2"))
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    assert kubelet.run_pod(pod).views["main"].gpus == (2,)
    check_invariants(node)
    kubelet.stop_pod(pod)
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
    other = node.pod("q", node.claim("d", "gpu-2", pods=("q",)))
    assert kubelet.run_pod(other).views["main"].gpus == (2,)


@pytest.mark.parametrize("step", prepare_steps())
@pytest.mark.fault("F6")
def test_killed_in_prepare_and_the_pod_is_deleted(node, step):
    """Unprepare of what was half prepared cleans up, without the claim in the API."""
    kubelet = node.kubelet()
    doomed = node.daemon(crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2"))
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.api.request("DELETE", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/c")
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])


@pytest.mark.parametrize("step", unprepare_steps())
@pytest.mark.fault("F7")
def test_killed_in_unprepare(node, step):
    """The retry succeeds, a second unprepare too, and the device is free for another claim."""
    kubelet = node.kubelet()
    doomed = node.daemon(crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2"))
    kubelet.run_pod(pod)
    ref = kubelet.manager.cache.claims["default", "c"].ref
    with pytest.raises(UnprepareError):
        kubelet.stop_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert connection.unprepare([ref]).claims[ref.uid].error == ""
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
    other = node.pod("q", node.claim("d", "gpu-2", pods=("q",)))
    assert kubelet.run_pod(other).views["main"].gpus == (2,)


@pytest.mark.parametrize("step", rollback_steps())
@pytest.mark.fault("F6")
def test_killed_in_the_rollback_of_a_failed_prepare(node, step):
    """A prepare that cannot write its CDI file rolls back; killed there, the retry succeeds once the cause is gone."""
    kubelet = node.kubelet()
    doomed = node.daemon(crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    directory = node.root / "var/run/cdi"
    if directory.is_dir():
        directory.rmdir()
    directory.write_text("in the way")
    pod = node.pod("p", node.claim("c", "gpu-2"))
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    directory.unlink()
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    assert kubelet.run_pod(pod).views["main"].gpus == (2,)
    kubelet.stop_pod(pod)
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
