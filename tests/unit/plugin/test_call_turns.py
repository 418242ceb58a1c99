"""Many calls at once: those that end pods never wait for those that start pods, and all are answered in time."""

from __future__ import annotations

import threading
import time

import pytest

from dra.errors import HostError
from dra.pb.services import PREPARE_V1, UNPREPARE_V1
from dra.plugin.call_pool import CallPool
from dra.plugin.prepare_service import PrepareService
from dra.plugin.server import MAX_STREAMS_PER_CONNECTION


class Context:
    """A call as gRPC shows it: how long its caller still waits, and whether it does."""

    def __init__(self, *, left=45.0, active=True):
        self.left, self.active = left, active

    def time_remaining(self):
        return self.left

    def is_active(self):
        return self.active


def request_of(method, *uids):
    request = method.request()
    for uid in uids:
        request.claims.add(namespace="default", name=f"claim-{uid}", uid=uid)
    return request


@pytest.fixture
def service_of(engine):
    """Make a service and give its prepare call."""
    made = []

    def make(**options):
        made.append(PrepareService(engine, **options))
        return dict(made[-1].methods())[PREPARE_V1]

    yield make
    for service in made:
        service.shut()


@pytest.fixture
def busy(engine):
    """Hold a prepare call until the test ends; gives the starter."""
    engine.gate = threading.Event()
    threads = []

    def hold(prepare):
        threads.append(threading.Thread(target=prepare, args=(request_of(PREPARE_V1, "holder"), Context())))
        threads[-1].start()
        assert engine.entered.wait(60)

    yield hold
    engine.gate.set()
    for thread in threads:
        thread.join(5)


def test_pods_end_and_the_probe_is_answered_while_two_hundred_pods_wait_to_start(plugin, dial, engine):
    endpoint = plugin()
    engine.gate = threading.Event()
    client = dial(endpoint.sockets.service)
    assert MAX_STREAMS_PER_CONNECTION > 200
    call = client.channel.unary_unary(
        PREPARE_V1.path,
        request_serializer=PREPARE_V1.request.SerializeToString,
        response_deserializer=PREPARE_V1.response.FromString,
    )
    waiting = [call.future(request_of(PREPARE_V1, f"u{n}"), timeout=60) for n in range(200)]
    end = time.monotonic() + 60
    while len(engine.calls) < 64 and time.monotonic() < end:
        time.sleep(0.01)
    try:
        began = time.monotonic()
        for _ in range(3):
            assert list(client.call(UNPREPARE_V1, request_of(UNPREPARE_V1, "done")).claims) == ["done"]
            assert not client.call(PREPARE_V1).claims
        assert time.monotonic() - began < 20
        assert sum(verb == "prepare" for verb, _ in engine.calls) == 64
    finally:
        engine.gate.set()
    assert all(list(future.result().claims) == [f"u{n}"] for n, future in enumerate(waiting))


def test_a_prepare_without_a_turn_in_time_is_refused_with_the_cause(service_of, busy, engine):
    told = []
    prepare = service_of(
        max_prepares=1,
        turn_seconds=0.05,
        on_failure=lambda verb, ref, error: told.append((verb, ref.uid, error)),
    )
    busy(prepare)
    answer = prepare(request_of(PREPARE_V1, "a", "b"), Context())
    assert set(answer.claims) == {"a", "b"}
    assert answer.claims["a"].error.startswith("DRA-PREPARE-BUSY: 1 other prepare calls")
    assert "API server" in answer.claims["a"].error
    assert [(verb, uid, error.retryable) for verb, uid, error in told] == [
        ("prepare", "a", True), ("prepare", "b", True),
    ]  # fmt: skip
    engine.gate.set()
    assert prepare(request_of(PREPARE_V1, "a"), Context()).claims["a"].devices


def test_a_caller_with_little_time_is_answered_within_it(service_of, busy):
    prepare = service_of(max_prepares=1, turn_seconds=30)
    busy(prepare)
    began = time.monotonic()
    assert "DRA-PREPARE-BUSY" in prepare(request_of(PREPARE_V1, "a"), Context(left=0.2)).claims["a"].error
    assert time.monotonic() - began < 15


def test_a_prepare_that_the_kubelet_gave_up_is_never_begun(service_of, engine):
    prepare = service_of(max_prepares=1)
    for _ in range(3):
        answer = prepare(request_of(PREPARE_V1, "a"), Context(active=False))
        assert answer.claims["a"].error.startswith("DRA-PREPARE-LEFT")
    assert engine.calls == []
    assert prepare(request_of(PREPARE_V1, "a"), Context()).claims["a"].devices


def test_a_bug_of_the_engine_gives_its_turn_back(service_of, engine):
    prepare = service_of(max_prepares=1, turn_seconds=0.05)
    engine.failure = ValueError("odd")
    for _ in range(2):
        assert "DRA-BUG" in prepare(request_of(PREPARE_V1, "a"), Context()).claims["a"].error


def test_a_server_goes_on_where_the_system_gives_no_more_threads(plugin, dial, monkeypatch):
    endpoint = plugin()
    start = threading.Thread.start

    def refuse(thread):
        if thread.name in ("prepare", "unprepare", "registration"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    client = dial(endpoint.sockets.service)
    call = client.channel.unary_unary(
        PREPARE_V1.path,
        request_serializer=PREPARE_V1.request.SerializeToString,
        response_deserializer=PREPARE_V1.response.FromString,
    )
    many = [call.future(request_of(PREPARE_V1, f"u{n}"), timeout=10) for n in range(20)]
    assert all(future.result().claims for future in many)
    assert client.call(UNPREPARE_V1, request_of(UNPREPARE_V1, "done")).claims


def test_a_pool_that_cannot_have_its_first_thread_says_so_and_opens_later(monkeypatch):
    pool = CallPool("p", threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _thread: (_ for _ in ()).throw(RuntimeError("can't start"))
        )
        with pytest.raises(HostError, match="DRA-HOST-NO-THREADS"):
            pool.open()
        assert isinstance(pool.submit(int).exception(), HostError)
    pool.open()
    assert pool.submit(int, "7").result(5) == 7
    pool.shutdown()
