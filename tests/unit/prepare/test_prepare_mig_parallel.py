"""Many partitions at once: GPUs in parallel, one after the other on each."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from mig_node import MigNode

from dra.errors import DraError


@pytest.fixture
def node(tmp_path):
    made = MigNode(tmp_path)
    yield made
    made.close()


def test_gpus_go_in_parallel_and_one_that_hangs_costs_its_own_claims_only(node):
    refs = [node.claim(gpu, node.name(gpu, "1g.10gb", 0)) for gpu in range(8)]
    fault = node.sim.set_fault("nvmlDeviceCreateGpuInstanceWithPlacement", gpu=0, hang=True)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(node.prepare, refs[0])
        for ref in refs[1:]:
            node.prepared(ref)
        assert not stuck.done()
        node.sim.clear(fault)
        assert not isinstance(stuck.result(20), DraError)
    assert len(node.partitions()) == 8


def test_all_partitions_of_two_gpus_are_made_and_destroyed_by_calls_at_the_same_time(node):
    refs = [node.claim(7 * gpu + at, node.name(gpu, "1g.10gb", at)) for gpu in range(2) for at in range(7)]
    engine = node.the_engine

    def each(call):
        with ThreadPoolExecutor(len(refs)) as pool:
            answers = {}
            for answer in pool.map(lambda ref: call([ref]), refs):
                answers.update(answer)
            return answers

    outcomes = each(engine.prepare)
    assert [o for o in outcomes.values() if isinstance(o, DraError)] == []
    assert len(set(node.partitions())) == 14
    node.check_invariants()
    assert set(each(engine.unprepare).values()) == {None}
    assert node.partitions() == []
    assert [node.mode(gpu) for gpu in range(2)] == [0, 0]
    assert node.files() == []


def test_with_calls_of_200_ms_fifty_six_claims_are_ready_before_the_kubelet_gives_up(node):
    """The kubelet waits 45 s. Every NVML call takes 200 ms; the claims come in one call, ordered by GPU.

    Here a call takes 100 ms, and what those of one GPU would take more is added: a busy machine costs its own share
    once, and claims of a GPU do not wait for each other longer than they may.
    """
    refs = [node.claim(7 * gpu + at, node.name(gpu, "1g.10gb", at)) for gpu in range(8) for at in range(7)]
    node.sim.reset_calls()
    node.sim.set_fault("*", delay_seconds=0.1)
    began = time.monotonic()
    outcomes = node.the_engine.prepare(refs)
    took = time.monotonic() - began
    took += 0.1 * sum(node.sim.count_calls().values()) / 8
    node.sim.clear()
    assert [o for o in outcomes.values() if isinstance(o, DraError)] == []
    assert len(set(node.partitions())) == 56
    node.check_invariants()
    assert took < 45


def test_what_a_claim_of_whole_gpus_does_asks_nothing_of_nvml(node):
    ref = node.claim(1, "gpu-0")
    node.sim.reset_calls()
    node.prepared(ref)
    node.prepared(ref)
    node.unprepare(ref)
    assert node.sim.count_calls() == {}
    assert threading.active_count() < 50
