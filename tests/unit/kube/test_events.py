"""Events: written in the background, counted instead of repeated, limited, and never in anybody's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from dra.kube.client import KubeClient
from dra.kube.events import (
    BURST,
    FIRST_FORBIDDEN_SECONDS,
    QUEUE,
    SAME_SECONDS,
    EventRecorder,
    ObjectReference,
)
from tests.unit.kube.fake_clock import FakeClock
from tests.unit.kube.tiny_api import Answer, Hang, TinyApi, status_body

CLAIM = ObjectReference("resource.k8s.io/v1", "ResourceClaim", "train", "uid-1", "team-a")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder(client: KubeClient, clock: FakeClock):
    made = EventRecorder(client, component="gpu.nvidia.com", host="n1", clock=clock)
    yield made
    made.stop()


def settled(api: TinyApi, condition: Callable[[], bool]) -> None:
    api.until(condition)


def test_an_event_tells_who_says_what_about_which_object(api: TinyApi, recorder: EventRecorder) -> None:
    recorder.emit(CLAIM, "Warning", "PrepareFailed", "DRA-DEVICE-HELD: gpu-0 is held by claim team-b/old")
    settled(api, lambda: bool(api.all("events")))
    (event,) = api.all("events")
    assert event["metadata"]["namespace"] == "team-a"
    assert event["involvedObject"] == {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "name": "train", "uid": "uid-1", "namespace": "team-a",
    }  # fmt: skip
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "PrepareFailed", 1)
    assert event["message"].startswith("DRA-DEVICE-HELD")
    assert event["source"] == {"component": "gpu.nvidia.com", "host": "n1"}


def test_the_same_event_again_raises_its_count(
    api: TinyApi, recorder: EventRecorder, clock: FakeClock
) -> None:
    for _ in range(3):
        recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
        clock.advance(1)
    settled(api, lambda: [event["count"] for event in api.all("events")] == [3])
    (event,) = api.all("events")
    assert event["firstTimestamp"] < event["lastTimestamp"]


def test_after_a_while_it_is_a_new_event(api: TinyApi, recorder: EventRecorder, clock: FakeClock) -> None:
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
    settled(api, lambda: len(api.all("events")) == 1)
    clock.advance(SAME_SECONDS + 1)
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
    settled(api, lambda: len(api.all("events")) == 2)


def test_an_event_that_expired_in_the_api_is_written_anew(
    api: TinyApi, recorder: EventRecorder, clock: FakeClock
) -> None:
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
    settled(api, lambda: len(api.all("events")) == 1)
    api.wipe("events")
    clock.advance(2)
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
    settled(api, lambda: [event["count"] for event in api.all("events")] == [1])


def test_one_object_cannot_flood_and_does_not_silence_others(api: TinyApi, recorder: EventRecorder) -> None:
    other = ObjectReference("v1", "Node", "n1", "uid-2")
    for number in range(3 * BURST):
        recorder.emit(CLAIM, "Normal", "Noise", f"message {number}")
    recorder.emit(other, "Warning", "GpuLost", "gpu-3")
    settled(api, lambda: any(event["reason"] == "GpuLost" for event in api.all("events")))
    assert sum(event["reason"] == "Noise" for event in api.all("events")) == BURST
    lost = next(event for event in api.all("events") if event["reason"] == "GpuLost")
    assert lost["metadata"]["namespace"] == "default", "events on cluster-scoped objects live there"
    assert recorder.dropped == 2 * BURST


def test_the_caller_never_waits_for_a_server_that_hangs(api: TinyApi, recorder: EventRecorder) -> None:
    api.faults.append(lambda r: Hang() if r.plural == "events" else None)
    began = time.monotonic()
    for number in range(2 * QUEUE):
        recorder.emit(CLAIM, "Normal", "Noise", f"message {number}")
    assert time.monotonic() - began < 10
    assert recorder.dropped >= QUEUE - 1


def test_without_the_right_to_write_events_nobody_keeps_asking(
    api: TinyApi, recorder: EventRecorder, clock
) -> None:
    api.faults.append(
        lambda r: Answer(403, status_body(403, "Forbidden", "no")) if r.plural == "events" else None
    )
    for number in range(5):
        recorder.emit(CLAIM, "Normal", "Noise", f"message {number}")
    settled(api, lambda: recorder.dropped == 5)
    assert api.count("POST", "events") == 1
    api.faults.clear()
    clock.advance(601)
    recorder.emit(CLAIM, "Normal", "Late", "now it may")
    settled(api, lambda: len(api.all("events")) == 1)


def test_a_server_that_refuses_while_it_starts_is_asked_again_soon(
    api: TinyApi, recorder: EventRecorder, clock
) -> None:
    api.faults.append(
        lambda r: Answer(403, status_body(403, "Forbidden", "no")) if r.plural == "events" else None
    )
    recorder.emit(CLAIM, "Normal", "Early", "the roles are not read yet")
    settled(api, lambda: recorder.dropped == 1)
    api.faults.clear()
    clock.advance(FIRST_FORBIDDEN_SECONDS + 0.1)
    recorder.emit(CLAIM, "Normal", "Later", "now it may")
    settled(api, lambda: len(api.all("events")) == 1)


def test_a_right_that_stays_missing_is_asked_for_less_and_less(
    api: TinyApi, recorder: EventRecorder, clock
) -> None:
    api.faults.append(
        lambda r: Answer(403, status_body(403, "Forbidden", "no")) if r.plural == "events" else None
    )
    for number in range(3):
        clock.advance(FIRST_FORBIDDEN_SECONDS + 0.1)
        recorder.emit(CLAIM, "Normal", "Noise", f"message {number}")
        settled(api, lambda number=number: recorder.dropped == number + 1)
    assert api.count("POST", "events") == 2


def test_a_namespace_that_is_being_deleted_silences_no_other(api: TinyApi, recorder: EventRecorder) -> None:
    text = "unable to create new content in namespace team-a because it is being terminated"
    api.faults.append(
        lambda r: (
            Answer(403, status_body(403, "Forbidden", text))
            if r.plural == "events" and "/team-a/" in r.path
            else None
        )
    )
    recorder.emit(CLAIM, "Warning", "Lost", "said to nobody")
    recorder.emit(replace(CLAIM, namespace="team-b", uid="uid-2"), "Warning", "Heard", "said to somebody")
    settled(api, lambda: len(api.all("events")) == 1)
    assert recorder.dropped == 1


def test_an_event_survives_a_server_that_is_away_for_a_moment(api: TinyApi, recorder: EventRecorder) -> None:
    body = status_body(503, "ServiceUnavailable", "starting")
    answers = iter([Answer(503, body), Answer(503, body)])
    api.faults.append(lambda r: next(answers, None) if r.plural == "events" else None)
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
    settled(api, lambda: len(api.all("events")) == 1)
    assert recorder.dropped == 0


def test_stop_writes_what_is_queued(api: TinyApi, client: KubeClient) -> None:
    recorder = EventRecorder(client, component="c")
    for number in range(5):
        recorder.emit(CLAIM, "Normal", "Last", f"word {number}")
    recorder.stop(timeout_seconds=30)
    assert len(api.all("events")) == 5
    recorder.emit(CLAIM, "Normal", "Late", "after the end")
    recorder.stop()
    assert len(api.all("events")) == 5


def test_an_event_for_which_there_was_no_thread_is_written_with_the_next(
    api: TinyApi, recorder: EventRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "events":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-0")
    monkeypatch.setattr(threading.Thread, "start", start)
    recorder.emit(CLAIM, "Normal", "Prepared", "gpu-1")
    settled(api, lambda: [event["message"] for event in api.all("events")] == ["gpu-0", "gpu-1"])
