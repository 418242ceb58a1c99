"""The webhook over HTTPS: reviews, what is no review, certificates, readiness."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from dra.api.fractions import FractionRules
from dra.sim.apiserver import SimApiServer
from dra.webhook.certificate import Certificate
from dra.webhook.review import ReviewError, answer, mutate, validate
from dra.webhook.server import MAX_BODY, MAX_CONNECTIONS, WebhookServer

TLS = Path(__file__).parents[2] / "data" / "tls"
VERSIONS = ("v1", "v1beta2", "v1beta1")


@pytest.fixture
def files(tmp_path):
    for name, source in (("tls.crt", "server.crt"), ("tls.key", "server.key")):
        shutil.copy(TLS / source, tmp_path / name)
    return tmp_path


@pytest.fixture
def serve():
    running = []

    def start(folder, **options):
        server = WebhookServer(
            Certificate(folder / "tls.crt", folder / "tls.key"),
            host="127.0.0.1",
            look_seconds=0.05,
            **options,
        )
        server.start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


def trusting():
    context = ssl.create_default_context(cafile=str(TLS / "server.crt"))
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", ssl.VerifyFlags(0))
    context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", ssl.VerifyFlags(0))
    return context


def call(server, method, path, body=None, *, headers=None, context=None):
    connection = http.client.HTTPSConnection(
        "127.0.0.1", server.port, context=context or trusting(), timeout=30
    )
    try:
        connection.request(method, path, body, headers or {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def review(obj, *, operation="CREATE", old=None, uid="u-1", **more):
    request = {"uid": uid, "operation": operation, "object": obj, "oldObject": old, **more}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def ask(server, path, obj, **more):
    status, text = call(server, "POST", path, json.dumps(review(obj, **more)))
    assert status == 200, text
    answer = json.loads(text)
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answer["response"]["uid"] == more.get("uid", "u-1")
    return answer["response"]


def config(kind="GpuConfig", driver="gpu.nvidia.com", **parameters):
    content = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **parameters}
    return {"opaque": {"driver": driver, "parameters": content}}


def claim(*configs, version="v1", kind="ResourceClaim", class_name="gpu.nvidia.com"):
    request = {"name": "gpu", "deviceClassName": class_name}
    if version != "v1beta1":
        request = {"name": "gpu", "exactly": {"deviceClassName": class_name}}
    spec = {"devices": {"requests": [request], "config": list(configs)}}
    return {
        "apiVersion": f"resource.k8s.io/{version}", "kind": kind, "metadata": {"name": "c", "namespace": "ns"},
        "spec": spec if kind == "ResourceClaim" else {"spec": spec},
    }  # fmt: skip


def device_class(*configs, version="v1"):
    return {
        "apiVersion": f"resource.k8s.io/{version}", "kind": "DeviceClass", "metadata": {"name": "my-class"},
        "spec": {"config": list(configs)},
    }  # fmt: skip


BAD = config(sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Sometimes"}})
GOOD = config(sharing={"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate", "DeviceClass"])
def test_a_wrong_configuration_is_refused_in_every_kind_and_version_with_its_field(
    serve, files, kind, version
):
    server = serve(files)

    def made(*configs):
        return (
            device_class(*configs, version=version)
            if kind == "DeviceClass"
            else claim(*configs, version=version, kind=kind)
        )

    refused = ask(server, "/validate", made(BAD))
    assert refused["allowed"] is False
    assert refused["status"]["code"] == 403
    where = {
        "ResourceClaim": "spec.devices",
        "ResourceClaimTemplate": "spec.spec.devices",
        "DeviceClass": "spec",
    }[kind]
    assert (
        f"{where}.config[0].opaque.parameters.sharing.timeSlicingConfig.interval"
        in refused["status"]["message"]
    )
    assert "DRA-CONFIG-FIELD" in refused["status"]["message"]
    assert ask(server, "/validate-resource-claim-parameters", made(GOOD)) == {"uid": "u-1", "allowed": True}


@pytest.mark.fault("F41")
def test_every_wrong_configuration_is_named(serve, files):
    text = ask(serve(files), "/validate", claim(BAD, GOOD, config(kind="GPUConfig")))["status"]["message"]
    assert text.startswith("2 configurations are wrong")
    assert "config[0]" in text
    assert "config[2]" in text


def test_what_does_nothing_is_a_warning(serve, files):
    idle = config(sharing={"strategy": "TimeSlicing", "mpsConfig": {"multiUser": True}})
    answer = ask(serve(files), "/validate", claim(idle))
    assert answer["allowed"] is True
    assert len(answer["warnings"]) == 1
    assert "mpsConfig does nothing" in answer["warnings"][0]


@pytest.mark.parametrize(
    "obj",
    [
        claim(config(kind="Anything", driver="other.example.com")),
        # An expression that the API server must judge, which may know more functions than this program.
        {**claim(), "spec": {"devices": {"requests": [{"name": "g", "exactly": {
            "deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": "device.new()"}}]}}]}}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}},
        {"apiVersion": "resource.k8s.io/v9", "kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {}},
    ],
)  # fmt: skip
def test_what_is_not_ours_to_judge_is_allowed(serve, files, obj):
    assert ask(serve(files), "/validate", obj)["allowed"] is True


def test_what_is_stored_already_can_be_changed_and_deleted_whatever_it_says(serve, files):
    server, stored = serve(files), claim(BAD)
    labelled = {**stored, "metadata": {**stored["metadata"], "labels": {"a": "b"}}}
    assert ask(server, "/validate", labelled, operation="UPDATE", old=stored)["allowed"] is True
    assert ask(server, "/validate", stored, operation="UPDATE", old=claim(GOOD))["allowed"] is False
    ending = {**stored, "metadata": {**stored["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert ask(server, "/validate", ending, operation="UPDATE", old=claim(GOOD))["allowed"] is True
    assert ask(server, "/validate", None, operation="DELETE", old=stored)["allowed"] is True


def test_a_fraction_is_answered_with_a_json_patch_also_for_a_dry_run(serve, files):
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "p-"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "0.2"}}}]},
    }  # fmt: skip
    server = serve(files)
    answers = [ask(server, "/mutate", pod, dryRun=dry) for dry in (False, True)]
    assert answers[0] == answers[1]
    assert answers[0]["patchType"] == "JSONPatch"
    patch = json.loads(base64.b64decode(answers[0]["patch"]))
    assert {each["path"] for each in patch} == {
        "/metadata/labels", "/metadata/annotations", "/spec/containers/0/resources", "/spec/resourceClaims",
        "/spec/tolerations",
    }  # fmt: skip
    assert ask(server, "/mutate", pod, operation="UPDATE", old=pod) == {"uid": "u-1", "allowed": True}
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1.5"
    refused = ask(server, "/mutate", pod)
    assert refused["allowed"] is False
    assert "DRA-FRACTION-RANGE" in refused["status"]["message"]


@pytest.mark.parametrize(
    ("body", "headers", "path", "status"),
    [
        ("{", None, "/validate", 400),
        ("[]", None, "/validate", 400),
        ('{"kind":"AdmissionReview"}', None, "/validate", 400),
        (json.dumps({**review({}), "apiVersion": "admission.k8s.io/v1beta1"}), None, "/validate", 400),
        ("[" * 100_000, None, "/validate", 400),
        ("{}", {"Content-Type": "text/plain"}, "/validate", 415),
        ("{}", None, "/elsewhere", 404),
        ("", {"Content-Type": "application/json", "Content-Length": str(MAX_BODY + 1)}, "/validate", 413),
    ],
)
def test_what_is_no_review_is_refused_and_the_server_lives(serve, files, body, headers, path, status):
    server = serve(files)
    assert call(server, "POST", path, body, headers=headers)[0] == status
    assert call(server, "GET", "/healthz") == (200, "ok\n")


def test_many_reviews_come_over_one_connection(serve, files):
    server = serve(files)
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting(), timeout=30)
    for number in range(5):
        connection.request(
            "POST",
            "/validate",
            json.dumps(review(claim(BAD), uid=str(number))),
            {"Content-Type": "application/json"},
        )
        assert json.loads(connection.getresponse().read())["response"]["uid"] == str(number)
    connection.close()


def test_a_client_that_says_nothing_keeps_nobody_waiting(serve, files):
    server = serve(files)
    with socket.create_connection(("127.0.0.1", server.port)):
        assert call(server, "GET", "/readyz") == (200, "ok\n")


@pytest.mark.fault("F43")
def test_clients_that_say_nothing_or_a_byte_now_and_then_keep_nobody_out(serve, files, monkeypatch):
    """More than there is room for: the API server is served all the same, and what is late is closed."""
    monkeypatch.setattr("dra.webhook.server.IDLE_SECONDS", 30.0)
    server = serve(files)
    threads = threading.active_count()
    slow = []
    with contextlib.ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))

        # One that has said nothing, and one that has said half of a request, in turn.
        for number in range(MAX_CONNECTIONS + 6):
            raw = connect()
            if number % 8 == 0:
                raw = stack.enter_context(trusting().wrap_socket(raw, server_hostname="127.0.0.1"))
                raw.sendall(b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n")
            slow.append(raw)
        for _ in range(3):
            assert ask(server, "/validate", claim(GOOD))["allowed"] is True
            for each in slow:
                with contextlib.suppress(OSError):
                    each.send(b"X")
        # What is late goes, however often it said a byte.
        monkeypatch.setattr("dra.webhook.server.IDLE_SECONDS", 0.2)
        late = stack.enter_context(trusting().wrap_socket(connect(), server_hostname="127.0.0.1"))
        late.sendall(b"GET /healthz HTTP/1.1\r\n")
        late.settimeout(0.02)

        def is_closed():
            try:
                late.sendall(b"X")
                return late.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_for(is_closed)
        # A body that is too large is refused without being read.
        headers = {"Content-Type": "application/json", "Content-Length": str(64 << 20)}
        assert call(server, "POST", "/validate", b"", headers=headers)[0] == 413
    wait_for(lambda: len(server._server.connections) == 0)
    wait_for(lambda: threading.active_count() <= threads)
    assert ask(server, "/validate", claim(GOOD))["allowed"] is True


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def own_certificate(folder, name, days):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", days,
         "-subj", f"/CN={name}", "-keyout", folder / "new.key", "-out", folder / "new.crt"],
        check=True, capture_output=True,
    )  # fmt: skip


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@needs_openssl
def test_a_renewed_certificate_is_used_for_new_connections_without_a_restart(serve, files):
    server = serve(files)

    def shown():
        return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=30)

    before = shown()
    own_certificate(files, "renewed", "30")
    (files / "new.key").replace(files / "tls.key")
    # Half of a renewal is no certificate: the old one goes on.
    time.sleep(0.2)
    assert shown() == before
    (files / "new.crt").replace(files / "tls.crt")
    wait_for(lambda: shown() != before)
    assert server.trouble() == ""


def test_without_a_certificate_it_is_not_ready_and_becomes_so_when_there_is_one(serve, tmp_path):
    server = serve(tmp_path)
    assert "no certificate" in server.trouble()
    with pytest.raises(OSError):
        call(server, "GET", "/readyz")
    shutil.copy(TLS / "server.key", tmp_path / "tls.key")
    shutil.copy(TLS / "server.crt", tmp_path / "tls.crt")
    wait_for(lambda: server.trouble() == "")
    assert call(server, "GET", "/readyz") == (200, "ok\n")


def test_files_that_go_and_come_back_are_said_each_time_they_go(files):
    certificate = Certificate(files / "tls.crt", files / "tls.key")
    with capture_logs() as logs:
        for _ in range(2):
            certificate.look()
            (files / "tls.crt").rename(files / "away")
            for _ in range(2):
                certificate.look()
            (files / "away").rename(files / "tls.crt")
    assert certificate.trouble() == ""
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == [
        "certificate_not_loaded"
    ] * 2


def test_an_expired_certificate_is_not_ready(files):
    certificate = Certificate(files / "tls.crt", files / "tls.key", wall=lambda: 5e9)
    certificate.look()
    assert "has expired" in certificate.trouble()


def test_a_check_that_gives_wrong_answers_is_not_ready(serve, files):
    server = serve(files)
    server.decisions = {**server.decisions, "/validate": lambda _request: 1 / 0}
    status, text = call(server, "GET", "/readyz")
    assert status == 503
    assert "ZeroDivisionError" in text
    assert call(server, "POST", "/validate", json.dumps(review(claim())))[0] == 500
    assert call(server, "GET", "/healthz")[0] == 200


@pytest.mark.fault("F41")
def test_the_api_server_calls_it_refuses_what_it_refuses_and_stores_what_it_rewrote(serve, files):
    server, api = serve(files), SimApiServer()
    bundle = base64.b64encode((TLS / "server.crt").read_bytes()).decode()
    for kind, path, group, resource in (
        ("ValidatingWebhookConfiguration", "/validate", "resource.k8s.io", "resourceclaims"),
        ("MutatingWebhookConfiguration", "/mutate", "apps", "deployments"),
    ):
        hook = {
            "name": "a.hooks.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": f"https://127.0.0.1:{server.port}{path}", "caBundle": bundle},
            "rules": [{"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [resource]}],
        }  # fmt: skip
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": "a"}, "webhooks": [hook],
        }  # fmt: skip
        api.create(f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}s", body)
    claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    bad = claim(BAD)
    bad["metadata"]["namespace"] = "default"
    status, answer = api.request("POST", claims, bad)
    assert status == 403
    assert "DRA-CONFIG-FIELD" in answer["message"]
    container = {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "0.2"}}}
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {
            "selector": {"matchLabels": {"app": "d"}},
            "template": {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [container]}},
        },
    }  # fmt: skip
    path = "/apis/apps/v1/namespaces/default/deployments"
    status, stored = api.request("POST", path, deployment)
    assert status == 201, stored
    spec = stored["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"] == {"claims": [{"name": "gpudra-main"}]}
    assert spec["resourceClaims"][0]["resourceClaimTemplateName"].startswith("gpu-share-20of100-")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["ResourceClaim", "ResourceClaimTemplate", "DeviceClass", "Pod", "Deployment", "CronJob"]
)


@given(
    kind=KINDS, version=st.sampled_from(["resource.k8s.io/v1", "resource.k8s.io/v1beta1", "v1", "apps/v1"]),
    metadata=JSON, spec=JSON, parameters=JSON, operation=st.sampled_from(["CREATE", "UPDATE", "DELETE", ""]), old=JSON,
)  # fmt: skip
def test_any_object_gets_an_answer(kind, version, metadata, spec, parameters, operation, old):
    devices = {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]}
    for content in (spec, {"devices": devices}, {"spec": {"devices": devices}}, devices):
        obj = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": content}
        body = json.dumps(review(obj, operation=operation, old=old)).encode()
        for decide in (validate, lambda request: mutate(request, FractionRules())):
            response = json.loads(answer(body, decide))["response"]
            assert response["allowed"] in (True, False)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_review_or_is_refused_as_none(body):
    try:
        answer(body, validate)
    except ReviewError as error:
        assert str(error)
