"""Partitions made for claims by the real daemon: killed on the way, in use, and many at once with a slow driver."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dra.sim.kubelet import PrepareError, UnprepareError
from tests.process.harness import DRIVER, FAST, wait_until

DYNAMIC = "--mig-mode=dynamic"


def layout(node) -> list[tuple[int, int, int]]:
    """What the hardware has: GPU, first memory slice, compute instances."""
    slots = zip(node.machine.profile.gpus, node.machine.control.state.gpus, strict=True)
    return sorted((slot.minor, i.start, len(i.computes)) for slot, gpu in slots for i in gpu.instances)


def modes(node) -> list[int]:
    return [gpu.mig_current for gpu in node.machine.control.state.gpus]


def is_clean(node) -> bool:
    leftovers = (node.records(), node.cdi_files(), node.leftovers())
    return layout(node) == [] and not any(modes(node)) and leftovers == (set(), set(), [])


@pytest.mark.parametrize(
    "step", ["prepare:record-written", "prepare:effect-applied:1", "prepare:effect-applied:2"]
)
def test_killed_while_a_partition_is_made(node, step):
    kubelet = node.kubelet()
    doomed = node.daemon(DYNAMIC, crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2-mig-2g20gb-14-2"))
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon(DYNAMIC)
    _wait_back(kubelet, before)
    view = kubelet.run_pod(pod).views["main"]
    assert view.gpus == (2,)
    assert layout(node) == [(2, 2, 1)]
    kubelet.stop_pod(pod)
    assert is_clean(node)


@pytest.mark.parametrize("step", ["unprepare:effect-undone:2", "unprepare:effect-undone:1"])
def test_killed_while_a_partition_is_destroyed(node, step):
    kubelet = node.kubelet()
    doomed = node.daemon(DYNAMIC, crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2-mig-2g20gb-14-2"))
    kubelet.run_pod(pod)
    with pytest.raises(UnprepareError):
        kubelet.stop_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon(DYNAMIC)
    _wait_back(kubelet, before)
    kubelet.stop_pod(pod)
    assert is_clean(node)


@pytest.mark.skipif(
    not os.environ.get("DRA_TEST_SLOW"),
    reason="half a minute against the kubelet's limit of 45 s; set DRA_TEST_SLOW=1 (the engine's twin always runs)",
)
def test_fifty_six_pods_with_partitions_start_while_each_nvml_call_takes_200_ms(node):
    kubelet = node.kubelet(timings=replace(FAST, call=45.0))
    daemon = node.daemon(DYNAMIC)
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    names = [f"gpu-{gpu}-mig-1g10gb-19-{at}" for gpu in range(8) for at in range(7)]
    claims = [node.claim(f"c{number}", name) for number, name in enumerate(names)]
    refs = [_ref(claim) for claim in claims]
    node.machine.control.set_fault("*", delay_seconds=0.2)
    began = time.monotonic()
    with ThreadPoolExecutor(len(refs)) as pool:
        answers = list(pool.map(lambda ref: connection.prepare([ref]).claims[ref.uid], refs))
    took = time.monotonic() - began
    node.machine.control.clear()
    assert [answer.error for answer in answers if answer.error] == []
    # What the daemon's own looks at the hardware cost must not be charged to the claims.
    assert daemon.logged("claim_prepare_failed") == []
    assert len(layout(node)) == 56
    assert took < 45
    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(lambda ref: connection.unprepare([ref]).claims[ref.uid].error, refs))
    assert set(ended) == {""}
    wait_until(lambda: layout(node) == [], what="all partitions are gone")
    assert not any(modes(node))


def _ref(claim):
    from dra.api.claim import ClaimRef

    meta = claim["metadata"]
    return ClaimRef(meta["namespace"], meta["name"], meta["uid"])


def _wait_back(kubelet, before):
    def back():
        (*_, latest) = kubelet.registry.connections(DRIVER) or (before,)
        return latest if latest is not before and latest.connected else None

    return wait_until(back, what="the kubelet has the new process")
