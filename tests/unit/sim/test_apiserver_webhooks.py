"""Admission webhooks that the simulated API server really calls, over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer
from tests.unit.sim.webhook_server import WebhookServer, allow, bundle, patch

Json = dict[str, Any]
HOOKS = "/apis/admissionregistration.k8s.io/v1"
CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


@pytest.fixture
def server() -> SimApiServer:
    return SimApiServer()


@pytest.fixture
def hook() -> Iterator[WebhookServer]:
    with WebhookServer() as running:
        yield running


def configmap(name: str = "a", **more: Any) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": "v"}, **more}


def claim(name: str = "c") -> Json:
    exactly = {"deviceClassName": "gpu.example.com"}
    spec = {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": spec,
    }


def rule(resource: str, *operations: str, group: str = "", version: str = "v1") -> Json:
    return {
        "apiGroups": [group],
        "apiVersions": [version],
        "operations": list(operations or ("CREATE",)),
        "resources": [resource],
    }


def install(
    server: SimApiServer, hook: WebhookServer, path: str = "/v", *, mutating: bool = False, **more: Any
) -> None:
    """Install a configuration with one webhook at a path."""
    entry: Json = {
        "name": f"{path.strip('/')}.hooks.example.com",
        "clientConfig": {"url": f"https://127.0.0.1:{hook.port}{path}", "caBundle": bundle()},
        "rules": [rule("configmaps", "CREATE", "UPDATE", "DELETE")],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        **more,
    }
    kind = "MutatingWebhookConfiguration" if mutating else "ValidatingWebhookConfiguration"
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": path.strip("/")},
        "webhooks": [entry],
    }
    server.create(f"{HOOKS}/{kind.lower()}s", body)


def test_a_denied_create_says_who_denied_and_why_and_stores_nothing(server, hook) -> None:
    install(server, hook)
    hook.answers["/v"] = lambda _request: {
        "allowed": False,
        "status": {"code": 403, "message": "no such things"},
    }
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert (status, answer["message"]) == (
        403,
        'admission webhook "v.hooks.example.com" denied the request: no such things',
    )
    assert server.request("GET", f"{CONFIGMAPS}/a")[0] == 404


def test_a_denial_without_code_and_message_is_400_without_explanation(server, hook) -> None:
    install(server, hook)
    hook.answers["/v"] = lambda _request: {"allowed": False}
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert (status, answer["message"]) == (
        400,
        'admission webhook "v.hooks.example.com" denied the request without explanation',
    )


def test_the_review_carries_object_user_operation_and_names(server, hook) -> None:
    install(server, hook)
    hook.answers["/v"] = lambda _request: allow()
    assert server.request("POST", f"{CONFIGMAPS}?fieldManager=me", configmap())[0] == 201
    assert (
        server.request(
            "PATCH", f"{CONFIGMAPS}/a", {"data": {"k": "w"}}, content_type="application/merge-patch+json"
        )[0]
        == 200
    )
    assert server.request("DELETE", f"{CONFIGMAPS}/a")[0] == 200
    create, change, delete = (request for _, request in hook.requests)
    assert (create["operation"], create["name"], create["namespace"]) == ("CREATE", "a", "default")
    assert create["kind"] == {"group": "", "version": "v1", "kind": "ConfigMap"}
    assert create["resource"] == {"group": "", "version": "v1", "resource": "configmaps"}
    assert create["object"]["metadata"]["uid"], "validation sees the object as it will be stored"
    assert create["object"]["apiVersion"] == "v1"
    assert create["oldObject"] is None
    assert create["options"]["fieldManager"] == "me"
    assert create["userInfo"]["username"] == "system:admin"
    assert (change["object"]["data"], change["oldObject"]["data"]) == ({"k": "w"}, {"k": "v"})
    assert (delete["operation"], delete["object"], delete["oldObject"]["data"]) == (
        "DELETE",
        None,
        {"k": "w"},
    )


def test_a_mutating_patch_is_stored_and_the_next_webhook_sees_it(server, hook) -> None:
    install(server, hook, "/a", mutating=True)
    install(server, hook, "/b", mutating=True)
    install(server, hook, "/v")
    hook.answers["/a"] = lambda _request: patch({"op": "add", "path": "/data/a", "value": "1"})
    hook.answers["/b"] = lambda request: patch(
        {"op": "add", "path": "/data/b", "value": str(len(request["object"]["data"]))}
    )
    hook.answers["/v"] = lambda _request: allow(warnings=["mind this"])
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert (status, answer["data"]) == (201, {"k": "v", "a": "1", "b": "2"})
    assert [path for path, _ in hook.requests] == ["/a", "/b", "/v"]
    assert hook.requests[-1][1]["object"]["data"] == {"k": "v", "a": "1", "b": "2"}


def test_a_webhook_is_asked_again_if_it_wants_and_another_changed_the_object(server, hook) -> None:
    install(server, hook, "/a", mutating=True, reinvocationPolicy="IfNeeded")
    install(server, hook, "/b", mutating=True, reinvocationPolicy="IfNeeded")
    hook.answers["/a"] = lambda request: patch(
        {"op": "add", "path": "/data/seen", "value": ",".join(sorted(request["object"]["data"]))}
    )
    hook.answers["/b"] = lambda _request: patch({"op": "add", "path": "/data/b", "value": "1"})
    answer = server.request("POST", CONFIGMAPS, configmap())[1]
    assert [path for path, _ in hook.requests] == ["/a", "/b", "/a", "/b"]
    assert answer["data"]["seen"] == "b,k,seen"


def test_a_mutated_object_is_validated_by_the_schema(server, hook) -> None:
    install(server, hook, mutating=True, rules=[rule("resourceclaims", group="resource.k8s.io")])
    hook.answers["/v"] = lambda _request: patch(
        {"op": "replace", "path": "/spec/devices/requests/0/name", "value": "Not A Name"}
    )
    status, answer = server.request("POST", CLAIMS, claim())
    assert status == 422
    assert "spec.devices.requests[0].name" in answer["message"]


def test_what_a_webhook_sees_is_defaulted_and_in_the_version_of_its_rule(server, hook) -> None:
    install(server, hook, rules=[rule("resourceclaims", group="resource.k8s.io", version="v1beta1")])
    hook.answers["/v"] = lambda _request: allow()
    assert server.request("POST", CLAIMS, claim())[0] == 201
    (seen,) = (request for _, request in hook.requests)
    assert seen["object"]["apiVersion"] == "resource.k8s.io/v1beta1"
    assert seen["object"]["spec"]["devices"]["requests"][0]["count"] == 1
    assert (seen["kind"]["version"], seen["requestKind"]["version"]) == ("v1beta1", "v1")


def test_match_policy_exact_asks_about_the_versions_of_its_rules_only(server, hook) -> None:
    rules = [rule("resourceclaims", group="resource.k8s.io", version="v1beta1")]
    install(server, hook, rules=rules, matchPolicy="Exact")
    assert server.request("POST", CLAIMS, claim())[0] == 201
    assert not hook.requests


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({"objectSelector": {"matchLabels": {"team": "a"}}}, False),
        ({"objectSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}}, True),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}, True),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}, False),
        ({"matchConditions": [{"name": "x", "expression": "object.metadata.name == 'a'"}]}, True),
        ({"matchConditions": [{"name": "x", "expression": "request.operation == 'UPDATE'"}]}, False),
        ({"matchConditions": [{"name": "x", "expression": "'k' in object.data && oldObject == null"}]}, True),
        ({"rules": [rule("secrets")]}, False),
        ({"rules": [rule("*", "*", group="*", version="*")]}, True),
        ({"rules": [rule("*/*", "*", group="*", version="*")]}, True),
        ({"rules": [rule("configmaps/status", "*")]}, False),
        ({"rules": [{**rule("configmaps"), "scope": "Cluster"}]}, False),
    ],
)
def test_rules_selectors_and_conditions_choose_what_is_asked_about(
    server, hook, more: Json, asked: bool
) -> None:
    hook.answers["/v"] = lambda _request: allow()
    install(server, hook, **more)
    assert server.request("POST", CONFIGMAPS, configmap())[0] == 201
    assert bool(hook.requests) is asked


def test_a_condition_that_fails_denies_unless_failures_are_ignored(server, hook) -> None:
    condition = [{"name": "x", "expression": "object.data.nothing == 'a'"}]
    install(server, hook, matchConditions=condition)
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert status == 403
    assert "no such key: nothing" in answer["message"]
    server.request("DELETE", f"{HOOKS}/validatingwebhookconfigurations/v")
    install(server, hook, matchConditions=condition, failurePolicy="Ignore")
    assert server.request("POST", CONFIGMAPS, configmap())[0] == 201


def test_a_service_is_found_by_registration_annotation_or_not(server, hook) -> None:
    hook.answers["/v"] = lambda _request: allow()
    client = {"service": {"namespace": "hooks", "name": "mine", "path": "/v"}, "caBundle": bundle()}
    install(server, hook, clientConfig=client)
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert status == 500
    assert answer["reason"] == "InternalError"
    assert answer["message"] == (
        'Internal error occurred: failed calling webhook "v.hooks.example.com": failed to call webhook: '
        'Post "https://mine.hooks.svc:443/v?timeout=10s": service "mine" not found'
    )
    server.create(
        "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "hooks"}}
    )
    note = {"sim.gpudra.dev/address": f"127.0.0.1:{hook.port}"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "mine", "annotations": note},
        "spec": {},
    }
    server.create("/api/v1/namespaces/hooks/services", service)
    assert server.request("POST", CONFIGMAPS, configmap())[0] == 201
    server.request("DELETE", "/api/v1/namespaces/hooks/services/mine")
    assert server.request("POST", CONFIGMAPS, configmap("b"))[0] == 500
    server.serve_service("hooks", "mine", "127.0.0.1", hook.port)
    assert server.request("POST", CONFIGMAPS, configmap("b"))[0] == 201
    assert [path for path, _ in hook.requests] == ["/v", "/v"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"<html>", "couldn't get version/kind; json parse error"),
        (
            b'{"apiVersion":"v1","kind":"Status"}',
            "converting (v1.Status) to (v1.AdmissionReview): unknown conversion",
        ),
        (
            json.dumps(
                {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": {"uid": "x"}}
            ).encode(),
            "expected response.uid=",
        ),
        (503, "the server is currently unable to handle the request"),
        (500, 'an error on the server ("broken") has prevented the request'),
    ],
)
def test_an_answer_that_is_none_fails_the_request_or_is_ignored(server, hook, answer: Any, why: str) -> None:
    hook.answers["/v"] = lambda _request: answer
    install(server, hook)
    status, refused = server.request("POST", CONFIGMAPS, configmap())
    assert status == 500
    assert why in refused["message"]
    server.request("DELETE", f"{HOOKS}/validatingwebhookconfigurations/v")
    install(server, hook, failurePolicy="Ignore")
    assert server.request("POST", CONFIGMAPS, configmap())[0] == 201


def test_a_server_that_the_bundle_does_not_know_is_not_believed(server, hook) -> None:
    client = {"url": f"https://127.0.0.1:{hook.port}/v", "caBundle": bundle("other.crt")}
    install(server, hook, clientConfig=client)
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert status == 500
    assert "tls: failed to verify certificate: x509" in answer["message"]
    assert not hook.requests


def test_nobody_listening_is_a_refused_connection(server, hook) -> None:
    client = {"url": "https://127.0.0.1:1/v", "caBundle": bundle()}
    install(server, hook, clientConfig=client)
    status, answer = server.request("POST", CONFIGMAPS, configmap())
    assert status == 500
    assert "connect: connection refused" in answer["message"]


def test_a_webhook_that_reads_and_writes_through_the_api_does_not_lock_it_up(hook) -> None:
    with SimApiServer() as server:
        seen: list[int] = []

        def answer(request: Json) -> Json:
            seen.append(server.request("GET", f"{CONFIGMAPS}/{request['name']}")[0])
            seen.append(
                server.request("POST", "/api/v1/namespaces/default/secrets", secret(request["uid"]))[0]
            )
            return allow()

        hook.answers["/v"] = answer
        install(server, hook, timeoutSeconds=30)
        assert server.request("POST", CONFIGMAPS, configmap())[0] == 201
        assert server.request("PUT", f"{CONFIGMAPS}/a", configmap(data={"k": "2"}))[0] == 200
        assert server.request("DELETE", CONFIGMAPS)[0] == 200
        # The namespace has a config map of its own: it went too.
        assert seen == [404, 201, 200, 201, 200, 201, 200, 201]
        assert server.request("GET", f"{CONFIGMAPS}/a")[0] == 404


def secret(name: str) -> Json:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"s-{name}"}}


def test_a_patch_that_was_overtaken_while_webhooks_were_asked_is_tried_again(server, hook) -> None:
    server.create(CONFIGMAPS, configmap())
    merge = "application/merge-patch+json"

    def answer(request: Json) -> Json:
        if len(hook.requests) == 1:
            # A status of its own cannot be patched here: another field, through a kind of write the rule leaves alone.
            server.storage.put(
                "/configmaps", ("default", "a"), {**stored(server), "data": {"k": "v", "other": "1"}}
            )
        return allow()

    hook.answers["/v"] = answer
    install(server, hook)
    status, changed = server.request("PATCH", f"{CONFIGMAPS}/a", {"data": {"mine": "1"}}, content_type=merge)
    assert (status, changed["data"]) == (200, {"k": "v", "other": "1", "mine": "1"})
    assert len(hook.requests) == 2


def stored(server: SimApiServer) -> Json:
    found = server.storage.get("/configmaps", ("default", "a"))
    assert found is not None
    return found


def test_a_dry_run_says_so_and_stores_nothing(server, hook) -> None:
    hook.answers["/v"] = lambda _request: allow()
    install(server, hook)
    assert server.request("POST", f"{CONFIGMAPS}?dryRun=All", configmap())[0] == 201
    assert hook.requests[0][1]["dryRun"] is True
    assert server.request("GET", f"{CONFIGMAPS}/a")[0] == 404


def test_nobody_is_asked_about_webhook_configurations(server, hook) -> None:
    install(server, hook, rules=[rule("*/*", "*", group="*", version="*")])
    assert server.request("DELETE", f"{HOOKS}/validatingwebhookconfigurations/v")[0] == 200
    assert not hook.requests


def test_server_side_apply_and_status_pass_the_webhooks_too(server, hook) -> None:
    hook.answers["/v"] = lambda _request: allow()
    rules = [
        rule("resourceclaims", "CREATE", "UPDATE", group="resource.k8s.io"),
        rule("resourceclaims/status", "UPDATE", group="resource.k8s.io"),
    ]
    install(server, hook, rules=rules)
    apply = "application/apply-patch+yaml"
    assert server.request("PATCH", f"{CLAIMS}/c?fieldManager=m", claim(), content_type=apply)[0] == 201
    current = server.request("GET", f"{CLAIMS}/c")[1]
    assert server.request("PUT", f"{CLAIMS}/c/status", {**current, "status": {}})[0] == 200
    assert [(r["operation"], r.get("subResource", "")) for _, r in hook.requests] == [
        ("CREATE", ""),
        ("UPDATE", "status"),
    ]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"sideEffects": "Unknown"}, "webhooks[0].sideEffects"),
        ({"admissionReviewVersions": ["v2"]}, "webhooks[0].admissionReviewVersions"),
        ({"timeoutSeconds": 31}, "webhooks[0].timeoutSeconds"),
        ({"clientConfig": {"url": "http://127.0.0.1/v"}}, "webhooks[0].clientConfig.url"),
        ({"clientConfig": {}}, "webhooks[0].clientConfig"),
        ({"name": "short"}, "webhooks[0].name"),
        ({"rules": [{**rule("pods"), "operations": ["MAKE"]}]}, "webhooks[0].rules[0].operations[0]"),
        (
            {"matchConditions": [{"name": "x", "expression": "objekt.metadata"}]},
            "webhooks[0].matchConditions[0].expression",
        ),
    ],
)
def test_a_wrong_configuration_is_refused(server, hook, more: Json, field: str) -> None:
    with pytest.raises(RuntimeError, match="422") as refused:
        install(server, hook, **more)
    assert f"'field': '{field}'" in str(refused.value)
