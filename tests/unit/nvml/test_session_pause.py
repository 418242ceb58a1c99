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


def test_a_holder_keeps_its_hold_and_its_next_call_waits_for_the_end_of_the_pause(make):
    library = FakeNvml(gpus(1))
    session = make(library)
    holding, go_on = threading.Event(), threading.Event()

    def health():
        with session.hold("health"):
            holding.set()
            go_on.wait(60)
            return session.run(count)

    done, answers = in_thread(health)
    assert holding.wait(60)
    with session.paused("a GPU changes its driver", timeout_seconds=60) as clean:
        assert clean
        go_on.set()
        assert not done.wait(0.05)
        assert not library.open
    assert done.wait(60)
    assert answers == [1]


def test_a_pause_waits_for_calls_that_run_and_lets_no_others_in(make):
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlDeviceGetCount_v2", None] = threading.Event()
    session = make(library)
    first, answers = in_thread(lambda: session.run(count))
    assert library.entered.wait(60)
    threading.Timer(0.05, gate.set).start()
    with session.paused("a GPU changes its driver", timeout_seconds=60) as clean:
        assert clean
        assert not library.open
    assert first.wait(60)
    assert answers == [1]


def test_a_session_that_is_opened_anew_counts_the_gpus_again_though_somebody_was_in_a_call(make):
    """The library is one for the process: opened a second time before it is closed it would show what it counted first."""
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlDeviceGetCount_v2", None] = threading.Event()
    session = make(library)
    first, _ = in_thread(lambda: session.run(count))
    assert library.entered.wait(60)
    threading.Timer(0.05, gate.set).start()
    session.reopen("new GPU", timeout_seconds=60)
    assert session.run(count) == 1
    assert library.shutdowns >= 1
    assert library.references == 1
    assert first.wait(60)


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
