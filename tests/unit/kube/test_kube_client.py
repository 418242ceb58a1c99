"""The client against a small API server: verbs, versions, time limits, and errors that say what to do."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dra.errors import KubeError
from dra.kube.client import connect
from dra.kube.connection import KubeOptions, agent_of
from dra.kube.resources import NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from tests.unit.kube.tiny_api import Answer, Hang, Reset, Stall, kubeconfig_text, status_body


def a_slice(name: str = "s0", **spec: object) -> dict:
    base = {
        "driver": "gpu.nvidia.com",
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
    }
    devices = [{"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}}]
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": {**base, "devices": devices, **spec},
    }  # fmt: skip


def the_error(act: Callable[[], object]) -> KubeError:
    with pytest.raises(KubeError) as caught:
        act()
    return caught.value


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class TestVerbs:
    def test_an_object_is_created_read_replaced_patched_applied_and_deleted(self, api, client) -> None:
        created = client.create(RESOURCE_SLICES, a_slice())
        assert created["metadata"]["uid"]
        stored = client.get(RESOURCE_SLICES, "s0")
        stored["spec"]["devices"][0]["name"] = "gpu-1"
        assert client.replace(RESOURCE_SLICES, "s0", stored)["spec"]["devices"][0]["name"] == "gpu-1"
        patched = client.patch(RESOURCE_SLICES, "s0", {"metadata": {"labels": {"a": "b"}}})
        assert patched["metadata"]["labels"] == {"a": "b"}
        applied = client.apply(RESOURCE_SLICES, "s1", a_slice("s1"))
        assert applied["metadata"]["name"] == "s1"
        client.delete(RESOURCE_SLICES, "s0", uid=stored["metadata"]["uid"])
        assert the_error(lambda: client.get(RESOURCE_SLICES, "s0")).code == "DRA-API-NOT-FOUND"
        assert [obj["metadata"]["name"] for obj in api.all("resourceslices")] == ["s1"]

    def test_writes_carry_the_field_manager_and_the_right_content_type(self, api, client) -> None:
        client.create(RESOURCE_SLICES, a_slice(), dry_run=True)
        client.patch(RESOURCE_SLICES, "s0", {"metadata": {}})
        client.apply(RESOURCE_SLICES, "s0", a_slice())
        post, merge, apply = [r for r in api.requests if r.method in ("POST", "PATCH")]
        assert post.query == {"fieldManager": "dra", "dryRun": "All"}
        assert merge.headers["content-type"] == "application/merge-patch+json"
        assert apply.headers["content-type"] == "application/apply-patch+yaml"
        assert apply.query == {"fieldManager": "dra", "force": "true"}
        assert {r.headers["user-agent"] for r in api.requests} == {"dra-test"}

    def test_a_long_list_is_read_page_by_page(self, api, client) -> None:
        for number in range(7):
            api.put("pods", {"metadata": {"name": f"p{number}", "namespace": "a"}}, "a")
        found = client.list(PODS, "a", page=3, resource_version="0")
        assert [item["metadata"]["name"] for item in found.items] == [f"p{n}" for n in range(7)]
        lists = [r.query for r in api.requests if r.plural == "pods"]
        assert [q.get("continue") for q in lists] == [None, "3", "6"]
        assert [q.get("resourceVersion") for q in lists] == ["0", None, None], (
            "a token and a version exclude each other"
        )
        assert found.resource_version

    def test_a_delete_with_the_uid_of_another_object_is_a_conflict(self, api, client) -> None:
        client.create(RESOURCE_SLICES, a_slice())
        error = the_error(
            lambda: client.delete(RESOURCE_SLICES, "s0", uid="00000000-0000-0000-0000-000000000000")
        )
        assert (error.code, error.status, error.retryable) == ("DRA-API-CONFLICT", 409, True)
        assert api.all("resourceslices")

    def test_a_collection_is_deleted_by_selector(self, api, client) -> None:
        client.create(RESOURCE_SLICES, a_slice("s0"))
        client.create(RESOURCE_SLICES, a_slice("s1", nodeName="n2"))
        client.delete_collection(RESOURCE_SLICES, field_selector="spec.nodeName=n1")
        assert [obj["metadata"]["name"] for obj in api.all("resourceslices")] == ["s1"]

    def test_names_are_escaped_in_paths(self, api, client) -> None:
        the_error(lambda: client.get(NODES, "a/b c"))
        assert api.requests[-1].path == "/api/v1/nodes/a%2Fb%20c"


class TestVersions:
    @pytest.mark.parametrize(
        ("served", "used"),
        [
            (("v1", "v1beta2", "v1beta1"), "v1"),
            (("v1beta1", "v1beta2"), "v1beta2"),
            (("v1beta1",), "v1beta1"),
        ],
    )
    def test_the_newest_served_version_is_spoken_and_callers_see_v1(self, api, client, served, used) -> None:
        api.versions = served
        stored = client.create(RESOURCE_SLICES, a_slice())
        assert client.served_version(RESOURCE_SLICES) == used
        assert stored["apiVersion"] == "resource.k8s.io/v1"
        assert stored["spec"]["devices"][0]["attributes"] == {"type": {"string": "gpu"}}
        sent = api.requests[-1]
        assert sent.path == f"/apis/resource.k8s.io/{used}/resourceslices"
        assert sent.body["apiVersion"] == f"resource.k8s.io/{used}"
        assert ("basic" in sent.body["spec"]["devices"][0]) == (used == "v1beta1")
        assert client.list(RESOURCE_SLICES).items[0]["spec"]["devices"][0]["name"] == "gpu-0"

    def test_a_server_that_stops_serving_a_version_is_asked_again(self, api, client) -> None:
        api.versions = ("v1beta1",)
        client.create(RESOURCE_SLICES, a_slice())
        api.versions = ("v1",)
        assert client.get(RESOURCE_SLICES, "s0")["apiVersion"] == "resource.k8s.io/v1"
        assert client.served_version(RESOURCE_SLICES) == "v1"

    def test_a_missing_object_does_not_start_a_new_negotiation(self, api, client) -> None:
        for _ in range(3):
            assert the_error(lambda: client.get(RESOURCE_CLAIMS, "c", "ns")).code == "DRA-API-NOT-FOUND"
        assert sum(r.path == "/apis/resource.k8s.io" for r in api.requests) == 1

    def test_a_server_without_dra_is_named_as_such(self, api, client) -> None:
        api.versions = ()
        error = the_error(lambda: client.list(RESOURCE_SLICES))
        assert error.code == "DRA-API-NOT-SERVED"
        assert "DynamicResourceAllocation" in error.remedy
        assert error.retryable

    def test_the_server_version_is_two_numbers_even_for_vendors(self, api, client) -> None:
        api.minor = "33+"
        assert client.server_version() == (1, 33)
        api.minor = "34"
        assert client.server_version() == (1, 33), "remembered"
        assert client.server_version(refresh=True) == (1, 34)


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "reason", "code", "retryable"),
        [
            (400, "BadRequest", "DRA-API-BAD-REQUEST", False),
            (403, "Forbidden", "DRA-API-FORBIDDEN", True),
            (409, "AlreadyExists", "DRA-API-CONFLICT", True),
            (410, "Expired", "DRA-API-GONE", True),
            (413, "RequestEntityTooLarge", "DRA-API-TOO-LARGE", False),
            (429, "TooManyRequests", "DRA-API-THROTTLED", True),
            (500, "InternalError", "DRA-API-INTERNAL", True),
            (503, "ServiceUnavailable", "DRA-API-UNAVAILABLE", True),
            (504, "Timeout", "DRA-API-TIMEOUT", True),
        ],
    )
    def test_each_status_has_a_code(self, api, client, status, reason, code, retryable) -> None:
        body = status_body(status, reason, "because")
        api.faults.append(
            lambda r: Answer(status, body, {"Retry-After": "7"}) if r.plural == "nodes" else None
        )
        error = the_error(lambda: client.get(NODES, "n1"))
        assert (error.code, error.status, error.reason, error.retryable) == (code, status, reason, retryable)
        assert error.retry_after_seconds == 7.0
        assert error.message == "get nodes n1: because"

    def test_a_missing_right_is_named_with_verb_and_resource(self, api, client) -> None:
        text = (
            'resourceslices.resource.k8s.io is forbidden: User "system:serviceaccount:dra:plugin" cannot list resource '
            '"resourceslices" in API group "resource.k8s.io" at the cluster scope'
        )
        api.faults.append(lambda r: Answer(403, status_body(403, "Forbidden", text)) if r.plural else None)
        error = the_error(lambda: client.list(RESOURCE_SLICES))
        assert error.remedy == (
            'Give system:serviceaccount:dra:plugin the verb "list" on "resourceslices" in API group '
            '"resource.k8s.io" (a rule of its ClusterRole).'
        )

    def test_a_refusal_keeps_the_paths_of_its_causes(self, api, client) -> None:
        causes = [
            {
                "field": "spec.devices[0].attributes[x].string",
                "reason": "FieldValueTooLong",
                "message": "Too long",
            }
        ]
        api.validate = lambda _obj: causes
        error = the_error(lambda: client.create(RESOURCE_SLICES, a_slice()))
        assert (error.code, error.retryable) == ("DRA-API-INVALID", False)
        assert error.fields["causes"][0].field == "spec.devices[0].attributes[x].string"

    def test_a_page_that_is_no_json_is_reported_with_its_start(self, api, client) -> None:
        api.faults.append(lambda r: Answer(200, "<html>login</html>") if r.plural else None)
        error = the_error(lambda: client.get(NODES, "n1"))
        assert error.code == "DRA-API-BAD-ANSWER"
        assert "<html>login" in error.message

    def test_a_server_that_is_not_there_is_unreachable(self, client_of) -> None:
        error = the_error(lambda: client_of(f"http://127.0.0.1:{free_port()}").get(NODES, "n1"))
        assert (error.code, error.status, error.retryable) == ("DRA-API-UNREACHABLE", 0, True)
        assert error.fields["refused"] is True
        assert "127.0.0.1" in error.message
        assert "object at 0x" not in error.message

    def test_a_server_that_says_nothing_costs_the_time_limit_and_no_more(self, api, client) -> None:
        api.faults.append(lambda r: Hang() if r.plural else None)
        start = time.monotonic()
        error = the_error(lambda: client.get(NODES, "n1", timeout_seconds=0.3))
        assert error.code == "DRA-API-TIMEOUT"
        assert time.monotonic() - start < 20

    def test_a_connection_reset_in_the_middle_of_an_answer_is_tried_once_more(self, api, client) -> None:
        api.put("nodes", {"metadata": {"name": "n1"}})
        cuts = iter([Answer(200, {"metadata": {"name": "x" * 500}}, cut_after=200)])
        api.faults.append(lambda r: next(cuts, None) if r.plural == "nodes" else None)
        assert client.get(NODES, "n1")["metadata"]["name"] == "n1"

    def test_a_write_that_breaks_off_is_not_sent_twice(self, api, client) -> None:
        api.faults.append(lambda r: Reset() if r.method == "POST" else None)
        error = the_error(lambda: client.create(RESOURCE_SLICES, a_slice()))
        assert (error.code, error.retryable) == ("DRA-API-INTERRUPTED", True)
        assert api.count("POST", "resourceslices") == 1

    def test_a_connection_that_was_kept_and_closed_by_the_server_is_replaced(self, api, client) -> None:
        api.put("nodes", {"metadata": {"name": "n1"}})
        client.get(NODES, "n1")
        resets = iter([Reset()])
        api.faults.append(lambda r: next(resets, None) if r.plural == "nodes" else None)
        assert client.get(NODES, "n1")["metadata"]["name"] == "n1"


class TestCredentials:
    def test_the_service_account_of_the_pod_is_used(self, api, tmp_path, monkeypatch) -> None:
        (tmp_path / "token").write_text("pod-token")
        (tmp_path / "ca.crt").write_text("ca")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        client = connect(KubeOptions(service_account_dir=tmp_path))
        # The small server speaks no TLS: what counts is where the client goes.
        error = the_error(lambda: client.get(NODES, "n1"))
        assert error.code in ("DRA-API-TLS", "DRA-API-INTERRUPTED", "DRA-API-CREDENTIALS")
        assert f"127.0.0.1:{api.port}" in error.message or "certificate" in error.message.lower()

    def test_a_token_that_expired_is_read_again_and_the_request_repeated(
        self, api, client_of, tmp_path
    ) -> None:
        client = client_of(api.url)
        api.put("nodes", {"metadata": {"name": "n1"}})
        api.token = "t0ken"
        client.get(NODES, "n1")
        api.token = "fresh"
        path = next(tmp_path.glob("kubeconfig-*"))
        path.write_text(path.read_text().replace("t0ken", "fresh"))
        assert client.get(NODES, "n1")["metadata"]["name"] == "n1"

    def test_a_token_that_stays_wrong_is_reported_after_one_more_try(self, api, client) -> None:
        api.token = "other"
        error = the_error(lambda: client.get(NODES, "n1"))
        assert (error.code, error.status) == ("DRA-API-UNAUTHORIZED", 401)
        assert api.count("GET", "nodes") == 2

    def test_a_kubeconfig_that_is_missing_is_named(self, tmp_path) -> None:
        client = connect(KubeOptions(kubeconfig=str(tmp_path / "none")))
        error = the_error(lambda: client.get(NODES, "n1"))
        assert error.code == "DRA-API-CREDENTIALS"
        assert "none" in error.message
        assert "--kubeconfig" in error.remedy

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("just text", "it is plain text"),
            ("- a", "it is a list"),
            ("", "it is empty"),
            ("a: [b", "it is not YAML"),
            ("\0", "it is not YAML"),
            ("clusters: {a: b}", "clusters is not a list"),
            ("clusters: [a]", "clusters[0] has no name"),
            ("clusters: [{name: c, cluster: {server: [a]}}]", "clusters[0] (c): server is not a text"),
            ("{cluster: {}}", "the cluster of its current context has no server"),
            ("{cluster: {server: ''}}", "has no server"),
            (
                "{user: {token: 'secret-token', auth-provider: {}}, cluster: {server: null}}",
                "server is not a text",
            ),
            ("users: [{name: u, user: {token: secret-token]", "line 1"),
            (
                "current-context: m\ncontexts: [{name: m, context: {user: secret-token}}]",
                "Expected key cluster",
            ),
            ("clusters: [{name: c, cluster: text}]", "cluster is not an object"),
            ("users: [{name: u, user: text}]", "users[0] (u): user is not an object"),
            ("kind: Config", "current-context"),
            ("{user: {exec: {apiVersion: v1}}}", "missing key 'command'"),
            ("{user: {exec: {apiVersion: v1, command: /no/such/program}}}", "/no/such/program"),
            ("{user: {exec: {apiVersion: v1, command: 'false'}}}", "process returned 1"),
            ("{user: {username: 5, password: 6}}", "TypeError"),
            ("{cluster: {server: 'localhost'}}", "'localhost' is not a URL"),
            ("{cluster: {server: 'http://127.0.0.1:port'}}", "is not a URL"),
            ("{cluster: {server: 'https://127.0.0.1', certificate-authority: /no/such/ca}}", "/no/such/ca"),
        ],
    )
    def test_a_kubeconfig_that_cannot_be_used_is_named_with_what_is_wrong(
        self, tmp_path, capfd, text, says
    ) -> None:
        path = tmp_path / "the-config"
        if text.startswith("{"):
            parts = {
                "user": {"token": "t"},
                "cluster": {"server": "http://127.0.0.1:1"},
                **yaml.safe_load(text),
            }
            text = yaml.safe_dump(
                {
                    "current-context": "main",
                    "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": parts["cluster"]}],
                    "users": [{"name": "u", "user": parts["user"]}],
                }
            )
        path.write_text(text)
        error = the_error(lambda: connect(KubeOptions(kubeconfig=str(path))).get(NODES, "n1"))
        assert error.code == "DRA-API-CREDENTIALS"
        assert str(path) in error.message
        assert says in error.message
        assert "bug" not in error.remedy
        assert "secret-token" not in str(error)
        assert capfd.readouterr() == ("", "")

    def test_a_cluster_that_is_not_the_contexts_may_lack_a_server(self, api, tmp_path) -> None:
        content = yaml.safe_load(kubeconfig_text(api.url))
        content["clusters"].append({"name": "spare", "cluster": {}})
        path = tmp_path / "config"
        path.write_text(yaml.safe_dump(content))
        api.put("nodes", {"metadata": {"name": "n1"}})
        assert connect(KubeOptions(kubeconfig=str(path))).get(NODES, "n1")["metadata"]["name"] == "n1"


class TestPace:
    def test_requests_are_spread_but_fetching_a_claim_never_waits(self, api, client_of) -> None:
        waited: list[float] = []

        class Clock:
            def now(self) -> float:
                return 5.0

            def wall(self) -> float:
                return 0.0

            def wait(self, _event: threading.Event, seconds: float | None) -> bool:
                waited.append(seconds or 0.0)
                return False

        client = client_of(api.url, qps=2.0, burst=1, clock=Clock())
        api.put("resourceclaims", {"metadata": {"name": "c", "namespace": "a"}}, "a")
        client.list(RESOURCE_SLICES)
        client.list(RESOURCE_SLICES)
        assert waited == [0.5]
        for _ in range(5):
            client.get(RESOURCE_CLAIMS, "c", "a")
        assert waited == [0.5]


class TestWatch:
    def test_events_come_in_order_from_the_version_given(self, api, client) -> None:
        first = client.create(RESOURCE_SLICES, a_slice("s0"))
        stream = client.watch(
            RESOURCE_SLICES, resource_version=first["metadata"]["resourceVersion"], server_seconds=20
        )
        client.create(RESOURCE_SLICES, a_slice("s1"))
        client.delete(RESOURCE_SLICES, "s0")
        events = iter(stream)
        seen = [(e.type, e.object["metadata"]["name"]) for e in (next(events), next(events))]
        stream.close()
        assert seen == [("ADDED", "s1"), ("DELETED", "s0")]

    def test_an_end_in_order_ends_the_iteration(self, api, client) -> None:
        assert list(client.watch(RESOURCE_SLICES, resource_version="0", server_seconds=0)) == []

    def test_a_version_that_the_server_forgot_is_gone(self, api, client) -> None:
        api.forget_history()
        error = the_error(lambda: list(client.watch(RESOURCE_SLICES, resource_version="1")))
        assert (error.code, error.status) == ("DRA-API-GONE", 410)

    def test_silence_ends_a_watch_with_a_timeout(self, api, client) -> None:
        api.faults.append(lambda r: Stall() if r.is_watch else None)
        start = time.monotonic()
        error = the_error(
            lambda: list(client.watch(RESOURCE_SLICES, resource_version="1", inactivity_seconds=0.3))
        )
        assert error.code == "DRA-API-TIMEOUT"
        assert time.monotonic() - start < 30

    def test_another_thread_ends_a_blocking_read_at_once(self, api, client) -> None:
        api.faults.append(lambda r: Stall() if r.is_watch else None)
        stream = client.watch(RESOURCE_SLICES, resource_version="1", inactivity_seconds=60)
        seen: list[object] = []
        reader = threading.Thread(target=lambda: seen.append(list(stream)))
        reader.start()
        start = time.monotonic()
        stream.close()
        reader.join(30)
        assert not reader.is_alive()
        assert seen == [[]]
        assert time.monotonic() - start < 30


LEAN = """
import sys
from pathlib import Path
from dra.kube.client import connect
from dra.kube.connection import KubeOptions
from dra.kube.resources import NODES
assert "kubernetes" not in sys.modules and "urllib3" not in sys.modules, "loaded before it is needed"
client = connect(KubeOptions(service_account_dir=Path(sys.argv[1])))
try:
    client.get(NODES, "n")
except Exception as error:
    print(error.code)
heavy = ("kubernetes.client.api.", "kubernetes.client.models.", "kubernetes.aio", "kubernetes.informer", "rich",
    "aiohttp", "yaml", "requests", "oauthlib", "websocket", "pydantic", "dateutil")
print([m for m in sys.modules if m.startswith(heavy)])
from dra.api.config import decode_config
print(type(decode_config({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"})).__name__)
import kubernetes
print(kubernetes.config.load_kube_config.__name__, kubernetes.client.ApiClient.__name__)
"""


def test_in_a_pod_only_the_transport_of_the_official_package_is_loaded(tmp_path: Path) -> None:
    """API classes and models cost 5 to 20 MiB each, all the rest of the package 7; who wants it still gets it."""
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("not read before something answers")
    environment = {
        **{k: v for k, v in os.environ.items() if "proxy" not in k.lower()},
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(free_port()),
    }
    command = [sys.executable, "-c", LEAN, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.stdout.splitlines() == [
        "DRA-API-UNREACHABLE",
        "[]",
        "GpuConfig",
        "load_kube_config ApiClient",
    ], result.stderr


WITHOUT_OAUTH = """
import sys
from dra.kube import connection
connection._new_client(connection.KubeOptions(kubeconfig=sys.argv[1]))
print([name for name in ("requests", "oauthlib", "requests_oauthlib") if name in sys.modules])
loader = sys.modules["kubernetes.config.kube_config"]
print(type(loader.OAuth2Session(client_id="x")).__module__, loader.oauthlib.oauth2.OAuth2Error.__name__)
"""


def test_a_kubeconfig_loads_no_oauth_until_somebody_logs_in_with_it(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {token: x}}]\n"
    )
    command = [sys.executable, "-c", WITHOUT_OAUTH, str(tmp_path / "config")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["[]", "requests_oauthlib.oauth2_session OAuth2Error"], result.stderr


def test_an_error_survives_being_sent_to_another_process() -> None:
    error = KubeError("DRA-API-GONE", "gone", status=410, reason="Expired")
    assert pickle.loads(pickle.dumps(error)).status == 410


@pytest.mark.fault("F44")
def test_a_fenced_client_asks_before_each_write_and_sends_nothing_against_the_answer(api, client) -> None:
    asked: list[str] = []

    def check() -> None:
        asked.append("now")
        if len(asked) > 2:
            raise KubeError("DRA-FLEET-NOT-LEADING", "another leads")

    fenced = client.fenced(check)
    fenced.list(NODES)
    assert asked == []
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}
    stored = fenced.create(NODES, body)
    fenced.patch(NODES, "n", {"metadata": {"labels": {"a": "b"}}})
    writes = (
        lambda: fenced.create(NODES, {**body, "metadata": {"name": "m"}}),
        lambda: fenced.replace(NODES, "n", stored),
        lambda: fenced.patch(NODES, "n", {"metadata": {"labels": {"a": "c"}}}),
        lambda: fenced.apply(NODES, "n", body),
        lambda: fenced.delete(NODES, "n"),
        lambda: fenced.delete_collection(NODES),
        lambda: fenced.with_limit(qps=5.0, burst=5).delete(NODES, "n"),
    )
    for write in writes:
        with pytest.raises(KubeError, match="DRA-FLEET-NOT-LEADING"):
            write()
    assert len(asked) == 2 + len(writes)
    assert [(obj["metadata"]["name"], obj["metadata"]["labels"]) for obj in api.all("nodes")] == [
        ("n", {"a": "b"})
    ]
    # The client that it was made of is as free as before.
    client.delete(NODES, "n")


def test_an_instance_is_named_in_the_user_agent_in_characters_that_a_header_can_have() -> None:
    assert agent_of("dra-fleet", "fleet-7d9-x2") == "dra-fleet (fleet-7d9-x2)"
    assert agent_of("dra-fleet", "名\r\nX: y") == "dra-fleet (???X: y)"
    assert agent_of("dra/gpu.nvidia.com", "") == "dra/gpu.nvidia.com"
