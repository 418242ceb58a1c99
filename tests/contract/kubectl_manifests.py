"""The manifests that the recorded runs of `kubectl.json` were given, written again from the requests and outputs that show
them, and the bodies that kubectl sent as protobuf. Not a test: `test_kubectl_golden.py` uses it.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

Json = dict[str, Any]
DRA = "resource.k8s.io/v1"


def slice_of(name: str, model: str = "H100", memory: str = "80Gi", **spec: Any) -> Json:
    device = {
        "name": "gpu-0",
        "attributes": {"model": {"string": model}},
        "capacity": {"memory": {"value": memory}},
    }
    pool = {"name": "pool-a", "generation": 1, "resourceSliceCount": 1}
    body = {"driver": "gpu.golden.example", "nodeName": "gnode-0", "pool": pool, "devices": [device], **spec}
    return {"apiVersion": DRA, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": body}


def claim_of(name: str, **exactly: Any) -> Json:
    request = {"name": "r0", "exactly": {"deviceClassName": "gpu.golden.example", **exactly}}
    return {
        "apiVersion": DRA,
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "golden"},
        "spec": {"devices": {"requests": [request]}},
    }


def template_of(name: str) -> Json:
    return {
        "apiVersion": DRA,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "golden"},
        "spec": {"spec": claim_of("x")["spec"]},
    }


MANIFESTS: dict[str, list[Json]] = {
    "slice.yaml": [slice_of("ks0")],
    "slice2.yaml": [slice_of("ks0", "B200", "192Gi")],
    "bad.yaml": [slice_of("ks1", nope=1)],
    "inv.yaml": [slice_of("ks1", devices=[{"name": "a"}, {"name": "a"}])],
    "claim.yaml": [claim_of("kc0")],
    "claim2.yaml": [claim_of("kc0", count=2)],
    "tmpl.yaml": [template_of("kt0")],
    "class.yaml": [
        {
            "apiVersion": DRA,
            "kind": "DeviceClass",
            "metadata": {"name": "kd.golden.example"},
            "spec": {"selectors": [{"cel": {"expression": "true"}}]},
        }
    ],
    "pod.yaml": [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "kp0", "namespace": "golden"},
            "spec": {
                "schedulerName": "none",
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {"name": "c", "image": "example.invalid/none:1", "resources": {"claims": [{"name": "a"}]}}
                ],
                "resourceClaims": [{"name": "a", "resourceClaimName": "kc0"}],
            },
        }
    ],
    "all.yaml": [slice_of("ks2"), claim_of("kc2"), template_of("kt2")],
}

# Bodies as kubectl 1.36.4 sends them, by the end of the command.
PROTOBUF = {
    "auth can-i list resourceslices": (
        "azhzAAoyChdhdXRob3JpemF0aW9uLms4cy5pby92MRIXU2VsZlN1YmplY3RBY2Nlc3NSZXZpZXcSVgoQCgASABoAIgAqADIAOABCABI4CjYK"
        "B2RlZmF1bHQSBGxpc3QaD3Jlc291cmNlLms4cy5pbyIAKg5yZXNvdXJjZXNsaWNlczIAOgAaCAgAEgAaACAAGgAiAA=="
    ),
    "auth whoami": (
        "azhzAAotChhhdXRoZW50aWNhdGlvbi5rOHMuaW8vdjESEVNlbGZTdWJqZWN0UmV2aWV3EhoKEAoAEgAaACIAKgAyADgAQgASBgoECgASABoA"
        "IgA="
    ),
    "create ns golden-k": "azhzAAoPCgJ2MRIJTmFtZXNwYWNlEiAKGAoIZ29sZGVuLWsSABoAIgAqADIAOABCABIAGgIKABoAIgA=",
    "create configmap kcm --from-literal=a=b -n golden": (
        "azhzAAoPCgJ2MRIJQ29uZmlnTWFwEiMKGQoDa2NtEgAaBmdvbGRlbiIAKgAyADgAQgASBgoBYRIBYhoAIgA="
    ),
}

# What `kubectl run kr0 --image=… --dry-run=server` sends.
RUN_POD: Json = {
    "kind": "Pod",
    "apiVersion": "v1",
    "metadata": {"name": "kr0", "namespace": "golden", "labels": {"run": "kr0"}},
    "spec": {
        "containers": [{"name": "kr0", "image": "example.invalid/none:1", "resources": {}}],
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
    },
    "status": {},
}


def body_of(command: str, request: Json, number: int) -> bytes:
    """Give the body of a recorded request; `number` counts the run's requests that need a manifest."""
    if "body" in request:
        return json.dumps(request["body"]).encode()
    method, media = request["method"], request.get("content_type") or ""
    if method == "GET":
        return b""
    if method == "DELETE":
        return b'{"propagationPolicy":"Background"}'
    if media == "application/vnd.kubernetes.protobuf":
        return b64decode(PROTOBUF[command.removeprefix("kubectl ")])
    if command.startswith("kubectl run "):
        return json.dumps(RUN_POD).encode()
    name = next(word[1:] for word in command.split() if word.startswith("@"))
    manifest = MANIFESTS[name][number]
    noted = {**manifest, "metadata": {**manifest["metadata"], "annotations": {}}}
    text = json.dumps(noted, separators=(",", ":"), sort_keys=True)
    note = {"kubectl.kubernetes.io/last-applied-configuration": f"{text}\n"}
    if "fieldManager=kubectl-last-applied" in request["path"]:
        about = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}
        manifest = {**about, "metadata": {"name": manifest["metadata"]["name"], "annotations": note}}
    elif command.startswith("kubectl apply") and method == "POST":
        manifest = {**manifest, "metadata": {**manifest["metadata"], "annotations": note}}
    return json.dumps(manifest).encode()
