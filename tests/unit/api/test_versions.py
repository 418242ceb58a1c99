"""Objects of resource.k8s.io in the versions a server may speak, against what a real server answered."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest

from dra.api.versions import from_v1, to_v1

GOLDEN = Path(os.environ.get("DRA_GOLDEN", "../shared/golden")) / "apiserver" / "versions.json"

SLICE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceSlice",
    "metadata": {"name": "s"},
    "spec": {
        "driver": "gpu.nvidia.com",
        "nodeName": "n",
        "sharedCounters": [{"name": "c", "counters": {"m": {"value": "1"}}}],
        "devices": [
            {"name": "gpu-0", "attributes": {"a": {"bool": False}}, "capacity": {"m": {"value": "1Gi"}},
             "taints": [{"key": "k", "effect": "None"}], "aFieldOfTomorrow": {"x": 1}},
            {"name": "gpu-1"},
        ],
    },
}  # fmt: skip
CLAIM = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "c", "uid": "u"},
    "spec": {
        "devices": {
            "requests": [
                {"name": "a", "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 2,
                                          "adminAccess": True, "tolerations": [{"operator": "Exists"}]}},
                {"name": "b", "firstAvailable": [{"name": "s", "deviceClassName": "x", "count": 1}]},
            ],
            "constraints": [{"matchAttribute": "d/x"}],
        }
    },
    "status": {"allocation": {"devices": {"results": [{"request": "a", "driver": "d", "pool": "p", "device": "x"}]}}},
}  # fmt: skip


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize("obj", [SLICE, CLAIM], ids=["slice", "claim"])
def test_a_round_trip_through_any_version_changes_nothing_and_leaves_the_input_alone(version, obj) -> None:
    before = copy.deepcopy(obj)
    there = from_v1(obj, version=version, kind=obj["kind"])
    assert there["apiVersion"] == f"resource.k8s.io/{version}"
    assert to_v1(there, version=version, kind=obj["kind"]) == before
    assert obj == before


def test_v1beta1_wraps_devices_even_empty_ones() -> None:
    devices = from_v1(SLICE, version="v1beta1", kind="ResourceSlice")["spec"]["devices"]
    assert devices[1] == {"name": "gpu-1", "basic": {}}
    assert devices[0]["basic"]["aFieldOfTomorrow"] == {"x": 1}


def test_v1beta1_has_the_request_flat_and_an_empty_class_beside_alternatives() -> None:
    flat = from_v1(CLAIM, version="v1beta1", kind="ResourceClaim")
    flat["spec"]["devices"]["requests"][1]["deviceClassName"] = ""
    assert flat["spec"]["devices"]["requests"][0]["count"] == 2
    assert to_v1(flat, version="v1beta1", kind="ResourceClaim") == CLAIM


def test_a_template_is_converted_inside() -> None:
    template = {"metadata": {}, "spec": {"metadata": {"labels": {}}, "spec": CLAIM["spec"]}}
    flat = from_v1(template, version="v1beta1", kind="ResourceClaimTemplate")
    assert flat["spec"]["spec"]["devices"]["requests"][0]["adminAccess"] is True
    assert to_v1(flat, version="v1beta1", kind="ResourceClaimTemplate") == template


def test_a_patch_with_parts_only_is_converted_in_those_parts() -> None:
    assert from_v1({"spec": {"pool": {"generation": 2}}}, version="v1beta1", kind="ResourceSlice") == {
        "spec": {"pool": {"generation": 2}}
    }
    status = {"status": {"devices": []}}
    assert from_v1(status, version="v1beta1", kind="ResourceClaim") == status


@pytest.mark.skipif(not GOLDEN.exists(), reason="no recorded answers: set DRA_GOLDEN")
def test_one_object_read_in_three_versions_from_a_real_server_gives_the_same_v1_object() -> None:
    kinds = {"resourceslices": "ResourceSlice", "resourceclaims": "ResourceClaim", "resourceclaimtemplates": "ResourceClaimTemplate"}  # fmt: skip
    compared = 0
    for scenario in json.loads(GOLDEN.read_text())["scenarios"]:
        seen: dict[tuple[str, str, str], dict] = {}
        for step in scenario["steps"]:
            parts = step["path"].strip("/").split("/")
            found = next((kinds[part] for part in parts if part in kinds), None)
            answer = step.get("response")
            if step["method"] != "GET" or step["status"] != 200 or not found or answer.get("kind") != found:
                continue
            obj = to_v1(answer, version=parts[2], kind=found)
            metadata = obj["metadata"]
            known = seen.setdefault((found, metadata["uid"], metadata["resourceVersion"]), obj)
            assert obj == known
            compared += known is not obj
    assert compared >= 2
