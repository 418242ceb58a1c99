"""The custom resources on a real API server: it takes the definitions, and each policy of the table or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.real.cluster import REPOSITORY, Cluster
from tests.e2e.real.control_plane import ApiError
from tests.e2e.real.processes import wait_until
from tests.policy_table import ACCEPTED, REFUSED

pytestmark = pytest.mark.real

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POLICIES = "/apis/gpudra.dev/v1alpha1/gpunodepolicies"


def body(spec: dict[str, Any], name: str = "p") -> dict[str, Any]:
    """Give a policy."""
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.fixture(scope="module")
def defined(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with our definitions; none of the objects stays."""
    said = cluster.kubectl("apply", "-f", str(REPOSITORY / "crds"))
    assert "Warning" not in said
    wait_until(
        lambda: cluster.get("/apis/gpudra.dev/v1alpha1", missing=True),
        seconds=60,
        what="the kinds are served",
    )
    yield cluster
    cluster.control_plane.call("DELETE", POLICIES)


def test_the_api_server_finds_no_flaw_in_the_definitions(defined):
    for name in ("gpunodepolicies", "gpunodes"):
        status = wait_until(
            lambda name=name: defined.get(f"{DEFINITIONS}/{name}.gpudra.dev")["status"].get("conditions"),
            seconds=60, what="the definition has been looked at",
        )  # fmt: skip
        found = {condition["type"]: condition["status"] for condition in status}
        assert found["Established"] == "True"
        assert "NonStructuralSchema" not in found


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_api_server_accepts(defined, name):
    defined.create(f"{POLICIES}?dryRun=All", body(ACCEPTED[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_the_api_server_refuses(defined, name):
    spec, word = REFUSED[name]
    with pytest.raises(ApiError) as caught:
        defined.create(f"{POLICIES}?dryRun=All", body(spec))
    assert caught.value.status == 422
    assert word in str(caught.value)


def test_kubectl_shows_a_policy_with_its_columns_and_explains_the_kind(defined):
    defined.create(POLICIES, body({"gpus": [{"timeSlice": "Long"}], "weight": 7}, "shown"))
    header, row = defined.kubectl("get", "gnp").strip().splitlines()
    assert header.split() == ["NAME", "WEIGHT", "NODES", "APPLIED", "WAITING", "REFUSED", "AGE"]
    assert row.split()[:2] == ["shown", "7"]
    assert "time-slice" in defined.kubectl("explain", "gpunodepolicy.spec.gpus.timeSlice").lower()
    stored = defined.get(f"{POLICIES}/shown")
    assert stored["spec"]["nodeSelector"] == {}
    assert stored["spec"]["gpus"][0]["match"] == {}
