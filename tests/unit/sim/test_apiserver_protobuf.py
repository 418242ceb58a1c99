"""Objects that kubectl 1.36.4 sends as protobuf, as recorded on the wire, and broken ones."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.exchange import Request
from dra.sim.apiserver.protobuf import decode_object
from dra.sim.apiserver.status import ApiFailure

# Bodies of `kubectl create deployment web --image=nginx --replicas=0 --port=80`, `job j --image=busybox -- echo hi`,
# `cronjob c --image=busybox --schedule=@hourly -- date`, `rolebinding rb --role=r --user=x`, `quota q
# --hard=pods=3,cpu=500m`, `pdb p --selector=a=b --min-available=50%`, `secret generic se --from-literal=a=b`.
DEPLOYMENT = (
    "azhzAAoVCgdhcHBzL3YxEgpEZXBsb3ltZW50ErgBCh8KA3dlYhIAGgAiACoAMgA4AEIAWgoKA2FwcBIDd2ViEoYBCAASDAoKCgNh"
    "cHASA3dlYhpsChwKABIAGgAiACoAMgA4AEIAWgoKA2FwcBIDd2ViEkwSLgoFbmdpbngSBW5naW54KgAyCgoAEAAYUCIAKgBCAGoA"
    "cgCAAQCIAQCQAQCiAQAaADIAQgBKAFIAWABgAGgAggEAigEAmgEAwgEAIgIKACgAOAAaDAgAEAAYACAAKAA4ABoAIgA="
)
JOB = (
    "azhzAAoPCghiYXRjaC92MRIDSm9iEoIBChEKAWoSABoAIgAqADIAOABCABJjMmEKEAoAEgAaACIAKgAyADgAQgASTRIqCgFqEgdi"
    "dXN5Ym94GgRlY2hvGgJoaSoAQgBqAHIAgAEAiAEAkAEAogEAGgVOZXZlcjIAQgBKAFIAWABgAGgAggEAigEAmgEAwgEAGgggACgA"
    "MAA6ABoAIgA="
)
CRON_JOB = (
    "azhzAAoTCghiYXRjaC92MRIHQ3JvbkpvYhKdAQoRCgFjEgAaACIAKgAyADgAQgAShQEKB0Bob3VybHkaACp4ChEKAWMSABoAIgAq"
    "ADIAOABCABJjMmEKEAoAEgAaACIAKgAyADgAQgASTRImCgFjEgdidXN5Ym94GgRkYXRlKgBCAGoAcgCAAQCIAQCQAQCiAQAaCU9u"
    "RmFpbHVyZTIAQgBKAFIAWABgAGgAggEAigEAmgEAwgEAGgAaACIA"
)
ROLE_BINDING = (
    "azhzAAorChxyYmFjLmF1dGhvcml6YXRpb24uazhzLmlvL3YxEgtSb2xlQmluZGluZxJiChIKAnJiEgAaACIAKgAyADgAQgASJgoE"
    "VXNlchIZcmJhYy5hdXRob3JpemF0aW9uLms4cy5pbxoBeCIAGiQKGXJiYWMuYXV0aG9yaXphdGlvbi5rOHMuaW8SBFJvbGUaAXIa"
    "ACIA"
)
QUOTA = (
    "azhzAAoTCgJ2MRINUmVzb3VyY2VRdW90YRIzChEKAXESABoAIgAqADIAOABCABIcCg0KA2NwdRIGCgQ1MDBtCgsKBHBvZHMSAwoB"
    "MxoAGgAiAA=="
)
BUDGET = (
    "azhzAAogCglwb2xpY3kvdjESE1BvZERpc3J1cHRpb25CdWRnZXQSNgoRCgFwEgAaACIAKgAyADgAQgASFQoJCAEQABoDNTAlEggK"
    "BgoBYRIBYhoKCAAYACAAKAAwABoAIgA="
)
SECRET = "azhzAAoMCgJ2MRIGU2VjcmV0Eh4KEgoCc2USABoAIgAqADIAOABCABIGCgFhEgFiGgAaACIA"


def post(server: SimApiServer, path: str, body: bytes) -> tuple[int, Any]:
    headers = {
        "content-type": "application/vnd.kubernetes.protobuf",
        "accept": "application/vnd.kubernetes.protobuf,application/json",
    }
    answer = server.api.handle(
        Request("POST", f"{path}?fieldValidation=Strict&fieldManager=kubectl-create", headers, body)
    )
    return answer.status, json.loads(answer.body)


def decoded(text: str) -> Any:
    return decode_object(b64decode(text))


def test_a_deployment_keeps_a_zero_that_was_meant_and_drops_zeros_that_nobody_set() -> None:
    deployment = decoded(DEPLOYMENT)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert deployment["metadata"] == {"name": "web", "labels": {"app": "web"}}
    assert deployment["spec"]["replicas"] == 0
    assert "minReadySeconds" not in deployment["spec"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container == {"name": "nginx", "image": "nginx", "ports": [{"containerPort": 80}], "resources": {}}


def test_jobs_cron_jobs_and_policies_come_out_as_they_were_written() -> None:
    job, cron = decoded(JOB), decoded(CRON_JOB)
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["echo", "hi"]
    assert cron["spec"]["schedule"] == "@hourly"
    assert cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert decoded(ROLE_BINDING)["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "r",
    }
    assert decoded(QUOTA)["spec"]["hard"] == {"pods": "3", "cpu": "500m"}
    assert decoded(BUDGET)["spec"] == {"minAvailable": "50%", "selector": {"matchLabels": {"a": "b"}}}
    assert decoded(SECRET)["data"] == {"a": "Yg=="}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/apis/apps/v1/namespaces/default/deployments", DEPLOYMENT),
        ("/apis/batch/v1/namespaces/default/jobs", JOB),
        ("/apis/batch/v1/namespaces/default/cronjobs", CRON_JOB),
        ("/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings", ROLE_BINDING),
        ("/api/v1/namespaces/default/resourcequotas", QUOTA),
        ("/apis/policy/v1/namespaces/default/poddisruptionbudgets", BUDGET),
        ("/api/v1/namespaces/default/secrets", SECRET),
    ],
)
def test_the_server_stores_what_kubectl_create_sends(path: str, body: str) -> None:
    server = SimApiServer()
    status, made = post(server, path, b64decode(body))
    assert status == 201, made
    status, again = post(server, path, b64decode(body))
    assert (status, again["reason"]) == (409, "AlreadyExists")


def test_a_kind_without_a_table_is_415_and_named() -> None:
    with pytest.raises(ApiFailure, match="does not read Whatever as protobuf") as refused:
        decode_object(b"k8s\0" + b"\x0a\x0e\x0a\x02v1\x12\x08Whatever")
    assert refused.value.code == 415


@given(st.integers(0, len(b64decode(DEPLOYMENT))), st.binary(max_size=20))
def test_a_body_cut_or_garbled_is_an_answer_never_a_crash(at: int, more: bytes) -> None:
    try:
        decode_object(b64decode(DEPLOYMENT)[:at] + more)
    except ApiFailure as failure:
        assert failure.code in {400, 415}
