"""The simulated API server against recorded answers of a real one, scenario by scenario.

The recordings are read from `DRA_GOLDEN` (default `../shared/golden` beside the repository). Steps that the simulator
does not answer as the real server did stand in `NOT_SIMULATED` with the reason; one that passes after all fails the
test, so that the list stays true. With `KUBEBUILDER_ASSETS` (a directory with etcd and kube-apiserver) the scenarios
that need no controllers run against a real server too, from the same recordings.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPSConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.exchange import Request
from tests.contract.apiserver_replay import Answer, Send, load, replay
from tests.real_apiserver import ADMIN, RealApiServer, needs_real_apiserver, real_apiserver

Json = dict[str, Any]

GOLDEN = (
    Path(os.environ.get("DRA_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")).resolve()
    / "apiserver"
)
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
STAMP = "2026-05-01T12:00:00Z"
MERGE = "application/merge-patch+json"

RBAC = "the simulator has no authorisation and no Impersonate headers"
PROTOBUF = "the simulator answers in JSON and YAML only"
BUILD = "facts of the recorded build (commit, Go version, its start-up hooks)"
CLAIM_CONTROLLER = "the claim controller is part of the simulated cluster, not of its API server"
TAINT_CONTROLLER = "the device taint eviction controller is not simulated"
DOWNSTREAM = "a config map that only the recorded fork has"

NOT_SIMULATED: dict[str, dict[int, str]] = {
    "core/small-kinds": {11: "service account tokens are not issued"},
    "crd/crd": {
        66: "the type of a 406 whose only accepted encoding is protobuf",
    },
    "discovery/legacy": {12: BUILD, 13: BUILD, 21: PROTOBUF, 29: BUILD},
    "discovery/aggregated": {0: "nodes/proxy and services/proxy are not served"},
    "discovery/aggregated-negotiation": {6: PROTOBUF, 13: PROTOBUF},
    "generic/errors": {31: PROTOBUF, 32: PROTOBUF},
    "generic/auth": {1: BUILD, **dict.fromkeys((0, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 18, 21), RBAC)},
    "initial/initial": {2: "an empty list of images, written by a kubelet"},
    "pods/claims-validation": {0: DOWNSTREAM},
    "pods/template-claim": {2: CLAIM_CONTROLLER, 3: CLAIM_CONTROLLER},
    "resourceclaims/taintrules": dict.fromkeys((1, 2, 3, 4), TAINT_CONTROLLER),
    "resourceclaims/controller-deallocates": dict.fromkeys((2, 3, 4, 5, 6), CLAIM_CONTROLLER),
    "resourceslices/validation": {
        185: "the recorded server crashed on a step of zero; later ones refuse it, as we do"
    },
    "tables/tables": {30: DOWNSTREAM},
}

SCENARIOS = dict(load(GOLDEN)) if GOLDEN.is_dir() else {}

pytestmark = pytest.mark.skipif(
    not SCENARIOS, reason=f"no recordings in {GOLDEN}; set DRA_GOLDEN to the folder that holds apiserver/"
)


def sender(server: SimApiServer) -> Send:
    def send(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        lower = {key.lower(): value for key, value in headers.items()}
        response = server.api.handle(Request(method, path, lower, body))
        answered: dict[str, Any] = dict(response.headers)
        if response.warnings:
            answered["Warning"] = response.warnings
        if response.stream is not None:
            lines = [json.loads(line) for line in response.stream if line]
            return Answer(response.status, None, response.content_type, answered, lines)
        content = b"" if method == "HEAD" else response.body
        return Answer(response.status, decoded(content), response.content_type, answered)

    return send


def decoded(content: bytes) -> Any:
    return json.loads(content) if content[:1] == b"{" else content.decode("utf-8", "replace")


def initial_objects() -> Iterator[tuple[str, Json]]:
    """Give what the recordings start from: collection path and object, in the order they were made."""
    steps = json.loads((GOLDEN / "initial.json").read_text(encoding="utf-8"))["scenarios"][0]["steps"]
    order = {"deviceclasses": 0, "nodes": 1, "namespaces": 2}
    for step in sorted(steps, key=lambda s: order.get(s["path"].rpartition("/")[2], 9)):
        answer = step["response"]
        kind = answer["kind"].removesuffix("List")
        for item in answer["items"]:
            meta = {
                k: item["metadata"][k] for k in ("name", "labels", "annotations") if k in item["metadata"]
            }
            if kind in {"DeviceClass", "Node"} or meta["name"] == "golden":
                text = json.dumps(
                    {"apiVersion": answer["apiVersion"], "kind": kind, **item, "metadata": meta}
                )
                for token, value in (("<time>", STAMP), ("<server>", "127.0.0.1"), ("<redacted>", "x")):
                    text = text.replace(token, value)
                yield step["path"], json.loads(text)


def seed(server: SimApiServer) -> None:
    for path, obj in initial_objects():
        status, answer = server.request("POST", path, obj)
        assert status == 201, answer
        if obj["kind"] == "Node":
            # The recorded node has been up for a while: its taint is gone.
            taints = {"spec": {"taints": None}}
            assert server.request("PATCH", f"{path}/node-1", taints, content_type=MERGE)[0] == 200


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_simulated_server_answers_as_the_real_one_did(name: str) -> None:
    server = SimApiServer(clock=NOW.timestamp, time_scale=0.1, node_lifecycle=True)
    server.collector.start()
    try:
        seed(server)
        results = replay(
            SCENARIOS[name], sender(server), now=STAMP, floor=server.storage.revision, patience=0.5
        )
    finally:
        server.collector.stop()
    listed = NOT_SIMULATED.get(name, {})
    wrong = {result.index: result for result in results}
    unexpected = [
        f"step {r.index}: {r.label}\n    " + "\n    ".join(r.differences)
        for r in results
        if r.index not in listed
    ]
    assert not unexpected, "\n".join(unexpected)
    stale = {index: reason for index, reason in listed.items() if index not in wrong}
    assert not stale, f"these steps pass now, strike them from NOT_SIMULATED: {stale}"


def test_the_list_of_what_is_not_simulated_names_real_steps_only() -> None:
    for name, steps in NOT_SIMULATED.items():
        assert all(index < len(SCENARIOS[name]["steps"]) for index in steps), name
    assert sum(map(len, NOT_SIMULATED.values())) < 50


# The same recordings against a real server, where one is at hand.

GATES = (
    "DRAPartitionableDevices",
    "DRAConsumableCapacity",
    "DRADeviceTaints",
    "DRADeviceTaintRules",
    "DRAExtendedResource",
    "DRAResourceClaimDeviceStatus",
    "DRADeviceBindingConditions",
    "ResourceHealthStatus",
)
# Scenarios that need no controllers. Steps: no revision is compacted yet; what only the recorded fork adds.
ON_REAL: dict[str, set[int]] = {
    "resourceslices/create-defaulting": set(),
    "resourceslices/create-variants": set(),
    "resourceslices/validation": set(),
    "resourceclaims/create-defaulting": set(),
    "resourceclaims/validation": set(),
    "resourceclaims/admin-access": set(),
    "resourceclaims/templates": set(),
    "resourceclaims/deviceclasses": set(),
    "resourceclaims/status-lifecycle": set(),
    "resourceclaims/status-put": set(),
    "resourceclaims/status-firstavailable-shared": set(),
    "resourceclaims/status-apply": set(),
    "apply/slice": set(),
    "apply/pod-and-claim": set(),
    "core/events": set(),
    "core/small-kinds": set(),
    "crd/crd": set(),
    "discovery/aggregated": set(),
    "generic/errors": set(),
    "generic/put-patch": set(),
    "generic/patch-pods-claims": set(),
    "list-watch/list": {17, 54},
    "pods/claims-validation": {0},
    "pods/lifecycle": set(),
    "pods/graceful-delete": set(),
    "versions/conversion": set(),
}


SERVED_ON_REAL = tuple(f"resource.k8s.io/{version}=true" for version in ("v1beta1", "v1beta2", "v1alpha3"))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    gates = [f"{gate}=true" for gate in GATES]
    with real_apiserver(tmp_path_factory.mktemp("real"), gates=gates, served=SERVED_ON_REAL) as server:
        send = real_sender(server)
        for path, obj in initial_objects():
            made = send("POST", path, {"Content-Type": "application/json"}, json.dumps(obj).encode())
            assert made.status == 201, made.body
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        accounts = "/api/v1/namespaces/golden/serviceaccounts"
        send("POST", accounts, {"Content-Type": "application/json"}, json.dumps(account).encode())
        yield send


def real_sender(server: RealApiServer) -> Send:
    context = ssl.create_default_context(cafile=str(server.ca_file))
    token = server.token_of(ADMIN)

    def send(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        with closing(HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)) as connection:
            # By hand, so that no header is added that the recorder did not send.
            connection.putrequest(method, path, skip_accept_encoding=True)
            given = {"Authorization": f"Bearer {token}", "Content-Length": str(len(body)), **headers}
            for key, value in given.items():
                connection.putheader(key, value)
            connection.endheaders(body)
            try:
                answer = connection.getresponse()
            except RemoteDisconnected:
                return Answer(0, None, None, {})
            content = answer.read()
            answered: dict[str, Any] = dict(answer.headers.items())
            warnings = answer.headers.get_all("Warning")
            answered.pop("Warning", None)
            if warnings:
                answered["Warning"] = warnings
            kind = answer.headers.get("Content-Type")
            if answer.status == 200 and (content.startswith(b'{"type":"') or not content):
                return Answer(200, None, kind, answered, [json.loads(line) for line in content.splitlines()])
            return Answer(answer.status, decoded(content), kind, answered)

    return send


@pytest.mark.real
@needs_real_apiserver
@pytest.mark.parametrize("name", ON_REAL)
@pytest.mark.timeout(180)
def test_a_real_server_answers_as_recorded(name: str, real: Send) -> None:
    results = replay(SCENARIOS[name], real, now=STAMP, patience=20)
    unexpected = [
        f"step {r.index}: {r.label}\n    " + "\n    ".join(r.differences)
        for r in results
        if r.index not in ON_REAL[name]
    ]
    assert not unexpected, "\n".join(unexpected)
