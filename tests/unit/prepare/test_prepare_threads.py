"""A system that gives no threads for a while, and verbs that must not take each other's threads."""

from __future__ import annotations

import threading

import pytest
from prepare_fakes import wait_until

from dra.errors import HostError
from dra.prepare.workers import WorkerPool


class Scarcity:
    """While `on`, no thread of these names can be started."""

    def __init__(self, *names: str) -> None:
        self.names, self.on = names, True


@pytest.fixture
def scarcity(monkeypatch):
    start, scarce = threading.Thread.start, Scarcity("claim", "claim-end", "claim-fetch", "test")

    def refuse(thread):
        if scarce.on and thread.name in scarce.names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return scarce


def test_a_pool_without_threads_says_so_and_works_again_once_the_system_gives_some(scarcity):
    pool, ran = WorkerPool("test", limit=2), []
    for _ in range(5):
        with pytest.raises(HostError) as caught:
            pool.submit(lambda: ran.append("refused"))
    assert caught.value.code == "DRA-HOST-NO-THREADS"
    assert caught.value.retryable
    assert pool.threads == 0
    scarcity.on = False
    assert [pool.submit(lambda: 7).result(5) for _ in range(3)] == [7, 7, 7]
    go = threading.Event()
    slow = pool.submit(lambda: go.wait(5))
    assert pool.submit(lambda: "beside it").result(5) == "beside it"
    go.set()
    assert slow.result(5)
    assert ran == []


def test_a_pool_with_fewer_threads_than_wanted_works_with_those(scarcity):
    pool, go = WorkerPool("test", limit=3), threading.Event()
    scarcity.on = False
    slow = pool.submit(lambda: go.wait(5))
    scarcity.on = True
    waiting = pool.submit(lambda: "later")
    assert pool.threads == 1
    go.set()
    assert (slow.result(5), waiting.result(5)) == (True, "later")


def test_threads_that_stay_do_so_until_the_pool_is_closed():
    pool = WorkerPool("test", limit=3, keep=1, idle_seconds=0.01)
    go = threading.Event()
    calls = [pool.submit(lambda: go.wait(5)) for _ in range(3)]
    go.set()
    assert all(call.result(5) for call in calls)
    wait_until(lambda: pool.threads == 1)
    assert pool.submit(lambda: 1).result(5) == 1
    pool.close()
    wait_until(lambda: pool.threads == 0)


def test_claims_of_one_call_are_prepared_one_by_one_where_there_are_no_threads(node, scarcity):
    scarcity.names = ("claim", "claim-end")
    refs = [node.claim(number, f"gpu-{number}") for number in range(1, 4)]
    outcomes = node.the_engine.prepare(refs)
    assert [outcomes[ref.uid][0].device for ref in refs] == ["gpu-1", "gpu-2", "gpu-3"]
    assert node.the_engine.unprepare(refs) == {ref.uid: None for ref in refs}


def test_a_claim_that_cannot_be_read_for_want_of_a_thread_is_told_so_and_the_next_call_works(node, scarcity):
    ref = node.claim(1, "gpu-1")
    error = node.the_engine.prepare([ref])[ref.uid]
    assert isinstance(error, HostError)
    assert error.code == "DRA-HOST-NO-THREADS"
    scarcity.on = False
    assert node.the_engine.prepare([ref])[ref.uid][0].device == "gpu-1"


def test_a_recorded_claim_is_answered_without_a_thread_for_the_api(node, scarcity):
    scarcity.on = False
    ref = node.claim(1, "gpu-1")
    first = node.the_engine.prepare([ref])[ref.uid]
    scarcity.on = True
    assert node.restart().prepare([ref])[ref.uid] == first


def test_pods_end_while_every_thread_of_the_prepares_waits_for_the_api(node):
    known = [node.claim(number, f"gpu-{number}") for number in range(2)]
    node.the_engine.prepare(known)
    asked = [node.claim(10 + number, f"gpu-{2 + number % 6}") for number in range(70)]
    node.api.hang()
    stuck = threading.Thread(target=node.the_engine.prepare, args=(asked,))
    stuck.start()
    wait_until(lambda: node.api.waiting >= 32)
    answers = []
    ending = threading.Thread(target=lambda: answers.append(node.the_engine.unprepare(known)))
    ending.start()
    ending.join(2)
    try:
        assert answers == [{ref.uid: None for ref in known}]
    finally:
        node.api.release()
        stuck.join(30)
