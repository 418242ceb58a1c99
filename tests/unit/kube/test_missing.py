"""What a 404 says: that an object is gone, or only that nobody here knows the answer."""

from __future__ import annotations

import pytest

from dra.errors import KubeError
from dra.kube.negotiation import UNSERVED_SECONDS
from dra.kube.resources import NODES, RESOURCE_CLAIMS
from tests.unit.kube.fake_clock import FakeClock
from tests.unit.kube.tiny_api import Answer, status_body

GONE = status_body(404, "NotFound", 'resourceclaims "c" not found', name="c", kind="resourceclaims")
GROUP = status_body(404, "NotFound", "the server could not find the requested resource")


def error_of(client, resource=RESOURCE_CLAIMS) -> KubeError:
    with pytest.raises(KubeError) as caught:
        client.get(resource, "c", "ns" if resource.namespaced else None)
    return caught.value


def test_only_the_servers_word_about_this_very_object_says_that_it_is_gone(api, client) -> None:
    answers = {
        "DRA-API-NOT-FOUND": [GONE],
        "DRA-API-NOT-SERVED": [
            GROUP,
            "404 page not found",
            "<html><h1>404 Not Found</h1></html>",
            "{}",
            '{"message": "no such route"}',
            {**GONE, "reason": ""},
            {**GONE, "details": None},
            {**GONE, "kind": "Oops"},
        ],
        "DRA-API-OTHER-NOT-FOUND": [
            status_body(404, "NotFound", 'namespaces "c" not found', name="c", kind="namespaces"),
            status_body(404, "NotFound", 'resourceclaims "d" not found', name="d", kind="resourceclaims"),
        ],
    }
    for code, bodies in answers.items():
        for body in bodies:
            api.faults[:] = [lambda r, body=body: Answer(404, body) if r.plural else None]
            error = error_of(client)
            assert (error.code, error.status, error.retryable) == (code, 404, code != "DRA-API-NOT-FOUND"), (
                body
            )
            assert "get resourceclaims.resource.k8s.io ns/c" in error.message


def test_a_server_that_serves_the_group_again_is_believed_within_two_seconds(api, client_of) -> None:
    clock = FakeClock()
    client = client_of(api.url, clock=clock)
    api.put("resourceclaims", {"metadata": {"name": "c", "namespace": "ns"}}, "ns")
    assert client.get(RESOURCE_CLAIMS, "c", "ns")
    for body in (
        GROUP,
        "404 page not found",
        {"kind": "APIGroup", "name": "resource.k8s.io", "versions": []},
    ):
        status = 200 if isinstance(body, dict) and body["kind"] == "APIGroup" else 404
        api.faults[:] = [
            lambda r, body=body, status=status: (
                Answer(404, GROUP)
                if r.plural
                else Answer(status, body)
                if r.path == "/apis/resource.k8s.io"
                else None
            )
        ]
        error = error_of(client)
        assert (error.code, error.retryable) == ("DRA-API-NOT-SERVED", True)
        assert "does not serve resource.k8s.io at the moment" in error.message
        api.faults.clear()
        clock.advance(UNSERVED_SECONDS)
        assert client.get(RESOURCE_CLAIMS, "c", "ns")["metadata"]["name"] == "c"


def test_a_server_without_the_group_is_not_asked_for_it_at_each_call(api, client_of) -> None:
    client = client_of(api.url, clock=FakeClock())
    api.versions = ()
    for _ in range(5):
        assert error_of(client).code == "DRA-API-NOT-SERVED"
    # The negotiation once; nothing else is asked of a group that is not there.
    assert [r.path for r in api.requests] == ["/apis/resource.k8s.io"]


@pytest.mark.parametrize("body", ["{}", '{"message": "hello"}', '{"kind": "Status", "status": "Failure"}'])
def test_a_stranger_in_place_of_the_server_does_not_settle_the_version(api, client, body) -> None:
    api.faults.append(lambda r: Answer(200, body) if r.path == "/apis/resource.k8s.io" else None)
    error = error_of(client)
    assert (error.code, error.retryable) == ("DRA-API-BAD-ANSWER", True)
    api.faults.clear()
    assert error_of(client).code == "DRA-API-NOT-FOUND"


def test_a_missing_node_is_gone_too(client) -> None:
    assert error_of(client, NODES).code == "DRA-API-NOT-FOUND"
