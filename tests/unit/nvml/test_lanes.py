import threading
import time

import pytest

from dra.errors import DeviceError, DraError, HostError, StackError
from dra.nvml.lanes import CallLanes, current_job
from dra.nvml.patience import SLICE_SECONDS, AwakePatience


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def hang(lanes, subject, gate):
    with pytest.raises(DraError) as caught:
        lanes.run(subject, lambda: gate.wait(30), deadline_seconds=0.02)
    assert caught.value.code == "DRA-NVML-HUNG"
    return caught.value


def test_a_call_gives_its_result_and_raises_its_error():
    lanes = CallLanes()
    assert lanes.run("gpu", lambda: 41 + 1, deadline_seconds=5) == 42
    with pytest.raises(KeyError):
        lanes.run("gpu", lambda: {}["x"], deadline_seconds=5)
    assert lanes.run("gpu", lambda: "still works", deadline_seconds=5) == "still works"


def test_a_hung_gpu_is_named_and_refused_at_once_while_others_go_on(gate):
    lanes = CallLanes()
    error = hang(lanes, "0000:10:00.0", gate)
    assert isinstance(error, DeviceError)
    assert "0000:10:00.0" in error.message
    assert error.retryable
    ran = []
    with pytest.raises(DeviceError, match="has not returned"):
        lanes.run("0000:10:00.0", lambda: ran.append(1), deadline_seconds=30)
    assert ran == []
    assert lanes.run("0000:11:00.0", lambda: "fine", deadline_seconds=5) == "fine"
    assert set(lanes.hung) == {"0000:10:00.0"}


def test_the_library_itself_hanging_is_an_error_of_the_stack(gate):
    assert isinstance(hang(CallLanes(), "nvml", gate), StackError)


def test_a_gpu_is_used_again_when_its_hung_call_returns(gate):
    recovered = threading.Event()
    told = []
    lanes = CallLanes(on_recovered=lambda subject: (told.append(subject), recovered.set()))
    hang(lanes, "gpu", gate)
    gate.set()
    assert recovered.wait(60)
    assert told == ["gpu"]
    assert lanes.hung == {}
    assert lanes.run("gpu", lambda: 1, deadline_seconds=5) == 1


def test_a_gpu_with_two_hung_calls_recovers_with_the_second():
    gates = [threading.Event(), threading.Event()]
    recovered = threading.Event()
    lanes = CallLanes(on_recovered=lambda subject: recovered.set())
    errors = []

    def caller(gate):
        with pytest.raises(DraError) as caught:
            lanes.run("gpu", lambda: gate.wait(30), deadline_seconds=0.3)
        errors.append(caught.value.code)

    threads = [threading.Thread(target=caller, args=(gate,)) for gate in gates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == ["DRA-NVML-HUNG"] * 2
    gates[0].set()
    assert not recovered.wait(0.05)
    assert "gpu" in lanes.hung
    gates[1].set()
    assert recovered.wait(60)


def test_threads_are_bounded_however_many_gpus_hang(gate):
    lanes = CallLanes(max_threads=3)
    for number in range(3):
        hang(lanes, f"gpu {number}", gate)
    with pytest.raises(StackError, match="all 3 calls"):
        lanes.run("another", lambda: 1, deadline_seconds=0.02)
    assert lanes.thread_count == 3


def test_many_calls_leave_few_threads_behind():
    lanes = CallLanes()
    results = lanes.run_each({str(i): (lambda i=i: i) for i in range(20)}, deadline_seconds=5)
    assert results == {str(i): i for i in range(20)}
    lanes.run("x", lambda: None, deadline_seconds=5)
    deadline = threading.Event()
    for _ in range(100):
        if lanes.thread_count <= 3:
            break
        deadline.wait(0.02)
    assert lanes.thread_count <= 3


def test_of_many_calls_the_hung_one_alone_fails(gate):
    lanes = CallLanes()
    results = lanes.run_each(
        {"a": lambda: 1, "b": lambda: gate.wait(30), "c": lambda: 3}, deadline_seconds=0.1
    )
    assert (results["a"], results["c"]) == (1, 3)
    assert results["b"].code == "DRA-NVML-HUNG"


def test_quick_calls_of_a_batch_share_a_worker(monkeypatch) -> None:
    started = []

    def start(thread):
        started.append(thread)
        thread.start()

    monkeypatch.setattr("dra.nvml.lanes.start_thread", start)
    lanes = CallLanes()
    for _ in range(2):
        results = lanes.run_each(
            {str(number): lambda: time.sleep(0.003) for number in range(16)}, deadline_seconds=30
        )
        assert set(results.values()) == {None}
    # One is enough; on a busy machine others may join. It was one for each call.
    assert len(started) < 10
    lanes.close()


def test_calls_of_a_batch_that_wait_for_each_other_all_begin() -> None:
    lanes, together = CallLanes(), threading.Barrier(8)
    results = lanes.run_each(
        {str(number): lambda: together.wait(60) for number in range(8)}, deadline_seconds=60
    )
    assert sorted(results.values()) == list(range(8))


def test_a_batch_that_no_worker_has_time_for_is_not_run_later(gate) -> None:
    recovered = threading.Event()
    lanes, ran = CallLanes(max_threads=2, on_recovered=lambda _subject: recovered.set()), []
    calls = {"a": lambda: gate.wait(30), "b": lambda: gate.wait(30), "c": lambda: ran.append("c")}
    results = lanes.run_each(calls, deadline_seconds=1.0)
    assert isinstance(results["c"], StackError)
    assert "all 2 calls" in results["c"].message
    # It was never asked: nothing is held against it.
    assert set(lanes.hung) == {"a", "b"}
    assert "all 2 calls" in lanes.run_each({"d": lambda: 1}, deadline_seconds=0.02)["d"].message
    gate.set()
    assert recovered.wait(60)
    assert lanes.run("c", lambda: ran.append("again"), deadline_seconds=30) is None
    assert ran == ["again"]


def test_a_batch_refuses_the_gpu_that_hangs_and_asks_the_others(gate) -> None:
    lanes = CallLanes()
    hang(lanes, "b", gate)
    results = lanes.run_each({"a": lambda: 1, "b": lambda: 2, "c": lambda: 3}, deadline_seconds=30)
    assert (results["a"], results["c"]) == (1, 3)
    assert "has not returned" in results["b"].message


def test_a_batch_for_which_no_thread_can_be_started_fails_as_a_whole(monkeypatch) -> None:
    lanes = CallLanes()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    results = lanes.run_each({"a": lambda: 1, "b": lambda: 2}, deadline_seconds=30)
    assert {error.code for error in results.values()} == {"DRA-HOST-NO-THREADS"}
    monkeypatch.undo()
    assert lanes.run_each({"a": lambda: 1, "b": lambda: 2}, deadline_seconds=30) == {"a": 1, "b": 2}


def test_a_left_behind_call_knows_it_and_its_late_result_is_handed_on(gate):
    lanes = CallLanes()
    seen, late = [], threading.Event()

    def call():
        gate.wait(30)
        seen.append(current_job().abandoned)
        return "late"

    with pytest.raises(DraError):
        lanes.run(
            "gpu", call, deadline_seconds=0.02, discard=lambda result: (seen.append(result), late.set())
        )
    gate.set()
    assert late.wait(60)
    assert seen == [True, "late"]


def test_a_worker_that_cannot_be_started_is_not_counted_and_the_next_call_works(monkeypatch):
    lanes = CallLanes(max_threads=2)
    start = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(4):
        with pytest.raises(HostError) as caught:
            lanes.run("gpu", lambda: 1, deadline_seconds=1)
        assert caught.value.code == "DRA-HOST-NO-THREADS"
    assert lanes.thread_count == 0
    monkeypatch.setattr(threading.Thread, "start", start)
    assert lanes.run("gpu", lambda: 1, deadline_seconds=5) == 1
    lanes.close()


class StoppedAt:
    """An event that never comes. In the middle of one wait the whole process is stopped for an hour."""

    def __init__(self, number: int, *, comes_at: float = float("inf")) -> None:
        self.number, self.comes_at = number, comes_at
        self.now, self.waits = 100.0, 0

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        self.now += seconds + (3600.0 if self.waits == self.number else 0.0)
        return self.is_set()

    def is_set(self) -> bool:
        return self.now >= self.comes_at


@pytest.mark.fault("F42")
@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_time_in_which_the_process_was_stopped_is_not_waited_off(number) -> None:
    event = StoppedAt(number)
    assert not AwakePatience(10.0, clock=lambda: event.now).wait_for(event)
    assert event.waits == 10.0 / SLICE_SECONDS + 1
    assert event.now == 100.0 + 3600.0 + 10.0 + SLICE_SECONDS
    # Whoever answers right after the stop has answered in time.
    event = StoppedAt(number, comes_at=100.0 + 3600.0 + SLICE_SECONDS * (number + 1))
    assert AwakePatience(10.0, clock=lambda: event.now).wait_for(event)


def test_whoever_waits_for_an_event_of_a_second_wakes_once() -> None:
    event = StoppedAt(0, comes_at=101.0)
    assert AwakePatience(20.0, clock=lambda: event.now).wait_for(event)
    assert event.waits == 1


def test_several_answers_share_one_patience() -> None:
    event = StoppedAt(0)
    patience = AwakePatience(10.0, clock=lambda: event.now)
    assert not patience.wait_for(event)
    assert not patience.wait_for(event)
    assert event.now == 110.0
