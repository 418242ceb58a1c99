import threading

import pynvml
import pytest

from dra.errors import DraError, StackError
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import HoldPolicy, NvmlSession
from dra.values import PciAddress
from tests.unit.nvml.nvml_fake import FakeNvml, gpus

GPU0 = PciAddress.parse("0000:10:00.0")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def make():
    sessions = []

    def build(give, **options):
        session = NvmlSession(InjectedLibrary(give if callable(give) else lambda: give), **options)
        sessions.append(session)
        return session

    yield build
    for session in sessions:
        session.close()
    assert pynvml.nvmlLib is None


def count(api):
    return api.call("nvmlDeviceGetCount")


def test_nothing_is_opened_before_the_first_call(make):
    library = FakeNvml(gpus(2))
    session = make(library)
    assert not session.state.is_open
    assert library.inits == 0
    assert session.run(count) == 2
    assert session.state.driver_version == "580.95.05"


def test_a_library_that_comes_later_is_picked_up_by_the_next_call(make):
    there = []

    def give():
        if not there:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return there[0]

    session = make(give)
    for _ in range(2):
        with pytest.raises(StackError) as caught:
            session.run(count)
        assert caught.value.code == "DRA-NVML-LIBRARY-NOT-FOUND"
        assert caught.value.retryable
        assert caught.value.remedy
    there.append(FakeNvml(gpus(1)))
    assert session.run(count) == 1


def test_a_lost_session_is_opened_again_without_the_caller_noticing(make):
    library = FakeNvml(gpus(2))
    session = make(library)
    session.run(count)
    library.references = 0  # as a driver reload leaves it
    assert session.run(count) == 2
    assert session.state.generation == 2


def test_a_session_that_stays_lost_is_reported_after_one_retry(make):
    library = FakeNvml(gpus(1))
    session = make(library)
    session.run(count)
    library.faults["nvmlDeviceGetCount_v2", None] = pynvml.NVML_ERROR_UNINITIALIZED
    with pytest.raises(StackError) as caught:
        session.run(count)
    assert caught.value.code == "DRA-NVML-SESSION-LOST"
    assert library.calls["nvmlInitWithFlags"] == 2


def test_a_lost_gpu_does_not_end_the_session(make):
    library = FakeNvml(gpus(2))
    library.faults["nvmlDeviceGetName", 0x10] = pynvml.NVML_ERROR_GPU_IS_LOST
    session = make(library)
    with pytest.raises(DraError) as caught:
        session.run(lambda api: api.call("nvmlDeviceGetName", api.handle(GPU0), subject=str(GPU0)))
    assert caught.value.code == "DRA-NVML-GPU-LOST"
    assert "0000:10:00.0" in caught.value.message
    assert session.state.is_open
    assert library.shutdowns == 0


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "DRA-NVML-DRIVER-NOT-LOADED", "modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "DRA-NVML-VERSION-MISMATCH", "Reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "DRA-NVML-NO-PERMISSION", "privileged"),
        (pynvml.NVML_ERROR_UNKNOWN, "DRA-NVML-UNKNOWN", "dmesg"),
        (777, "DRA-NVML-OTHER-CODE", "dmesg"),
    ],
)
def test_what_stops_the_start_is_named_with_a_remedy_and_tried_again(make, number, code, says):
    library = FakeNvml(gpus(1))
    library.faults["nvmlInitWithFlags", None] = number
    session = make(library)
    with pytest.raises(StackError) as caught:
        session.run(count)
    assert caught.value.code == code
    assert says in caught.value.remedy
    library.faults.clear()
    assert session.run(count) == 1


def test_a_replaced_library_means_a_new_session_with_its_own_functions(make):
    old, new = FakeNvml(gpus(1), driver="570.10"), FakeNvml(gpus(3), driver="580.20")
    now = [old]
    session = make(lambda: now[0])
    assert session.run(count) == 1
    assert session.refresh() is False
    now[0] = new
    assert session.refresh() is True
    assert session.run(count) == 3
    assert session.state.driver_version == "580.20"
    assert (old.shutdowns, new.inits) == (1, 1)


def test_a_reloaded_kernel_module_means_a_new_session(make):
    library, version = FakeNvml(gpus(1)), ["580.1"]
    session = make(library, kernel_version=lambda: version[0])
    session.refresh()
    version[0] = "580.2"
    assert session.refresh() is True
    assert library.inits == 2


def test_a_library_that_vanishes_closes_the_session(make):
    library = FakeNvml(gpus(1))
    there = [library]

    def give():
        if not there:
            raise OSError("gone")
        return there[0]

    session = make(give)
    session.run(count)
    there.clear()
    with pytest.raises(StackError, match="gone"):
        session.refresh()
    assert library.shutdowns == 1
    assert not session.state.is_open


def test_an_idle_session_is_closed_after_a_while_and_never_while_held(make):
    library, clock = FakeNvml(gpus(1)), Clock()
    session = make(library, clock=clock, linger_seconds=5)
    session.run(count)
    clock.now += 3
    assert session.tidy() == pytest.approx(2)
    with session.hold("health"):
        clock.now += 100
        session.tidy()
        assert session.state.is_open
        assert session.state.holders == ("health",)
    session.tidy()
    assert not session.state.is_open
    assert not library.open


def test_hold_always_stays_open_and_hold_never_closes_after_each_call(make):
    clock = Clock()
    always = make(FakeNvml(gpus(1)), clock=clock, hold=HoldPolicy.ALWAYS)
    always.run(count)
    clock.now += 1000
    always.tidy()
    assert always.state.is_open
    always.close()
    library = FakeNvml(gpus(1))
    never = make(library, clock=clock, hold=HoldPolicy.NEVER)
    assert never.run(count) == 1
    assert not library.open
    with pytest.raises(StackError, match="nvml-hold=never"), never.hold("health"):
        pass


def test_release_tells_holders_waits_for_calls_and_keeps_away_until_resume(make):
    library = FakeNvml(gpus(1))
    session = make(library)
    gate = threading.Event()
    holding, left = threading.Event(), threading.Event()

    def health():
        with session.hold("health") as hold:
            session.run(count)
            holding.set()
            hold.let_go.wait(10)
        left.set()

    thread = threading.Thread(target=health)
    thread.start()
    assert holding.wait(60)
    assert session.release("driver unload") is True
    assert left.wait(60)
    thread.join()
    assert not library.open
    with pytest.raises(StackError) as caught:
        session.run(count)
    assert caught.value.code == "DRA-NVML-RELEASED"
    assert "driver unload" in caught.value.message
    session.resume()
    assert session.run(count) == 1
    gate.set()


def test_release_says_no_while_a_call_is_stuck_and_lets_go_when_it_returns(make):
    library = FakeNvml(gpus(2))
    gate = library.hangs["nvmlDeviceGetName", 0x10] = threading.Event()
    session = make(library)
    with pytest.raises(DraError, match="has not returned"):
        session.run(
            lambda api: api.call("nvmlDeviceGetName", api.handle(GPU0)),
            subject=str(GPU0),
            deadline_seconds=0.05,
        )
    assert session.release("reset", timeout_seconds=0.05) is False
    assert library.open  # never shut down under a call
    gate.set()
    for _ in range(200):
        if not library.open:
            break
        threading.Event().wait(0.01)
    assert not library.open


def test_release_waits_for_an_opening_that_is_under_way(make):
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlInitWithFlags", None] = threading.Event()
    session = make(library)
    errors = []

    def caller():
        with pytest.raises(StackError) as caught:
            session.run(count)
        errors.append(caught.value.code)

    thread = threading.Thread(target=caller)
    thread.start()
    assert library.entered.wait(60)
    assert session.release("reset", timeout_seconds=0.05) is False
    gate.set()
    thread.join(5)
    assert errors == ["DRA-NVML-RELEASED"]
    assert session.release("reset") is True
    assert not library.open


def test_release_says_no_while_an_earlier_session_is_still_stuck(make):
    library = FakeNvml(gpus(2))
    gate = library.hangs["nvmlDeviceGetName", 0x10] = threading.Event()
    session = make(library)
    with pytest.raises(DraError, match="has not returned"):
        session.run(
            lambda api: api.call("nvmlDeviceGetName", api.handle(GPU0)),
            subject=str(GPU0),
            deadline_seconds=0.05,
        )
    session.reopen("a new library", timeout_seconds=0.05)
    assert session.run(count) == 2
    assert session.release("reset", timeout_seconds=0.1) is False
    gate.set()
    assert session.release("reset") is True
    assert not library.open


def test_a_call_left_behind_touches_nothing_when_it_returns(make):
    library = FakeNvml(gpus(2))
    gate = library.hangs["nvmlDeviceGetName", 0x10] = threading.Event()
    session = make(library)
    recovered = threading.Event()
    session.on_recovered(lambda subject: recovered.set())

    def call(api):
        handle = api.handle(GPU0)
        api.call("nvmlDeviceGetName", handle)
        return api.call("nvmlDeviceGetUUID", handle)

    with pytest.raises(DraError):
        session.run(call, subject=str(GPU0), deadline_seconds=0.05)
    gate.set()
    assert recovered.wait(60)
    assert library.calls["nvmlDeviceGetUUID"] == 0
    library.hangs.clear()
    assert session.run(call, subject=str(GPU0)).startswith("GPU-")


def test_an_initialisation_that_hangs_fails_fast_and_its_late_session_is_closed(make):
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlInitWithFlags", None] = threading.Event()
    session = make(library, init_seconds=0.05)
    recovered = threading.Event()
    session.on_recovered(lambda subject: recovered.set())
    for _ in range(2):
        with pytest.raises(StackError) as caught:
            session.run(count)
        assert caught.value.code == "DRA-NVML-HUNG"
    assert library.calls["nvmlInitWithFlags"] == 1
    gate.set()
    assert recovered.wait(60)
    assert not library.open
    library.hangs.clear()
    assert session.run(count) == 1


def test_a_second_session_of_the_process_is_refused_while_the_first_is_open(make):
    first, second = make(FakeNvml(gpus(1))), make(FakeNvml(gpus(2)))
    assert first.run(count) == 1
    with pytest.raises(StackError) as caught:
        second.run(count)
    assert caught.value.code == "DRA-NVML-BUSY"
    first.close()
    assert second.run(count) == 2


def test_a_function_the_driver_does_not_have_is_an_answer_not_a_crash(make):
    session = make(FakeNvml(gpus(1)))
    assert session.run(lambda api: api.optional("nvmlDeviceGetSerial", api.handle(GPU0))) is None
    assert session.run(lambda api: api.optional("nvmlNoSuchFunctionAnywhere")) is None


def test_calls_to_several_gpus_share_one_session_although_it_is_never_held(make):
    library = FakeNvml(gpus(4))
    session = make(library, hold=HoldPolicy.NEVER)
    quick = {f"{each}": count for each in range(40)}
    for _ in range(5):
        assert set(session.run_each(quick).values()) == {4}
    assert not session.state.is_open
    assert library.inits == library.shutdowns == 5
