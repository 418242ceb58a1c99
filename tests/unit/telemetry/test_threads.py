"""A loop does its jobs whatever they do, says each fault once, and can be woken and ended."""

from __future__ import annotations

import threading
import time

import pytest
from structlog.testing import capture_logs

from dra.errors import HostError, KubeError
from dra.telemetry import threads
from dra.telemetry.threads import Loop
from dra.telemetry.told import Told

LONG = 60.0


@pytest.fixture
def loop():
    made = []

    def make(*jobs, **options):
        made.append(Loop("night-watch", *jobs, **{"seconds": LONG, **options}))
        return made[-1]

    yield make
    for each in made:
        assert each.stop(timeout_seconds=LONG)


def until(condition, seconds=LONG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_jobs_come_round_when_woken_and_a_broken_one_takes_no_turn_from_the_others(loop):
    rounds = []

    def broken():
        raise ValueError("a mistake of ours")

    made = loop(broken, lambda: rounds.append(None))
    made.start()
    until(lambda: len(rounds) == 1)
    made.wake()
    until(lambda: len(rounds) == 2)


def test_the_first_round_waits_where_that_is_asked_for_and_the_soonest_wish_counts(loop):
    rounds = []

    def wishing():
        rounds.append(None)
        return 0.0 if len(rounds) < 50 else None

    made = loop(wishing, lambda: 30.0, first_seconds=LONG)
    made.start()
    assert not rounds
    made.wake()
    until(lambda: len(rounds) == 50)


def test_what_comes_while_a_wake_settles_has_its_turn_with_it(loop):
    rounds, begun = [], threading.Event()

    class Slow(threading.Event):
        """The wait for the end, which settling is: it takes until the test says so."""

        def wait(self, timeout=None):
            begun.set()
            go_on.wait(LONG)
            return self.is_set()

    go_on = threading.Event()
    made = loop(lambda: rounds.append(None), first_seconds=LONG, settle_seconds=0.01)
    made._ending = Slow()
    made.start()
    made.wake()
    assert begun.wait(LONG)
    for _ in range(10):
        made.wake()
    assert not rounds
    go_on.set()
    until(lambda: rounds)
    made.wake()
    until(lambda: len(rounds) == 2)


def test_a_fault_is_logged_once_and_again_when_it_comes_back(loop):
    faults = [
        KubeError("DRA-API-TIMEOUT", "slow"), KubeError("DRA-API-TIMEOUT", "still slow"), ValueError("a mistake"), None,
        KubeError("DRA-API-TIMEOUT", "slow again"),
    ]  # fmt: skip
    done = threading.Event()

    def job():
        if not faults:
            done.set()
            return None
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        return 0.0

    made = loop(job, retry_seconds=0.0)
    with capture_logs() as logs:
        made.start()
        assert done.wait(LONG)
        made.stop(timeout_seconds=LONG)
    assert [each["event"] for each in logs][:4] == [
        "night_watch_failed", "night_watch_crashed", "night_watch_works_again", "night_watch_failed",
    ]  # fmt: skip
    assert logs[0]["error"] == "slow"


def test_it_begins_once_and_never_after_its_end(loop):
    running = []
    made = loop(lambda: running.append(threading.current_thread()))
    for _ in range(3):
        made.begin()
    until(lambda: running)
    made.wake()
    until(lambda: len(running) >= 2)
    assert len(set(running)) == 1
    assert made.stop(timeout_seconds=LONG)
    assert not running[0].is_alive()
    again = loop(lambda: running.append(None))
    assert again.stop()
    again.begin()
    again.start()
    assert again.ending
    assert None not in running


def test_a_system_without_threads_is_tried_again(loop, monkeypatch):
    rounds = []
    made = loop(lambda: rounds.append(None))

    def none_left(thread):
        raise HostError("DRA-HOST-NO-THREADS", "none")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", none_left)
        with capture_logs() as logs:
            made.begin()
        assert [each["event"] for each in logs][:4] == ["night_watch_not_started"]
        with pytest.raises(HostError):
            made.start()
    made.begin()
    until(lambda: rounds)


def test_what_was_told_is_forgotten_when_it_is_over_or_too_much():
    told = Told(most=2)
    assert told.is_news("a", "x")
    assert not told.is_news("a", "x")
    assert told.is_news("a", "y")
    assert told.over("a")
    assert not told.over("a")
    assert told.is_news("a", "y")
    told.is_news("b")
    told.only(["b"])
    assert told.is_news("a", "y")
    told.is_news("c")
    assert told.is_news("b")
