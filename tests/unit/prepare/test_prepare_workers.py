"""Threads come when there is work, go when there is none, and are never more than allowed."""

from __future__ import annotations

import threading
import time

import pytest
from prepare_fakes import FakeApi, make_claim, uid_of, wait_until
from structlog.contextvars import get_contextvars

from dra.api.claim import ClaimRef
from dra.errors import ClaimError, KubeError
from dra.prepare.fetch import ClaimFetcher
from dra.prepare.workers import WorkerPool
from dra.telemetry.log import bound

REF = ClaimRef("default", "one", uid_of(1))


def test_calls_run_at_once_up_to_the_limit_and_idle_threads_end():
    pool = WorkerPool("test", limit=3, idle_seconds=0.02)
    go, running = threading.Event(), []

    def call():
        running.append(1)
        go.wait(5)
        return len(running)

    futures = [pool.submit(call) for _ in range(6)]
    wait_until(lambda: len(running) == 3)
    assert pool.threads == 3
    go.set()
    assert [future.result(5) for future in futures][-1] == 6
    wait_until(lambda: pool.threads == 0)
    assert pool.submit(lambda: 7).result(5) == 7


def test_a_busy_thread_is_not_counted_on():
    """A second call gets a thread of its own although the first thread was idle a moment ago."""
    pool = WorkerPool("test", limit=2)
    pool.submit(lambda: None).result(5)
    go = threading.Event()
    slow = pool.submit(lambda: go.wait(5))
    assert pool.submit(lambda: "quick").result(5) == "quick"
    go.set()
    assert slow.result(5)


def test_whatever_a_call_raises_reaches_who_waits():
    class Odd(BaseException):
        pass

    def call():
        raise Odd

    pool = WorkerPool("test", limit=1)
    with pytest.raises(Odd):
        pool.submit(call).result(5)
    assert pool.submit(lambda: 1).result(5) == 1


def test_a_call_cancelled_before_its_turn_never_runs():
    pool = WorkerPool("test", limit=1)
    go, ran = threading.Event(), []
    first = pool.submit(lambda: go.wait(5))
    second = pool.submit(lambda: ran.append(1))
    assert second.cancel()
    go.set()
    assert first.result(5)
    pool.submit(lambda: None).result(5)
    assert ran == []


def test_a_quick_answer_is_taken_and_a_slow_one_is_not_waited_for():
    api = FakeApi()
    api.put(make_claim(REF))
    fetcher = ClaimFetcher(api, record_wait_seconds=0.02)
    assert fetcher.fetch_if_quick(REF)["metadata"]["uid"] == REF.uid
    api.hang()
    for _ in range(5):
        assert fetcher.fetch_if_quick(REF) is None
    assert api.gets["one"] == 2
    api.release()
    wait_until(lambda: api.waiting == 0)
    # The late answer is dropped: the next question is asked anew.
    assert fetcher.fetch_if_quick(REF) is not None
    assert api.gets["one"] == 3


def test_only_the_first_of_many_questions_waits_for_a_server_that_hangs():
    api = FakeApi()
    api.put(make_claim(REF))
    api.hang()
    fetcher = ClaimFetcher(api, record_wait_seconds=1.0)
    began = time.monotonic()
    for _ in range(20):
        assert fetcher.fetch_if_quick(REF) is None
    assert 1.0 <= time.monotonic() - began < 10
    assert api.gets["one"] == 1
    api.release()
    # The call that hung ends in a thread of its own; until then nobody waits behind it.
    wait_until(lambda: fetcher.fetch_if_quick(REF) is not None)


def test_a_claim_that_is_gone_is_an_answer_even_when_asked_quickly():
    with pytest.raises(ClaimError) as caught:
        ClaimFetcher(FakeApi()).fetch_if_quick(REF)
    assert caught.value.code == "DRA-CLAIM-NOT-FOUND"


def test_an_api_that_refuses_is_no_answer_for_a_recorded_claim_and_an_error_for_another():
    api = FakeApi()
    api.down = True
    fetcher = ClaimFetcher(api)
    assert fetcher.fetch_if_quick(REF) is None
    with pytest.raises(KubeError):
        fetcher.fetch(REF)


def test_hanging_calls_use_no_more_threads_than_allowed_and_the_deadline_holds():
    api = FakeApi()
    api.hang()
    fetcher = ClaimFetcher(api, deadline_seconds=0.05, threads=2)
    for _ in range(4):
        with pytest.raises(KubeError) as caught:
            fetcher.fetch(REF)
        assert caught.value.code == "DRA-API-TIMEOUT"
        assert caught.value.retryable
    assert api.waiting == 2
    api.release()


@pytest.mark.parametrize("code", ["DRA-API-NOT-SERVED", "DRA-API-OTHER-NOT-FOUND", "DRA-API-BAD-ANSWER"])
def test_a_404_that_is_not_about_the_claim_is_no_answer(code):
    api = FakeApi()

    def refuse(namespace, name, timeout_seconds):
        raise KubeError(code, "404 page not found", status=404, reason="NotFound")

    api.get = refuse
    fetcher = ClaimFetcher(api)
    assert fetcher.fetch_if_quick(REF) is None
    with pytest.raises(KubeError) as caught:
        fetcher.fetch(REF)
    assert caught.value.code == code
    assert caught.value.retryable


def test_what_is_bound_to_the_log_is_bound_to_it_in_the_thread_of_a_call_too():
    pool = WorkerPool("test", limit=1)
    with bound(rpc="prepare", claim="a/b"):
        there = pool.submit(get_contextvars)
    # The thread is the same, and nothing of the first call stays in it.
    after = pool.submit(get_contextvars)
    assert there.result(5) == {"rpc": "prepare", "claim": "a/b"}
    assert after.result(5) == {}
