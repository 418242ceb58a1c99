"""Containers that would need two MPS daemons are warned of."""

from __future__ import annotations

import pytest

from dra.diagnose.validate import validate_manifests
from dra.diagnose.validate_source import manifest_of


def config(strategy, *requests):
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy},
    }
    entry = {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}
    return {**entry, "requests": list(requests)} if requests else entry


def template(name, requests, *configs):
    devices = {
        "requests": [{"name": each, "exactly": {"deviceClassName": "gpu.nvidia.com"}} for each in requests],
        "config": list(configs),
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"spec": {"devices": devices}},
    }


def pod(*containers, claims=("one",)):
    """A container is a list of (claim, request)."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team"},
        "spec": {
            "containers": [
                {
                    "name": f"c{number}",
                    "image": "cuda",
                    "resources": {"claims": [{"name": c, **({"request": r} if r else {})} for c, r in uses]},
                }
                for number, uses in enumerate(containers)
            ],
            "resourceClaims": [{"name": name, "resourceClaimTemplateName": name} for name in claims],
        },
    }


def warned(*manifests):
    report = validate_manifests([manifest_of(each) for each in manifests], known_devices=list)
    assert [each for each in report.findings if each.severity == "error"] == []
    return [each.path for each in report.findings if each.code == "DRA-CONFIG-MPS-TWICE"]


TWO = template("one", ["a", "b"], config("MPS", "a"), config("MPS", "b"))
AT = "spec.containers[0]"


def test_a_container_that_uses_two_groups_of_a_claim():
    assert warned(TWO, pod([("one", "")], [("one", "a")])) == [AT]
    assert warned(TWO, pod([("one", "a"), ("one", "b")])) == [AT]


def test_a_container_that_uses_groups_of_two_claims():
    other = template("two", ["a"], config("MPS"))
    assert warned(TWO, other, pod([("one", "a"), ("two", "")], claims=("one", "two"))) == [AT]


@pytest.mark.parametrize(
    "claim",
    [
        template("one", ["a", "b"], config("MPS")),
        template("one", ["a", "b"], config("MPS", "a", "b")),
        template("one", ["a", "b"], config("MPS", "a"), config("TimeSlicing", "b")),
        template("one", ["a", "b"], config("MPS", "a"), config("MPS", "b"), config("TimeSlicing")),
        template("one", ["a", "b"]),
    ],
)
def test_one_group_or_none_is_well(claim):
    assert warned(claim, pod([("one", "")], [("one", "a")])) == []


def test_a_container_for_each_group_is_well():
    assert warned(TWO, pod([("one", "a")], [("one", "b")])) == []
