"""Following a collection through everything that servers do: ends, resets, 410, 429, silence, being away."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dra.kube.client import KubeClient
from dra.kube.reflector import Change, Reflector, ReflectorOptions, plan_changes
from dra.kube.resources import NODES
from tests.unit.kube.fake_clock import FakeClock
from tests.unit.kube.tiny_api import Answer, CloseAtOnce, Reset, Stall, TinyApi, status_body


class Seen:
    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.came = threading.Condition()

    def __call__(self, change: Change) -> None:
        with self.came:
            self.changes.append(change)
            self.came.notify_all()

    def names(self) -> list[tuple[str, str]]:
        return [(c.type, c.object["metadata"]["name"]) for c in self.changes]

    def until(self, count: int, seconds: float = 60.0) -> list[tuple[str, str]]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.changes) >= count, seconds), self.names()
        return self.names()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def follow(client: KubeClient, seen: Seen) -> Iterator[Callable[..., Reflector]]:
    started: list[Reflector] = []

    def start(**options: object) -> Reflector:
        clock = options.pop("clock", None)
        on_list = options.pop("on_list", None)
        reflector = Reflector(
            client, NODES, on_change=seen, on_list=on_list, clock=clock, rng=random.Random(7),
            options=ReflectorOptions(**{"burst": 100, **options}),
        )  # fmt: skip
        started.append(reflector)
        reflector.start()
        return reflector

    yield start
    for reflector in started:
        assert reflector.stop(timeout_seconds=30)


def a_node(name: str, **metadata: object) -> dict:
    return {"metadata": {"name": name, **metadata}}


def test_what_is_there_and_what_happens_later_is_told_in_order(api: TinyApi, follow, seen: Seen) -> None:
    api.put("nodes", a_node("a"))
    reflector = follow()
    assert reflector.synced.wait(60)
    api.put("nodes", a_node("b"))
    api.edit("nodes", "a", lambda node: node.update(x=1))
    api.remove("nodes", "b")
    assert seen.until(4) == [("added", "a"), ("added", "b"), ("modified", "a"), ("deleted", "b")]
    assert [node["metadata"]["name"] for node in reflector.objects()] == ["a"]
    assert reflector.get("a")["x"] == 1
    assert reflector.error is None


def test_a_new_watch_goes_on_where_the_last_one_ended_without_a_new_list(
    api: TinyApi, follow, seen: Seen
) -> None:
    reflector = follow(watch_seconds=1)
    assert reflector.synced.wait(60)
    api.put("nodes", a_node("a"))
    seen.until(1)
    api.until(lambda: len(api.watches("nodes")) >= 2)
    api.put("nodes", a_node("b"))
    assert seen.until(2) == [("added", "a"), ("added", "b")]
    assert api.count("GET", "nodes") == 1
    assert int(api.watches("nodes")[1].query["resourceVersion"]) > int(
        api.watches("nodes")[0].query["resourceVersion"]
    )


def test_bookmarks_are_asked_for_and_move_the_version(api: TinyApi, follow) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Node", "metadata": {"resourceVersion": "4711"}}}
    api.faults.append(
        lambda r: CloseAtOnce((bookmark,)) if r.is_watch and len(api.watches("nodes")) == 1 else None
    )
    reflector = follow()
    api.until(lambda: len(api.watches("nodes")) >= 2)
    first, second = api.watches("nodes")[:2]
    assert first.query["allowWatchBookmarks"] == "true"
    assert second.query["resourceVersion"] == "4711"
    assert reflector.objects() == ()


@pytest.mark.fault("F18")
def test_after_410_a_new_list_tells_what_was_missed(api: TinyApi, follow, seen: Seen) -> None:
    api.put("nodes", a_node("a"))
    api.put("nodes", a_node("b"))
    reflector = follow(watch_seconds=1, clock=FakeClock())
    seen.until(2)
    # The watch that comes next finds its version forgotten, and these three happened meanwhile.
    api.faults.append(lambda r: Answer(410, status_body(410, "Expired", "too old")) if r.is_watch else None)
    api.until(lambda: len(api.watches("nodes")) >= 2)
    api.remove("nodes", "a")
    api.remove("nodes", "b")
    api.put("nodes", a_node("b"))
    api.faults.clear()
    names = seen.until(5)
    assert set(names[2:4]) == {("deleted", "a"), ("deleted", "b")}
    assert names[4] == ("added", "b")
    assert [node["metadata"]["name"] for node in reflector.objects()] == ["b"]


@pytest.mark.fault("F19")
def test_a_silent_connection_is_given_up_and_the_next_list_shows_what_happened(
    api: TinyApi, follow, seen: Seen
) -> None:
    api.put("nodes", a_node("a"))
    api.faults.append(lambda r: Stall() if r.is_watch else None)
    follow(watch_seconds=0, slack_seconds=0.3)
    seen.until(1)
    api.until(lambda: len(api.watches("nodes")) >= 1)
    api.edit("nodes", "a", lambda node: node.update(edited=True))
    assert seen.until(2)[1] == ("modified", "a")


@pytest.mark.parametrize(
    "fault",
    [
        CloseAtOnce(),
        Reset(),
        Answer(500, status_body(500, "InternalError", "etcd leader changed")),
        Answer(410, status_body(410, "Expired", "too old")),
        Answer(200, '{"type":"MODIF', cut_after=9),
    ],
    ids=["ends", "resets", "500", "410", "cut"],
)
@pytest.mark.fault("F18")
def test_a_server_that_ends_every_watch_at_once_gets_at_most_one_request_a_second(
    api: TinyApi, client: KubeClient, fault
) -> None:
    api.faults.append(lambda r: fault if r.is_watch else None)
    clock = FakeClock()
    reflector = Reflector(client, NODES, clock=clock, rng=random.Random(3))
    began = clock.now()
    reflector.start()
    api.until(lambda: clock.now() - began > 300)
    assert reflector.stop(timeout_seconds=30)
    passed = clock.now() - began
    sent = [r for r in api.requests if r.plural == "nodes"]
    assert 5 < len(sent) <= passed + 4
    assert max(clock.waits) <= 30.0


def test_a_server_that_asks_for_patience_gets_it(api: TinyApi, follow, seen: Seen) -> None:
    body = status_body(429, "TooManyRequests", "slow down")
    answers = iter([Answer(429, body, {"Retry-After": "17"})])
    api.faults.append(lambda r: next(answers, None) if r.plural == "nodes" else None)
    api.put("nodes", a_node("a"))
    clock = FakeClock()
    follow(clock=clock)
    seen.until(1)
    assert 17.0 in clock.waits


def test_missing_rights_are_reported_and_asked_for_ever_more_slowly(api: TinyApi, follow) -> None:
    api.faults.append(lambda r: Answer(403, status_body(403, "Forbidden", "no")) if r.is_watch else None)
    clock = FakeClock()
    reflector = follow(clock=clock)
    api.until(lambda: len(api.watches("nodes")) >= 8)
    assert reflector.error is not None
    assert reflector.error.code == "DRA-API-FORBIDDEN"
    assert any(15.0 <= seconds <= 30.0 for seconds in clock.waits)


def test_a_server_that_is_away_is_tried_often_enough_to_be_found_within_three_seconds(
    client_of, seen: Seen
) -> None:
    gone = TinyApi()
    url = gone.url
    gone.stop()
    clock = FakeClock()
    reflector = Reflector(client_of(url), NODES, on_change=seen, clock=clock, rng=random.Random(1))
    reflector.start()
    deadline = time.monotonic() + 10
    while len(clock.waits) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert reflector.stop(timeout_seconds=30)
    assert max(clock.waits) <= 2.5
    assert reflector.error is not None
    assert reflector.error.code == "DRA-API-UNREACHABLE"


def test_stop_interrupts_a_blocking_read_and_a_long_pause(api: TinyApi, client: KubeClient) -> None:
    api.faults.append(lambda r: Stall() if r.is_watch else None)
    reading = Reflector(client, NODES)
    reading.start()
    api.until(lambda: bool(api.watches("nodes")))
    api.faults.insert(
        0, lambda r: Answer(429, status_body(429, "", ""), {"Retry-After": "60"}) if r.plural else None
    )
    pausing = Reflector(client, NODES)
    pausing.start()
    api.until(lambda: api.count("GET", "nodes") >= 2)
    began = time.monotonic()
    assert reading.stop(timeout_seconds=20)
    assert pausing.stop(timeout_seconds=20)
    assert time.monotonic() - began < 20


def test_hurry_cuts_a_pause_short(api: TinyApi, follow, seen: Seen) -> None:
    api.put("nodes", a_node("a"))
    api.faults.append(
        lambda r: Answer(429, status_body(429, "", ""), {"Retry-After": "60"}) if r.plural else None
    )
    reflector = follow()
    api.until(lambda: api.count("GET", "nodes") >= 1)
    api.faults.clear()
    deadline = time.monotonic() + 5
    while not reflector.synced.is_set() and time.monotonic() < deadline:
        reflector.hurry()
        reflector.synced.wait(0.02)
    assert seen.until(1) == [("added", "a")]


def test_a_crash_in_the_owners_callback_does_not_end_the_watch(api: TinyApi, client: KubeClient) -> None:
    api.put("nodes", a_node("a"))
    calls: list[str] = []

    def crash(change: Change) -> None:
        calls.append(change.object["metadata"]["name"])
        if len(calls) == 1:
            raise RuntimeError("bug")

    reflector = Reflector(client, NODES, on_change=crash, clock=FakeClock())
    reflector.start()
    api.until(lambda: len(api.watches("nodes")) >= 1)
    api.put("nodes", a_node("b"))
    api.until(lambda: "b" in calls)
    assert reflector.stop(timeout_seconds=30)


def test_an_object_made_again_under_its_name_is_deleted_and_added() -> None:
    old = {("", "a"): a_node("a", uid="1", resourceVersion="5")}
    new = {("", "a"): a_node("a", uid="2", resourceVersion="9")}
    assert [(c.type, c.object["metadata"]["uid"]) for c in plan_changes(old, new)] == [
        ("deleted", "1"),
        ("added", "2"),
    ]
    assert plan_changes(new, new) == []
