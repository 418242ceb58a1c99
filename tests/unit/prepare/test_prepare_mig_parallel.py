"""Many partitions at once: GPUs in parallel, one after the other on each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from mig_node import MigNode
from prepare_fakes import wait_until

from dra.errors import DraError
from dra.prepare.setup import MIG_LOCK_WAIT_SECONDS, MIG_WORK_SECONDS


@pytest.fixture
def node(tmp_path):
    made = MigNode(tmp_path)
    yield made
    made.close()


@pytest.mark.fault("F29", "F30")
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


@pytest.mark.fault("F29")
def test_with_calls_of_200_ms_fifty_six_claims_are_ready_before_the_kubelet_gives_up(node):
    """The kubelet waits 45 s. Calls of one GPU come one after the other, those of different GPUs beside each other (the
    test above), so that what the claims of one GPU ask of NVML says how long they take where a call takes 200 ms.

    How busy this machine is does not count.
    """
    node.settings |= {"mig_lock_wait_seconds": 100.0}
    node.restart()
    refs = [node.claim(7 * gpu + at, node.name(gpu, "1g.10gb", at)) for gpu in range(8) for at in range(7)]
    node.sim.reset_calls()
    node.sim.set_fault("*", delay_seconds=0.005)
    outcomes = node.the_engine.prepare(refs)
    calls = sum(node.sim.count_calls().values()) / 8
    node.sim.clear()
    assert [o for o in outcomes.values() if isinstance(o, DraError)] == []
    assert len(set(node.partitions())) == 56
    node.check_invariants()
    assert 0.2 * calls < 45 * 0.8
    # The last of a GPU waits for the six before it.
    assert 0.2 * calls * 6 / 7 < MIG_LOCK_WAIT_SECONDS


def test_what_a_claim_of_whole_gpus_does_asks_nothing_of_nvml(node):
    ref = node.claim(1, "gpu-0")
    before = set(threading.enumerate())
    node.sim.reset_calls()
    node.prepared(ref)
    node.prepared(ref)
    node.unprepare(ref)
    assert node.sim.count_calls() == {}
    assert {thread.name for thread in threading.enumerate() if thread not in before} <= {
        "claim",
        "claim-end",
        "claim-fetch",
    }


def test_a_claim_that_cannot_have_its_gpu_in_time_is_refused_while_somebody_listens(node):
    """Of more slow claims than the kubelet's patience has room for, the last hear why; their next call succeeds."""
    first, second = node.claim(1, node.name(0, "1g.10gb", 0)), node.claim(2, node.name(0, "1g.10gb", 1))
    fault = node.sim.set_fault("nvmlDeviceCreateGpuInstanceWithPlacement", gpu=0, hang=True)
    engine = node.the_engine
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(engine.prepare, [first])
        wait_until(lambda: node.sim.count_calls().get("nvmlDeviceCreateGpuInstanceWithPlacement"))
        answer = engine.prepare([second], within_seconds=MIG_WORK_SECONDS + 0.5)[second.uid]
        assert answer.code == "DRA-LOCK-TIMEOUT"
        assert "gpu-0" in str(answer)
        assert not stuck.done()
        node.sim.clear(fault)
        assert not isinstance(stuck.result(30)[first.uid], DraError)
    assert not isinstance(engine.prepare([second], within_seconds=60.0)[second.uid], DraError)
    # Who has what it needs is not refused for lack of time.
    node.unprepare(second)
    assert not isinstance(engine.prepare([second], within_seconds=0.0)[second.uid], DraError)
