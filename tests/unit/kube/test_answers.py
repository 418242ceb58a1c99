"""Answers with status 200 that are not what was asked for are told from real ones, whoever gives them."""

from __future__ import annotations

import pytest

from dra.errors import KubeError
from dra.kube.resources import EVENTS, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from tests.unit.kube.tiny_api import Answer, CloseAtOnce, status_body

CLAIM = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "c", "namespace": "ns", "uid": "u-1", "resourceVersion": "5"},
    "spec": {},
}


def meta(**changes: object) -> dict:
    return {**CLAIM, "metadata": {**CLAIM["metadata"], **changes}}


STRANGE = [
    {},
    {"message": "welcome"},
    status_body(404, "NotFound", "not found"),
    {"kind": "Status", "status": "Success"},
    {**CLAIM, "kind": "Pod"},
    {key: value for key, value in CLAIM.items() if key != "kind"},
    {**CLAIM, "apiVersion": "example.com/v1"},
    {**CLAIM, "apiVersion": None},
    {**CLAIM, "metadata": None},
    {**CLAIM, "metadata": ["c"]},
    {**CLAIM, "spec": "text"},
    {**CLAIM, "status": []},
    meta(name="d"),
    meta(name=""),
    meta(namespace="other"),
    meta(uid=""),
    meta(uid=None),
    meta(uid=7),
]


def answering(api, body: object) -> None:
    api.faults[:] = [lambda r: Answer(200, body) if r.plural else None]


def error_of(act) -> KubeError:
    with pytest.raises(KubeError) as caught:
        act()
    assert (caught.value.code, caught.value.retryable) == ("DRA-API-BAD-ANSWER", True)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("body", STRANGE, ids=repr)
def test_an_object_that_is_not_the_one_asked_for_is_no_answer(api, client, body) -> None:
    answering(api, body)
    error = error_of(lambda: client.get(RESOURCE_CLAIMS, "c", "ns"))
    assert error.message.startswith("get resourceclaims.resource.k8s.io ns/c: ")
    error_of(lambda: client.replace(RESOURCE_CLAIMS, "c", CLAIM, "ns"))
    error_of(lambda: client.create(RESOURCE_CLAIMS, CLAIM, "ns"))


def test_the_object_asked_for_is_given(api, client) -> None:
    answering(api, CLAIM)
    assert client.get(RESOURCE_CLAIMS, "c", "ns") == CLAIM
    answering(api, {**CLAIM, "status": None})
    assert client.get(RESOURCE_CLAIMS, "c", "ns")["metadata"]["uid"] == "u-1"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"items": []},
        {"kind": "PodList", "metadata": {}, "items": []},
        {"kind": "ResourceClaimList", "items": []},
        {"kind": "ResourceClaimList", "metadata": {}, "items": {}},
        {"kind": "ResourceClaimList", "metadata": {}, "items": ["c"]},
        {"kind": "ResourceClaimList", "metadata": {}, "items": [{}]},
        {"kind": "ResourceClaimList", "metadata": {}, "items": [meta(uid="")]},
        {"kind": "ResourceClaimList", "metadata": {}, "items": [{**CLAIM, "kind": "Pod"}]},
        status_body(200, "", "hello"),
    ],
    ids=repr,
)
def test_a_list_that_is_none_is_not_an_empty_one(api, client, body) -> None:
    answering(api, body)
    error_of(lambda: client.list(RESOURCE_CLAIMS))


def test_items_without_a_kind_are_what_the_server_sends(api, client) -> None:
    bare = {"metadata": CLAIM["metadata"], "spec": {}}
    answering(api, {"kind": "ResourceClaimList", "metadata": {"resourceVersion": "9"}, "items": [bare]})
    assert client.list(RESOURCE_CLAIMS).items == (bare,)
    answering(api, {"kind": "ResourceClaimList", "metadata": {"resourceVersion": "9"}, "items": None})
    assert client.list(RESOURCE_CLAIMS).items == ()


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ADDED", "object": {}},
        {"type": "DELETED", "object": {**CLAIM, "kind": "Pod"}},
        {"type": "MODIFIED", "object": meta(uid="")},
        {"type": "ADDED", "object": "c"},
        {"type": "BOOKMARK", "object": []},
        {"type": "BOOKMARK", "object": {}},
        {"type": "SURPRISE", "object": CLAIM},
        {"message": "welcome"},
    ],
    ids=repr,
)
def test_a_watch_event_about_something_else_ends_the_watch(api, client, event) -> None:
    api.faults.append(lambda r: CloseAtOnce((event,)) if r.is_watch else None)
    error_of(lambda: list(client.watch(RESOURCE_CLAIMS, resource_version="1")))


@pytest.mark.parametrize("body", [{}, {"message": "welcome"}, status_body(500, "", "no")], ids=repr)
def test_a_deletion_is_done_only_if_the_server_says_so(api, client, body) -> None:
    answering(api, body)
    error_of(lambda: client.delete(RESOURCE_SLICES, "s0"))
    error_of(lambda: client.delete_collection(RESOURCE_SLICES))


def test_other_kinds_are_looked_at_as_well(api, client) -> None:
    answering(api, {"kind": "Status", "status": "Success"})
    for act in (
        lambda: client.get(NODES, "n1"),
        lambda: client.list(PODS),
        lambda: client.patch(EVENTS, "e", {"count": 2}, "default"),
    ):
        error_of(act)
