"""Looks that are shared: fewer of them under load, and never one that is older than the question."""

from __future__ import annotations

import threading

import pytest

from dra.host.shared_look import SharedLook


def test_who_asks_one_after_the_other_looks_each_time():
    answers = iter(range(10))
    shared = SharedLook(lambda: next(answers))
    assert [shared.get() for _ in range(3)] == [0, 1, 2]


def test_those_who_come_during_a_look_share_the_next_one_and_none_gets_the_one_under_way():
    looks, inside, go_on = [], threading.Event(), threading.Event()

    def look() -> int:
        looks.append(len(looks))
        if len(looks) == 1:
            inside.set()
            assert go_on.wait(60)
        return looks[-1]

    shared = SharedLook(look)
    answers: list[int] = []
    started = threading.Semaphore(0)

    def ask() -> None:
        started.release()
        answers.append(shared.get())

    first = threading.Thread(target=ask)
    first.start()
    assert inside.wait(60)
    others = [threading.Thread(target=ask) for _ in range(7)]
    for thread in others:
        thread.start()
    for _ in range(8):
        assert started.acquire(timeout=5)
    go_on.set()
    for thread in (first, *others):
        thread.join(5)
    assert answers.count(0) == 1
    assert len(answers) == 8


def test_a_look_that_fails_fails_for_its_caller_and_the_next_one_looks_again():
    results = iter([ValueError("gone"), "there"])

    def look() -> str:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    shared = SharedLook(look)
    with pytest.raises(ValueError, match="gone"):
        shared.get()
    assert shared.get() == "there"


def test_a_change_made_before_the_question_is_in_every_answer():
    """Many threads change a counter and then ask: no answer is older than the asker's own change."""
    state, lock = [0], threading.Lock()
    shared = SharedLook(lambda: state[0])
    late: list[tuple[int, int]] = []

    def work() -> None:
        for _ in range(300):
            with lock:
                state[0] += 1
                mine = state[0]
            if (seen := shared.get()) < mine:
                late.append((mine, seen))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert late == []
