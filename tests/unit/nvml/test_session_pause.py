"""The session lets go of the driver for a moment: others wait and notice nothing."""

from __future__ import annotations

import threading

import pynvml
import pytest

from dra.errors import StackError
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from tests.unit.nvml.nvml_fake import FakeNvml, gpus


@pytest.fixture
def make():
    sessions = []

    def build(library, **options):
        session = NvmlSession(InjectedLibrary(lambda: library), **options)
        sessions.append(session)
        return session

    yield build
    for session in sessions:
        session.close()
    assert pynvml.nvmlLib is None


def count(api):
    return api.call("nvmlDeviceGetCount")


def in_thread(call):
    done = threading.Event()
    answers = []

    def run():
        try:
            answers.append(call())
        except StackError as error:
            answers.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    return done, answers


def test_in_a_pause_nothing_is_open_and_who_asks_waits_for_its_end(make):
    library = FakeNvml(gpus(1))
    session = make(library)
    assert session.run(count) == 1
    with session.paused("a GPU changes its driver") as clean:
        assert clean
        assert not library.open
        done, answers = in_thread(lambda: session.run(count))
        assert not done.wait(0.05)
        assert not library.open
    assert done.wait(60)
    assert answers == [1]


def test_a_holder_leaves_for_a_pause_and_can_hold_again_after_it(make):
    library = FakeNvml(gpus(1))
    session = make(library)
    holding = threading.Event()

    def health():
        with session.hold("health") as hold:
            session.run(count)
            holding.set()
            hold.let_go.wait(60)
        with session.hold("health"):
            return session.run(count)

    done, answers = in_thread(health)
    assert holding.wait(60)
    with session.paused("a GPU changes its driver") as clean:
        assert clean
        assert not library.open
        assert not done.wait(0.05)
    assert done.wait(60)
    assert answers == [1]


def test_two_pauses_end_with_the_second(make):
    library = FakeNvml(gpus(1))
    session = make(library)
    with session.paused("one"):
        with session.paused("two"):
            done, answers = in_thread(lambda: session.run(count))
        assert not done.wait(0.05)
    assert done.wait(60)
    assert answers == [1]


def test_an_opening_that_is_under_way_is_waited_for_and_done_again_after_the_pause(make):
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlInitWithFlags", None] = threading.Event()
    session = make(library)
    done, answers = in_thread(lambda: session.run(count))
    assert library.entered.wait(60)
    threading.Timer(0.05, gate.set).start()
    with session.paused("a GPU changes its driver", timeout_seconds=60) as clean:
        assert clean
        assert not library.open
        assert not done.is_set()
    assert done.wait(60)
    assert answers == [1]


def test_an_opening_that_ends_in_a_pause_which_did_not_wait_for_it_is_closed_again(make):
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlInitWithFlags", None] = threading.Event()
    session = make(library)
    done, answers = in_thread(lambda: session.run(count))
    assert library.entered.wait(60)
    with session.paused("a GPU changes its driver", timeout_seconds=0.01) as clean:
        assert not clean
        gate.set()
        assert not done.wait(0.1)
    assert done.wait(60)
    assert answers == [1]


def test_a_pause_that_lasts_too_long_is_an_error_that_is_over_by_itself(make):
    session = make(FakeNvml(gpus(1)), pause_seconds=0.05)
    with session.paused("a GPU changes its driver"), pytest.raises(StackError) as caught:
        session.run(count)
    assert (caught.value.code, caught.value.retryable) == ("DRA-NVML-RELEASED", True)
    assert session.run(count) == 1


def test_a_pause_does_not_end_a_release_that_somebody_asked_for(make):
    session = make(FakeNvml(gpus(1)))
    session.release("driver unload")
    with session.paused("a GPU changes its driver"):
        pass
    with pytest.raises(StackError, match="driver unload"):
        session.run(count)
