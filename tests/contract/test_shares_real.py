"""Shares and fractions before a real kube-apiserver: slices, classes, templates and the webhook as they are shipped.

Runs where `KUBEBUILDER_ASSETS` names a directory with etcd and kube-apiserver (about 10 s), else skips.
"""

from __future__ import annotations

import base64
import copy
import time
from pathlib import Path

import pytest

from dra.api.fraction_pods import POD_PATHS, rewrite_pod
from dra.api.fractions import Ask, FractionRules
from dra.api.gpu_settings import parse_sharing
from dra.controller.dropped import dropped_fields
from dra.errors import KubeError
from dra.fleet.election import ElectionTimes
from dra.fleet.process import Fleet, FleetSettings
from dra.fleet.templates import TemplateKeeper
from dra.kube.client import connect
from dra.kube.connection import KubeOptions
from dra.kube.resources import (
    DEVICE_CLASSES,
    NAMESPACES,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)
from dra.plugin.counters import server_keeps_shares
from dra.sim.cluster import read_manifests
from dra.slices.features import ServerFeatures
from dra.slices.pool import build_pool
from dra.webhook.certificate import Certificate
from dra.webhook.server import WebhookServer
from tests.real_apiserver import needs_real_apiserver, real_apiserver
from tests.unit.inventory.inventory_samples import gpu, inventory, mig

pytestmark = [pytest.mark.real, needs_real_apiserver]

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "manifests"
TLS = ROOT / "tests" / "data" / "tls"
NEW = ServerFeatures.of_version(1, 36)
APPS = {kind: Resource("apps", ("v1",), f"{kind.lower()}s", kind, namespaced=True)
        for kind in ("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet")}  # fmt: skip
BATCH = {
    kind: Resource("batch", ("v1",), f"{kind.lower()}s", kind, namespaced=True) for kind in ("Job", "CronJob")
}
WORKLOADS = {**APPS, **BATCH}
HOOKS = {
    kind: Resource("admissionregistration.k8s.io", ("v1",), f"{kind.lower()}s", kind, namespaced=False)
    for kind in ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")
}


FLEET_OBJECTS = [each for each in read_manifests([MANIFESTS / "fleet.yaml"]) if each["kind"] != "Deployment"]
(FLEET_ACCOUNT,) = [each["metadata"] for each in FLEET_OBJECTS if each["kind"] == "ServiceAccount"]
FLEET_USER = f"system:serviceaccount:{FLEET_ACCOUNT['namespace']}:{FLEET_ACCOUNT['name']}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with real_apiserver(tmp_path_factory.mktemp("apiserver"), users={FLEET_USER: []}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    made = connect(KubeOptions(kubeconfig=str(server.admin_kubeconfig)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def installed(client):
    """The webhook and its configurations as they are shipped, but for the address; two namespaces."""
    webhook = WebhookServer(Certificate(TLS / "server.crt", TLS / "server.key"), host="127.0.0.1")
    webhook.start()
    bundle = base64.b64encode((TLS / "server.crt").read_bytes()).decode()
    for document in read_manifests([MANIFESTS / "webhook-configuration.yaml"]):
        for hook in document["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["timeoutSeconds"] = 30
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{webhook.port}{path}", "caBundle": bundle}
        client.create(HOOKS[document["kind"]], document)
    client.create(NAMESPACES, {"metadata": {"name": "team", "labels": {"gpudra.dev/fractions": "enabled"}}})
    client.create(NAMESPACES, {"metadata": {"name": "other"}})
    yield client
    webhook.stop()


def specs(sharing, **options):
    parent = gpu(1, mig_enabled=True, mig_devices=(mig(2), mig(3)), addressing_mode="None", numa_node=0)
    made = build_pool(
        inventory(gpu(0), parent), node_name="n", features=NEW, settings=parse_sharing(sharing), **options
    )
    assert made.problems == ()
    return made.specs(generation=1)


@pytest.mark.parametrize(
    "sharing", ["1", "4", "1000", "memory", "unlimited", "memory,GPU-00000000-0000-0000-0000-000000000000=7"]
)
def test_the_server_stores_shared_devices_as_they_are_sent(client, sharing):
    for number, spec in enumerate(specs(sharing, mps=True)):
        body = {"metadata": {"name": f"slice-{number}"}, "spec": spec}
        stored = client.create(RESOURCE_SLICES, copy.deepcopy(body))
        assert not dropped_fields(spec, stored["spec"])
        client.delete(RESOURCE_SLICES, f"slice-{number}")


def test_the_server_says_whether_it_keeps_shares(client):
    assert server_keeps_shares(client, (1, 36), driver="gpu.nvidia.com", node_name="n") is True
    assert not [
        each
        for each in client.list(RESOURCE_SLICES).items
        if each["metadata"]["name"].startswith("dra-trial")
    ]


def test_the_classes_and_the_templates_are_taken(client):
    for document in read_manifests([MANIFESTS / "deviceclasses.yaml"]):
        client.create(DEVICE_CLASSES, document)
    for ask in (Ask(20, 100), Ask(memory_mib=3000), Ask(1, 8, 512)):
        client.create(RESOURCE_CLAIM_TEMPLATES, ask.template("default"), "default")


def workload(kind, value="0.2"):
    container = {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": value, "cpu": "1"}}}
    never = {"restartPolicy": "Never"} if kind in BATCH else {}
    pod = {"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [container], **never}}
    spec = {"template": pod}
    if kind in APPS:
        spec["selector"] = {"matchLabels": {"app": "a"}}
    if kind == "StatefulSet":
        spec["serviceName"] = "a"
    if kind == "CronJob":
        spec = {"schedule": "* * * * *", "jobTemplate": {"spec": spec}}
    return {"metadata": {"name": f"w-{value.replace('.', '-')}"}, "spec": spec}


def pod_of(kind, obj):
    for part in POD_PATHS[kind]:
        obj = obj[part]
    return obj["spec"]


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_fraction_is_taken_in_every_workload_of_an_opted_in_namespace_and_refused_elsewhere(
    installed, kind
):
    stored = installed.create(WORKLOADS[kind], workload(kind), "team")
    found = pod_of(kind, stored)
    assert found["containers"][0]["resources"] == {
        "limits": {"cpu": "1"}, "requests": {"cpu": "1"}, "claims": [{"name": "gpudra-main"}],
    } or found["containers"][0]["resources"] == {"limits": {"cpu": "1"}, "claims": [{"name": "gpudra-main"}]}  # fmt: skip
    assert found["resourceClaims"][0]["resourceClaimTemplateName"] == Ask(20, 100).template_name
    with pytest.raises(KubeError, match="must be an integer"):
        installed.create(WORKLOADS[kind], workload(kind), "other")
    labelled = workload(kind)
    labelled["metadata"]["labels"] = {"gpudra.dev/fractions": "enabled"}
    assert pod_of(kind, installed.create(WORKLOADS[kind], labelled, "other"))["resourceClaims"]


@pytest.mark.parametrize(("value", "mib"), [("3000", 3000), ("4Gi", 4096), (2500, 2500)])
def test_an_amount_of_memory_is_what_was_written(installed, value, mib):
    body = workload("Deployment")
    body["metadata"] = {"generateName": "memory-"}
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpumem": value}}
    found = pod_of("Deployment", installed.create(APPS["Deployment"], body, "team"))
    assert found["resourceClaims"][0]["resourceClaimTemplateName"] == Ask(memory_mib=mib).template_name


def test_an_update_by_apply_changes_the_amount_and_a_whole_number_takes_the_claim_away(installed):
    def applied(value):
        body = {"apiVersion": "apps/v1", **workload("Deployment", value)}
        body["metadata"]["name"] = "rolling"
        return pod_of("Deployment", installed.apply(APPS["Deployment"], "rolling", body, "team"))

    assert applied("0.2")["resourceClaims"][0]["resourceClaimTemplateName"] == Ask(20, 100).template_name
    assert applied("0.2")["resourceClaims"][0]["resourceClaimTemplateName"] == Ask(20, 100).template_name
    assert applied("0.5")["resourceClaims"][0]["resourceClaimTemplateName"] == Ask(50, 100).template_name
    whole = applied("2")
    assert whole["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert not whole.get("resourceClaims")


@pytest.mark.parametrize("value", ["1.5", "-0.5"])
def test_what_cannot_be_meant_is_refused_with_the_webhooks_words(installed, value):
    with pytest.raises(KubeError, match="DRA-FRACTION-RANGE"):
        installed.create(APPS["Deployment"], workload("Deployment", value), "team")


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_a_wrong_configuration_is_refused_in_every_version_and_one_of_others_is_not_sent(
    server, installed, version
):
    request = {"name": "gpu", "deviceClassName": "gpu.nvidia.com"}
    if version != "v1beta1":
        request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {}}

    def claim(driver):
        return {
            "apiVersion": f"resource.k8s.io/{version}", "kind": "ResourceClaim", "metadata": {"generateName": "c-"},
            "spec": {"devices": {"requests": [request], "config": [{"opaque": {"driver": driver, "parameters": parameters}}]}},
        }  # fmt: skip

    resource = Resource("resource.k8s.io", (version,), "resourceclaims", "ResourceClaim", namespaced=True)
    with pytest.raises(KubeError, match="sharing.strategy is required"):
        installed.create(resource, claim("gpu.nvidia.com"), "other")
    installed.create(resource, claim("other.example.com"), "other")
    assert installed.list(RESOURCE_CLAIMS, "other").items


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
    return value


def test_the_fleet_works_with_the_rights_that_its_manifest_gives_it(server, client):
    client.create(NAMESPACES, {"metadata": {"name": FLEET_ACCOUNT["namespace"]}})
    for body in FLEET_OBJECTS:
        group, _, version = body["apiVersion"].rpartition("/")
        namespaced = "namespace" in body["metadata"]
        resource = Resource(
            group, (version,), f"{body['kind'].lower()}s", body["kind"], namespaced=namespaced
        )
        client.create(resource, body, body["metadata"].get("namespace"))
    (deployment,) = [
        each for each in read_manifests([MANIFESTS / "fleet.yaml"]) if each["kind"] == "Deployment"
    ]
    env = {
        each["name"]: each.get("value")
        for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    fleet = Fleet(
        FleetSettings(
            identity="a", namespace=FLEET_ACCOUNT["namespace"], lease=env.get("LEASE") or "dra-fleet",
            kubeconfig=str(server.kubeconfig_for(FLEET_USER)), collect_seconds=0.2,
            times=ElectionTimes(lease=2.0, renew=1.5, retry=0.1),
        ),
        parts=[lambda client, events: TemplateKeeper(client, events=events, collect_seconds=0.2)],
    )  # fmt: skip
    client.create(NAMESPACES, {"metadata": {"name": "users"}})
    client.create(
        Resource("", ("v1",), "serviceaccounts", "ServiceAccount", namespaced=True),
        {"metadata": {"name": "default"}},
        "users",
    )
    plain = {
        "metadata": {"name": "p"},
        "spec": {
            "containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "0.2"}}}]
        },
    }
    fleet.start()
    try:
        client.create(
            PODS, {"apiVersion": "v1", "kind": "Pod", **rewrite_pod(plain, FractionRules())}, "users"
        )
        until(
            lambda: (
                [each["metadata"]["name"] for each in client.list(RESOURCE_CLAIM_TEMPLATES, "users").items]
                == [Ask(20, 100).template_name]
            )
        )
        client.delete(PODS, "p", "users", grace_period_seconds=0)
        until(lambda: not client.list(RESOURCE_CLAIM_TEMPLATES, "users").items)
    finally:
        fleet.stop()
