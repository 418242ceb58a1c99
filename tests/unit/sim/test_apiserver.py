"""The simulated API server over real sockets, as a client sees it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from dra.sim.apiserver import SimApiServer

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
MERGE = "application/merge-patch+json"


@pytest.fixture
def server() -> Iterator[SimApiServer]:
    with SimApiServer(time_scale=0.2) as running:
        yield running


def connect(server: SimApiServer, timeout: float = 10) -> http.client.HTTPConnection:
    parts = urlsplit(server.url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def call(
    server: SimApiServer, method: str, target: str, body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    with closing(connect(server)) as connection:
        raw = None if body is None else json.dumps(body)
        connection.request(method, target, raw, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        content = answer.read()
        return (
            answer.status,
            json.loads(content) if content[:1] in b"{[" else content.decode(),
            answer.headers,
        )


def slice_of(name: str, *, node: str = "n1", **meta: Any) -> dict[str, Any]:
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "d.example", "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name, **meta},
        "spec": spec,
    }


def watch_lines(server: SimApiServer, target: str) -> list[dict[str, Any]]:
    with closing(connect(server)) as connection:
        connection.request("GET", target)
        return [json.loads(line) for line in connection.getresponse().read().splitlines()]


def test_a_created_object_comes_back_with_uid_version_time_and_generation(server: SimApiServer) -> None:
    status, obj, _ = call(server, "POST", SLICES, slice_of("a"))
    assert status == 201
    meta = obj["metadata"]
    assert len(meta["uid"]) == 36
    assert int(meta["resourceVersion"]) > 0
    assert meta["creationTimestamp"].endswith("Z")
    assert meta["generation"] == 1
    assert call(server, "GET", f"{SLICES}/a")[1] == obj


def test_one_connection_serves_many_requests(server: SimApiServer) -> None:
    with closing(connect(server)) as connection:
        for _ in range(3):
            connection.request("GET", SLICES)
            answer = connection.getresponse()
            assert answer.status == 200
            answer.read()
            assert connection.sock is not None


def test_a_second_creation_is_refused_as_already_existing(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a"))
    status, answer, _ = call(server, "POST", SLICES, slice_of("a"))
    assert (status, answer["reason"]) == (409, "AlreadyExists")
    assert answer["message"] == 'resourceslices.resource.k8s.io "a" already exists'


def test_generate_name_adds_five_characters_to_at_most_fifty_eight(server: SimApiServer) -> None:
    body = slice_of("")
    body["metadata"] = {"generateName": "x" * 70 + "-"}
    _, obj, _ = call(server, "POST", SLICES, body)
    assert obj["metadata"]["name"].startswith("x" * 58)
    assert len(obj["metadata"]["name"]) == 63


def test_a_put_with_an_old_version_conflicts(server: SimApiServer) -> None:
    _, first, _ = call(server, "POST", SLICES, slice_of("a"))
    call(server, "PATCH", f"{SLICES}/a", {"metadata": {"labels": {"x": "1"}}}, **{"Content-Type": MERGE})
    status, answer, _ = call(server, "PUT", f"{SLICES}/a", first)
    assert (status, answer["reason"]) == (409, "Conflict")


def test_a_write_that_changes_nothing_keeps_the_version(server: SimApiServer) -> None:
    _, first, _ = call(server, "POST", SLICES, slice_of("a"))
    _, second, _ = call(server, "PUT", f"{SLICES}/a", first)
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_generation_moves_with_the_spec_only(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a"))
    _, labelled, _ = call(
        server, "PATCH", f"{SLICES}/a", {"metadata": {"labels": {"x": "1"}}}, **{"Content-Type": MERGE}
    )
    _, changed, _ = call(
        server, "PATCH", f"{SLICES}/a", {"spec": {"pool": {"generation": 2}}}, **{"Content-Type": MERGE}
    )
    assert labelled["metadata"]["generation"] == 1
    assert changed["metadata"]["generation"] == 2


def test_a_list_selects_by_node_and_driver(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a", node="n1"))
    call(server, "POST", SLICES, slice_of("b", node="n2"))
    _, found, _ = call(server, "GET", f"{SLICES}?fieldSelector=spec.nodeName%3Dn2%2Cspec.driver%3Dd.example")
    assert [item["metadata"]["name"] for item in found["items"]] == ["b"]


def test_a_watch_gives_what_happened_after_its_version(server: SimApiServer) -> None:
    _, listed, _ = call(server, "GET", SLICES)
    call(server, "POST", SLICES, slice_of("a"))
    call(server, "DELETE", f"{SLICES}/a")
    version = listed["metadata"]["resourceVersion"]
    events = watch_lines(server, f"{SLICES}?watch=1&timeoutSeconds=1&resourceVersion={version}")
    assert [event["type"] for event in events] == ["ADDED", "DELETED"]


def test_an_open_watch_hears_of_a_change_at_once(server: SimApiServer) -> None:
    with closing(connect(server)) as connection:
        connection.request("GET", f"{SLICES}?watch=1&resourceVersion=0")
        answer = connection.getresponse()
        maker = threading.Thread(target=call, args=(server, "POST", SLICES, slice_of("a")))
        maker.start()
        event = json.loads(answer.readline())
        maker.join()
    assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "a")


def test_an_object_that_leaves_the_selection_is_deleted_for_the_watcher(server: SimApiServer) -> None:
    _, first, _ = call(server, "POST", SLICES, slice_of("a", labels={"x": "1"}))
    call(server, "PATCH", f"{SLICES}/a", {"metadata": {"labels": {"x": "2"}}}, **{"Content-Type": MERGE})
    version = first["metadata"]["resourceVersion"]
    events = watch_lines(
        server, f"{SLICES}?watch=1&timeoutSeconds=1&resourceVersion={version}&labelSelector=x%3D1"
    )
    assert [event["type"] for event in events] == ["DELETED"]


def test_a_watch_from_a_compacted_version_says_expired(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a"))
    server.expire_watches()
    events = watch_lines(server, f"{SLICES}?watch=1&timeoutSeconds=1&resourceVersion=1")
    assert (events[0]["type"], events[0]["object"]["code"]) == ("ERROR", 410)


def test_a_finalizer_holds_the_object_until_it_is_removed(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a", finalizers=["d.example/f"]))
    _, marked, _ = call(server, "DELETE", f"{SLICES}/a")
    assert "deletionTimestamp" in marked["metadata"]
    assert call(server, "GET", f"{SLICES}/a")[0] == 200
    call(server, "PATCH", f"{SLICES}/a", {"metadata": {"finalizers": None}}, **{"Content-Type": MERGE})
    assert call(server, "GET", f"{SLICES}/a")[0] == 404


def test_delete_preconditions_must_hold(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a"))
    wrong = {"preconditions": {"uid": "11111111-1111-1111-1111-111111111111"}}
    assert call(server, "DELETE", f"{SLICES}/a", wrong)[0] == 409


def test_an_object_whose_owner_is_gone_is_collected(server: SimApiServer) -> None:
    _, node, _ = call(server, "POST", "/api/v1/nodes", {"metadata": {"name": "n1"}})
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": node["metadata"]["uid"]}
    _, made, _ = call(server, "POST", SLICES, slice_of("a", ownerReferences=[owner]))
    with closing(connect(server)) as connection:
        connection.request("GET", f"{SLICES}?watch=1&resourceVersion={made['metadata']['resourceVersion']}")
        answer = connection.getresponse()
        call(server, "DELETE", "/api/v1/nodes/n1")
        assert json.loads(answer.readline())["type"] == "DELETED"


def test_a_deleted_namespace_takes_its_content_along(server: SimApiServer) -> None:
    call(server, "POST", "/api/v1/namespaces", {"metadata": {"name": "x"}})
    _, made, _ = call(server, "POST", "/api/v1/namespaces/x/configmaps", {"metadata": {"name": "c"}})
    with closing(connect(server)) as connection:
        version = made["metadata"]["resourceVersion"]
        connection.request("GET", f"/api/v1/namespaces?watch=1&resourceVersion={version}")
        answer = connection.getresponse()
        call(server, "DELETE", "/api/v1/namespaces/x")
        kinds = [json.loads(answer.readline())["type"] for _ in range(2)]
    assert kinds == ["MODIFIED", "DELETED"]
    assert call(server, "GET", "/api/v1/namespaces/x/configmaps/c")[0] == 404


def test_beta1_clients_see_devices_wrapped_in_basic(server: SimApiServer) -> None:
    body = slice_of("a")
    body["spec"]["devices"][0]["attributes"] = {"x": {"int": 1}}
    call(server, "POST", SLICES, body)
    _, old, _ = call(server, "GET", "/apis/resource.k8s.io/v1beta1/resourceslices/a")
    assert old["spec"]["devices"] == [{"name": "gpu-0", "basic": {"attributes": {"x": {"int": 1}}}}]


def test_a_token_keeps_strangers_out() -> None:
    with SimApiServer(token="secret") as server:
        assert call(server, "GET", SLICES)[0] == 401
        assert call(server, "GET", SLICES, Authorization="Bearer wrong")[0] == 401
        assert call(server, "GET", SLICES, Authorization="Bearer secret")[0] == 200


def test_a_stopped_server_keeps_its_objects_and_port(server: SimApiServer) -> None:
    call(server, "POST", SLICES, slice_of("a"))
    url = server.url
    server.stop()
    with pytest.raises(OSError):
        call(server, "GET", SLICES)
    server.start()
    assert server.url == url
    assert call(server, "GET", f"{SLICES}/a")[0] == 200
