"""The admission webhook before a real API server: what is refused, what is rewritten, what goes on without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.real.cluster import IMAGE, RESOURCE, Cluster
from tests.e2e.real.cluster_side import ClusterSide, claim_with
from tests.e2e.real.control_plane import ApiError
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real

TIME_SLICING = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}},
}
WRONG = {**TIME_SLICING, "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Forever"}}}


@pytest.fixture(scope="module")
def side(cluster: Cluster) -> Iterator[ClusterSide]:
    """The cluster's side of the driver."""
    if "kube-controller-manager" not in cluster.control_plane.programs:
        pytest.skip("namespaces need kube-controller-manager")
    made = ClusterSide(cluster)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def claims(namespace: str, version: str = "v1") -> str:
    """Give the path of a namespace's claims."""
    return f"/apis/resource.k8s.io/{version}/namespaces/{namespace}/resourceclaims"


def pod_of(limits: dict[str, Any], name: str = "pod") -> dict[str, Any]:
    """Give a pod with limits."""
    container = {"name": "main", "image": IMAGE, "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "nodeSelector": {"no-such-node": "true"}},
    }


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_a_claim_with_a_wrong_configuration_is_refused_in_every_version(cluster, side, version):
    if cluster.get(f"/apis/resource.k8s.io/{version}", missing=True) is None:
        pytest.skip(f"this server does not serve {version}")
    ns = cluster.namespace()
    with pytest.raises(ApiError) as caught:
        cluster.create(claims(ns, version), claim_with(WRONG, version=version))
    assert caught.value.status == 403
    for word in ("interval", "Forever", "DRA-"):
        assert word in str(caught.value)
    cluster.create(claims(ns, version), claim_with(TIME_SLICING, "fine", version))


def test_templates_and_classes_are_checked_too(cluster, side):
    ns = cluster.namespace()
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "odd"},
        "spec": {"spec": claim_with(WRONG)["spec"]},
    }
    with pytest.raises(ApiError, match="Forever"):
        cluster.create(f"{RESOURCE}/namespaces/{ns}/resourceclaimtemplates", template)
    opaque = {"driver": "gpu.nvidia.com", "parameters": WRONG}
    odd = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "odd"},
        "spec": {"config": [{"opaque": opaque}]},
    }
    with pytest.raises(ApiError, match="Forever"):
        cluster.create(f"{RESOURCE}/deviceclasses", odd)


def test_what_is_not_ours_is_never_sent_to_it(cluster, side):
    ns = cluster.namespace()
    foreign = claim_with({"anything": 1}, "foreign")
    foreign["spec"]["devices"]["config"][0]["opaque"]["driver"] = "other.example.com"
    side.webhook.stop()
    try:
        cluster.create(claims(ns), foreign)
        cluster.claim(ns, "plain")
        cluster.create(f"/api/v1/namespaces/{ns}/pods", pod_of({"cpu": "1"}))
        with pytest.raises(ApiError, match="failed calling webhook"):
            cluster.create(claims(ns), claim_with(TIME_SLICING))
    finally:
        side.webhook.start()
    wait_until(
        lambda: cluster.control_plane.request("POST", claims(ns), claim_with(TIME_SLICING))[0] == 201,
        seconds=60, what="the webhook answers again",
    )  # fmt: skip


def test_a_fraction_of_a_gpu_becomes_a_claim_where_the_namespace_asks_for_it(cluster, side):
    ns = cluster.namespace(**{"gpudra.dev/fractions": "enabled"})
    made = cluster.create(f"/api/v1/namespaces/{ns}/pods", pod_of({"nvidia.com/gpu": "0.2", "cpu": "1"}))
    (container,) = made["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "1"}
    (entry,) = made["spec"]["resourceClaims"]
    assert container["resources"]["claims"] == [{"name": entry["name"]}]
    name = entry["resourceClaimTemplateName"]
    path = f"{RESOURCE}/namespaces/{ns}/resourceclaimtemplates/{name}"
    template = wait_until(
        lambda: cluster.get(path, missing=True), seconds=60, what="the fleet has made the template"
    )
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["capacity"]["requests"] == {"shares": "20"}
    plain = cluster.namespace()
    with pytest.raises(ApiError, match="must be an integer"):
        cluster.create(f"/api/v1/namespaces/{plain}/pods", pod_of({"nvidia.com/gpu": "0.2"}))


def test_kubectl_applies_a_deployment_with_a_fraction_twice_without_a_change(cluster, side):
    ns = cluster.namespace(**{"gpudra.dev/fractions": "enabled"})
    container = {"name": "main", "image": IMAGE, "resources": {"limits": {"nvidia.com/gpu": "0.25"}}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "quarter", "namespace": ns},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "quarter"}},
            "template": {"metadata": {"labels": {"app": "quarter"}}, "spec": {"containers": [container]}},
        },
    }
    text = json.dumps(deployment)
    assert "created" in cluster.kubectl("apply", "-f", "-", stdin=text)
    path = f"/apis/apps/v1/namespaces/{ns}/deployments/quarter"
    first = cluster.get(path)
    (stored,) = first["spec"]["template"]["spec"]["containers"]
    assert "limits" not in stored["resources"]
    assert len(stored["resources"]["claims"]) == 1
    cluster.kubectl("apply", "-f", "-", stdin=text)
    second = cluster.get(path)
    assert second["spec"] == first["spec"]
    assert second["metadata"]["generation"] == first["metadata"]["generation"]
