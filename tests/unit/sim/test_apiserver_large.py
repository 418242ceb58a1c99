"""The simulated API server with many nodes: what is about one node costs the same however many there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.sim.apiserver import SimApiServer, selectors
from dra.sim.apiserver.exchange import Request
from dra.sim.apiserver.storage import Storage

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
NODES = 40
# A list of one node's slices looks at two fields of each of them.
LOOKS = 4


def slice_of(name: str, node: str, **meta: Any) -> dict[str, Any]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "d.example", "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]}
    metadata = {"name": name, **meta}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


def names(server: SimApiServer, selector: str) -> list[str]:
    status, answer = server.request("GET", f"{SLICES}?fieldSelector={selector}")
    assert status == 200, answer
    return [item["metadata"]["name"] for item in answer["items"]]


@pytest.fixture
def server() -> SimApiServer:
    made = SimApiServer()
    for number in range(NODES):
        made.create(SLICES, slice_of(f"s-{number:02}", f"node-{number}"))
    return made


def test_a_list_of_one_nodes_slices_looks_at_those_only(server, monkeypatch):
    looks = []
    real = selectors._field_value
    monkeypatch.setattr(selectors, "_field_value", lambda *args: looks.append(args) or real(*args))
    assert names(server, "spec.driver%3Dd.example,spec.nodeName%3Dnode-7") == ["s-07"]
    assert len(looks) <= LOOKS


def test_what_is_made_moved_and_deleted_after_the_first_list_is_in_the_next(server):
    chosen = "spec.nodeName%3Dnode-7"
    assert names(server, chosen) == ["s-07"]
    server.create(SLICES, slice_of("a-second", "node-7"))
    assert names(server, chosen) == ["a-second", "s-07"]
    server.request("DELETE", f"{SLICES}/s-07")
    assert names(server, chosen) == ["a-second"]
    assert names(server, "spec.nodeName%3Dnobody") == []
    assert len(names(server, "spec.nodeName!%3Dnode-7")) == NODES - 1


KEYS = st.tuples(st.sampled_from(["", "ns"]), st.sampled_from("abc"))


@given(
    st.lists(st.tuples(KEYS, st.none() | st.sampled_from(["", "n1", "n2"])), max_size=30), st.integers(0, 30)
)
@settings(max_examples=100)
def test_the_index_holds_what_a_look_at_every_object_finds(writes, indexed_after):
    storage = Storage()
    index = None

    def node_of(obj: dict[str, Any]) -> str:
        return str(obj["node"])

    for number, (key, node) in enumerate(writes):
        if number == indexed_after:
            index = storage.index("r", "node", node_of)
        if node is not None:
            storage.put("r", key, {"metadata": {}, "node": node})
        elif storage.get("r", key) is not None:
            storage.delete("r", key)
    index = index or storage.index("r", "node", node_of)
    for node in ("", "n1", "n2", "n3"):
        revision, objects = storage.snapshot("r")
        wanted = {key: obj for key, obj in objects.items() if obj["node"] == node}
        assert storage.selected("r", index, node) == (revision, wanted)


def test_a_watch_of_one_nodes_slices_waits_for_those_only(server, monkeypatch):
    target = f"{SLICES}?watch=1&fieldSelector=spec.nodeName%3Dnode-7"
    answer = server.api.handle(Request("GET", target, {"accept": "application/json"}))
    assert answer.stream is not None
    assert b'"s-07"' in next(answer.stream)
    bucket = server.storage.bucket("resource.k8s.io/resourceslices")
    own = bucket.indexes["spec.nodeName"].changed("node-7")
    waited, woken = [], []
    monkeypatch.setattr(bucket.changed, "wait", lambda _seconds: waited.append("any"))
    monkeypatch.setattr(own, "wait", lambda _seconds: waited.append("own"))
    monkeypatch.setattr(own, "notify_all", lambda: woken.append("own"))
    for number in range(3):
        server.create(SLICES, slice_of(f"t-{number:02}", f"other-{number}"))
        assert next(answer.stream) == b""
    assert (waited, woken) == (["own"] * 3, [])
    server.create(SLICES, slice_of("u-1", "node-7"))
    server.create(SLICES, slice_of("u-2", "node-7"))
    # Nothing that was written before it waits is slept through.
    assert [b'"u-1"' in next(answer.stream), b'"u-2"' in next(answer.stream)] == [True, True]
    assert (waited, woken) == (["own"] * 3, ["own"] * 2)


# -- the garbage collector ---------------------------------------------------------------------------------------


def configmap(server: SimApiServer, name: str, *owners: dict[str, Any], **meta: Any) -> dict[str, Any]:
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
         "blockOwnerDeletion": True}
        for owner in owners
    ]  # fmt: skip
    body = {"metadata": {"name": name, "ownerReferences": references, **meta}}
    return server.create("/api/v1/namespaces/default/configmaps", body)


def left(server: SimApiServer) -> set[str]:
    _, answer = server.request("GET", "/api/v1/namespaces/default/configmaps")
    # A namespace gets its own some time after it was made.
    return {item["metadata"]["name"] for item in answer["items"]} - {"kube-root-ca.crt"}


def settle(server: SimApiServer) -> None:
    while server.collector.sweep():
        pass


def test_a_write_that_gives_the_collector_nothing_to_do_is_not_looked_at(monkeypatch):
    server = SimApiServer()
    owner = configmap(server, "owner")
    settle(server)
    visits = []
    real = server.collector._visit
    monkeypatch.setattr(server.collector, "_visit", lambda *place: visits.append(place) or real(*place))
    for number in range(20):
        configmap(server, f"owned-{number}", owner)
    settle(server)
    assert visits == []


def test_what_loses_all_its_owners_goes_and_takes_along_what_it_owned():
    server = SimApiServer()
    one, other = configmap(server, "one"), configmap(server, "other")
    both = configmap(server, "both", one, other)
    configmap(server, "below", both)
    configmap(server, "kept", one, finalizers=["example.com/wait"])
    server.request("DELETE", "/api/v1/namespaces/default/configmaps/one")
    settle(server)
    assert left(server) == {"other", "both", "below", "kept"}
    server.request("DELETE", "/api/v1/namespaces/default/configmaps/other")
    settle(server)
    assert left(server) == {"kept"}


def test_an_owner_in_foreground_deletion_waits_for_what_comes_to_it_late():
    server = SimApiServer()
    owner = configmap(server, "owner")
    configmap(server, "first", owner, finalizers=["example.com/wait"])
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    server.request("DELETE", "/api/v1/namespaces/default/configmaps/owner", options)
    settle(server)
    configmap(server, "late", owner)
    settle(server)
    assert left(server) == {"owner", "first"}
    path = "/api/v1/namespaces/default/configmaps/first"
    status, answer = server.request(
        "PATCH", path, {"metadata": {"finalizers": None}}, content_type="application/merge-patch+json"
    )
    assert status == 200, answer
    settle(server)
    assert left(server) == set()


def test_an_object_whose_owner_never_was_goes_at_once():
    server = SimApiServer()
    configmap(server, "stray", {"metadata": {"name": "nobody", "uid": "none"}})
    settle(server)
    assert left(server) == set()
