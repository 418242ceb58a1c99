"""Faults that are switched on, and the request log."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from dra.sim.apiserver import SimApiServer

SLICES = "/apis/resource.k8s.io/v1/resourceslices"


@pytest.fixture
def server() -> Iterator[SimApiServer]:
    with SimApiServer() as running:
        yield running


def get(server: SimApiServer, target: str, timeout: float = 10) -> tuple[int, bytes, http.client.HTTPMessage]:
    parts = urlsplit(server.url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)) as connection:
        connection.request("GET", target)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def test_an_error_hits_the_next_requests_and_then_ends(server: SimApiServer) -> None:
    server.faults.set("error", path="/resourceslices", code=429, retry_after=2, times=2)
    first = get(server, SLICES)
    assert (first[0], first[2]["Retry-After"]) == (429, "2")
    assert json.loads(first[1])["reason"] == "TooManyRequests"
    assert [get(server, SLICES)[0] for _ in range(2)] == [429, 200]


def test_a_fault_leaves_other_paths_and_methods_alone(server: SimApiServer) -> None:
    server.faults.set("error", method="POST", path="/resourceslices", code=500)
    assert get(server, SLICES)[0] == 200


def test_a_closed_connection_gives_no_answer(server: SimApiServer) -> None:
    server.faults.set("close", times=1)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, SLICES)
    assert get(server, SLICES)[0] == 200


def test_a_dropped_body_is_incomplete(server: SimApiServer) -> None:
    server.faults.set("drop", after_bytes=10, times=1)
    with pytest.raises(http.client.IncompleteRead):
        get(server, SLICES)


def test_a_frozen_request_never_gets_an_answer(server: SimApiServer) -> None:
    server.faults.set("freeze")
    with pytest.raises(TimeoutError):
        get(server, SLICES, timeout=0.3)
    server.faults.clear()
    assert get(server, SLICES)[0] == 200


def test_a_stalled_watch_opens_and_stays_silent(server: SimApiServer) -> None:
    server.faults.set("stall")
    parts = urlsplit(server.url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=0.3)) as connection:
        connection.request("GET", f"{SLICES}?watch=1&resourceVersion=0")
        answer = connection.getresponse()
        assert answer.status == 200
        with pytest.raises(TimeoutError):
            answer.readline()
    assert get(server, SLICES)[0] == 200


def test_a_gone_watch_sends_410_on_the_stream(server: SimApiServer) -> None:
    server.faults.set("gone", times=1)
    event = json.loads(get(server, f"{SLICES}?watch=1&resourceVersion=5")[1])
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


def test_a_refusing_server_closes_new_connections(server: SimApiServer) -> None:
    server.faults.refuse()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        get(server, SLICES)
    server.faults.clear()
    assert get(server, SLICES)[0] == 200


def test_every_request_is_counted(server: SimApiServer) -> None:
    get(server, SLICES)
    get(server, f"{SLICES}/none")
    assert server.requests.count("GET", r"/resourceslices$") == 1
    assert [entry.status for entry in server.requests.find(path="/none")] == [404]
    server.requests.clear()
    assert server.requests.count() == 0


def test_a_fault_can_be_meant_for_what_a_request_says_and_name_the_field(server: SimApiServer) -> None:
    cause = {"field": "metadata.name", "reason": "FieldValueInvalid", "message": "not this one"}
    server.faults.set("error", method="POST", path="/events", code=422, body='"unloved"', causes=(cause,))

    def create(name: str) -> tuple[int, dict]:
        parts = urlsplit(server.url)
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)) as connection:
            body = {"metadata": {"name": name}, "involvedObject": {"namespace": "default"}}
            path = "/api/v1/namespaces/default/events"
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    status, refusal = create("unloved")
    assert (status, refusal["details"]["causes"]) == (422, [cause])
    assert create("loved")[0] == 201
