"""The chart for every Kubernetes version and driver root: what comes out, and that API servers take it."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from pathlib import Path

import pytest

from dra import __version__
from dra.plugin.settings import offers_passthrough
from dra.sim.apiserver import SimApiServer
from tests.deploy.chart import (
    CHART,
    EVERYTHING,
    FOREIGN,
    NAMESPACE,
    ROOT,
    TOOLS,
    VERSIONS,
    check_schemas,
    container_of,
    environment_of,
    name_of,
    needs,
    of_kind,
    plugin_of,
    pod_specs,
    refused,
    render,
)
from tests.yaml_text import read, read_all

ROOTS = ("/", "/run/nvidia/driver", "/home/kubernetes/bin/nvidia")
PATHS = {
    "DaemonSet": "/apis/apps/v1/namespaces/{ns}/daemonsets",
    "Deployment": "/apis/apps/v1/namespaces/{ns}/deployments",
    "Job": "/apis/batch/v1/namespaces/{ns}/jobs",
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{ns}/serviceaccounts",
    "Service": "/api/v1/namespaces/{ns}/services",
    "Secret": "/api/v1/namespaces/{ns}/secrets",
    "ConfigMap": "/api/v1/namespaces/{ns}/configmaps",
    "ResourceQuota": "/api/v1/namespaces/{ns}/resourcequotas",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}  # fmt: skip


@pytest.fixture(scope="module")
def all_versions():
    """Everything the chart has, for each version, with each root in turn."""
    return [
        (version, render({**EVERYTHING, "nvidiaDriverRoot": root}, version=version))
        for version in VERSIONS
        for root in ROOTS
    ]


def test_every_object_is_one_that_this_version_of_kubernetes_knows(all_versions):
    assert check_schemas(all_versions) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_server_of_each_version_takes_every_object(version):
    objects = render(EVERYTHING, version=version)
    with SimApiServer(version=version).start() as api:
        for each in sorted(objects, key=lambda each: each["kind"] != "Namespace"):
            path = PATHS.get(each["kind"])
            if each["kind"] == "DeviceClass":
                path = f"/apis/{each['apiVersion']}/deviceclasses"
            if path is None:
                assert each["kind"] in FOREIGN | {"NetworkPolicy"}
                continue
            status, answer = api.request("POST", path.format(ns=NAMESPACE) + "?fieldValidation=Strict", each)
            assert status == 201, (name_of(each), answer)


@pytest.mark.parametrize("version", VERSIONS)
def test_api_version_surge_and_sockets_follow_the_version(version):
    objects = render(version=version)
    minor = int(version.partition(".")[2])
    classes = of_kind(objects, "DeviceClass")
    expected = {32: "v1beta1", 33: "v1beta2"}.get(minor, "v1")
    assert {each["apiVersion"] for each in classes} == {f"resource.k8s.io/{expected}"}
    names = {each["metadata"]["name"]: each["spec"].get("extendedResourceName") for each in classes}
    whole = {"whole.gpu.nvidia.com": "nvidia.com/gpu"} if expected == "v1" else {}
    assert names == {"gpu.nvidia.com": None, "mig.nvidia.com": None, **whole}
    plugin = plugin_of(objects)
    surge = 0 if minor == 32 else 1
    assert plugin["spec"]["updateStrategy"]["rollingUpdate"] == {
        "maxSurge": surge,
        "maxUnavailable": 1 - surge,
    }
    # With the pod's UID in their names two instances never share a socket; 1.32 does not know such names.
    assert ("POD_UID" in environment_of(plugin)) == bool(surge)


def test_the_api_version_may_be_given():
    asked = render({"resourceApiVersion": "resource.k8s.io/v1beta2"}, version="1.36")
    assert {each["apiVersion"] for each in of_kind(asked, "DeviceClass")} == {"resource.k8s.io/v1beta2"}


@pytest.mark.parametrize(
    ("gates", "made"),
    [(None, False), ({}, False), ({"PassthroughSupport": False}, False), ({"PassthroughSupport": "false"}, False),
     ({"PassthroughSupport": True}, True), ({"PassthroughSupport": "true"}, True)],
)  # fmt: skip
def test_the_class_of_gpus_that_are_passed_through_comes_with_the_gate(gates, made):
    objects = render({"featureGates": gates})
    classes = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "DeviceClass")}
    assert ("vfio.gpu.nvidia.com" in classes) is made
    assert offers_passthrough(settings_of(plugin_of(objects)).gates) is made
    if made:
        (selector,) = classes["vfio.gpu.nvidia.com"]["selectors"]
        assert selector["cel"]["expression"].endswith("device.attributes['gpu.nvidia.com'].type == 'vfio'")
    off = render({"featureGates": gates, "deviceClasses": {"create": False}})
    assert of_kind(off, "DeviceClass") == []


def test_the_plugin_may_change_the_drivers_of_devices_and_load_modules_of_the_host():
    plugin = plugin_of(render({"featureGates": {"PassthroughSupport": True}}))
    spec = plugin["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "host-root"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "host-root"]
    assert volume["hostPath"]["path"] == "/" and not mount.get("readOnly")
    # What it asks of the host: /sys, /dev/vfio, /lib/modules and modprobe below it, and whose processes hold a GPU.
    assert environment_of(plugin)["HOST_ROOT"] == mount["mountPath"]
    assert spec["hostPID"] and container["securityContext"]["privileged"]


@pytest.mark.parametrize("root", ROOTS)
def test_the_driver_root_is_mounted_where_the_plugin_looks(root):
    objects = render({"nvidiaDriverRoot": root})
    for workload in of_kind(objects, "DaemonSet"):
        environment, spec = environment_of(workload), workload["spec"]["template"]["spec"]
        assert (
            environment["NVIDIA_DRIVER_ROOT"] == root
            and environment["DRIVER_ROOT_CTR_PATH"] == "/driver-root"
        )
        (volume,) = [each for each in spec["volumes"] if each["name"] == "driver-root"]
        # No type: the directory of a driver container comes later.
        assert volume["hostPath"] == {"path": root}
        (mount,) = [each for each in container_of(workload)["volumeMounts"] if each["name"] == "driver-root"]
        assert (mount["mountPath"], mount["mountPropagation"]) == ("/driver-root", "HostToContainer")


def test_another_kubelet_root_is_the_same_inside_and_outside():
    root = "/var/snap/kubelet"
    values = {
        "kubeletRegistrarDirectoryPath": f"{root}/plugins_registry",
        "kubeletPluginsDirectoryPath": f"{root}/plugins",
    }
    plugin = plugin_of(render({"kubeletPlugin": values}))
    mounts = {each["name"]: each for each in container_of(plugin)["volumeMounts"]}
    volumes = {each["name"]: each for each in plugin["spec"]["template"]["spec"]["volumes"]}
    for name, path in (("registry", f"{root}/plugins_registry"), ("plugins", f"{root}/plugins")):
        assert mounts[name]["mountPath"] == volumes[name]["hostPath"]["path"] == path
    assert environment_of(plugin)["KUBELET_PLUGINS_DIRECTORY_PATH"] == f"{root}/plugins"


def settings_of(workload):
    """Read a workload's environment as the plugin does."""
    import argparse

    from dra.cli.plugin import add_arguments, settings_from

    environment = {**environment_of(workload), "NODE_NAME": "node-a"}
    parser = argparse.ArgumentParser()
    add_arguments(parser, environment)
    return settings_from(parser.parse_args([]), environment)


def test_the_plugin_understands_every_variable_and_none_is_without_effect():
    from dra.cli.plugin import _FLAGS

    values = {
        "featureGates": {"DynamicMIG": True, "MPSSupport": True}, "consumableShares": 4, "logVerbosity": 6,
        "kubeletPlugin": {
            "driverCapabilities": "compute,utility", "cdiExposure": "soname", "nvmlHold": "never", "nodeLabels": "nfd",
            "additionalXidsToIgnore": "13,31", "cleanUpMpsDeployments": True, "startJitterSeconds": 5, "devCharLinks": False,
            "healthEffects": "gpu-lost=NoExecute", "claimStatus": False, "deviceMetadata": True, "nodePolicies": False,
        },
    }  # fmt: skip
    plugin = plugin_of(render(values))
    settings = settings_of(plugin)
    assert settings.ignored == ()
    assert (
        settings.mig_mode == "dynamic" and settings.nvml_hold == "never" and settings.cdi_exposure == "soname"
    )
    assert settings.ignored_xids == (13, 31) and settings.start_jitter_seconds == 5
    assert settings.clean_up_mps_deployments and not settings.dev_char_links and settings.node_labels == "nfd"
    assert settings.healthcheck_port == 51516 and settings.http_endpoint == ":8080"
    known = {name for flag in _FLAGS for name in flag.env} | {"POD_UID", "CONSUMABLE_SHARES"}
    assert set(environment_of(plugin)) <= known


# -- a values file of NVIDIA's chart -----------------------------------------------------------------------

NVIDIAS = read("""
nvidiaDriverRoot: /run/nvidia/driver
nvidiaCDIHookPath: /usr/bin/nvidia-cdi-hook
altProcDevices: ""
nameOverride: ""
fullnameOverride: gpu-dra
namespaceOverride: gpus
selectorLabelsOverride: {app: gpu-dra}
gpuResourcesEnabledOverride: true
consumableShares: "4"
allowDefaultNamespace: true
resourceApiVersion: ""
imagePullSecrets: [{name: secret}]
image: {repository: example.org/dra, pullPolicy: Always, tag: v1}
serviceAccount: {create: true, annotations: {a: b}, name: sa}
resources:
  gpus: {enabled: true}
  computeDomains: {enabled: true, imex: {mode: driverManaged, isolation: domain, hostSocketPath: /x}}
featureGates: {TimeSlicingSettings: true, MPSSupport: true, IMEXDaemonsWithDNSNames: true}
logVerbosity: "6"
webhook:
  enabled: true
  replicas: 2
  servicePort: 443
  containerPort: 443
  priorityClassName: system-cluster-critical
  strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: "100%"}}
  podAnnotations: {}
  podSecurityContext: {}
  nodeSelector: {}
  tolerations: [{key: CriticalAddonsOnly, operator: Exists}]
  affinity: {}
  containers: {webhook: {securityContext: {privileged: false}, resources: {}}}
  serviceAccount: {create: true, name: ""}
  failurePolicy: Ignore
  tls: {mode: cert-manager, certManager: {issuerType: issuer, issuerName: ca, dnsNames: [x.example.org]}, secret: {name: "", caBundle: ""}}
controller:
  replicas: 2
  leaderElection: {enabled: true, leaseDuration: 15s}
  containers: {computeDomain: {env: []}}
kubeletPlugin:
  metrics: {enabled: true, gpuHttpEndpoint: ":9090", computeDomainHttpEndpoint: ":9091", metricsPath: /m}
  priorityClassName: system-node-critical
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: "100%"}}
  podAnnotations: {x: y}
  podSecurityContext: {}
  nodeSelector: {gpu: "yes"}
  tolerations: [{operator: Exists}]
  kubeletRegistrarDirectoryPath: /var/lib/kubelet/plugins_registry
  kubeletPluginsDirectoryPath: /var/lib/kubelet/plugins
  containers:
    init: {securityContext: {}, resources: {}}
    computeDomains: {env: [], securityContext: {privileged: true}, resources: {}, healthcheckPort: 51515, gpuCliqueLabelEnabled: false}
    gpus: {env: [{name: ADDITIONAL_XIDS_TO_IGNORE, value: "94"}], securityContext: {privileged: true}, resources: {limits: {memory: 1Gi}}, healthcheckPort: 51599}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: Exists}]}]}}}
  networkPolicy: {enabled: true}
""")


def test_a_values_file_written_for_nvidias_chart_works_unchanged():
    objects = render(NVIDIAS, release="x")
    assert check_schemas([("1.36", objects)]) == []
    plugin = plugin_of(objects)
    assert (plugin["metadata"]["name"], plugin["metadata"]["namespace"]) == ("gpu-dra-kubelet-plugin", "gpus")
    assert plugin["spec"]["selector"]["matchLabels"] == {
        "app": "gpu-dra",
        "dra-driver-nvidia-gpu-component": "kubelet-plugin",
    }
    spec, container = plugin["spec"]["template"]["spec"], container_of(plugin)
    assert container["image"] == "example.org/dra:v1" and container["name"] == "gpus"
    assert container["imagePullPolicy"] == "Always" and spec["imagePullSecrets"] == [{"name": "secret"}]
    assert spec["serviceAccountName"] == "sa-kubeletplugin" and spec["nodeSelector"] == {
        "gpu": "yes",
        "kubernetes.io/os": "linux",
    }
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert container["startupProbe"]["grpc"]["port"] == 51599
    assert plugin["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": "100%"}
    settings = settings_of(plugin)
    assert (settings.http_endpoint, settings.metrics_path) == (":9090", "/m")
    assert environment_of(plugin)["CONSUMABLE_SHARES"] == "4"
    assert settings.ignored_xids == (94,) and settings.cdi_hook_path == "/usr/bin/nvidia-cdi-hook"
    (webhook,) = of_kind(objects, "ValidatingWebhookConfiguration")
    assert webhook["webhooks"][0]["failurePolicy"] == "Ignore"
    (certificate,) = of_kind(objects, "Certificate")
    assert (
        certificate["spec"]["issuerRef"] == {"name": "ca", "kind": "Issuer"}
        and "x.example.org" in certificate["spec"]["dnsNames"]
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"kubeletplugin": {}}, "additional properties 'kubeletplugin' not allowed"),
        ({"webhook": {"enabled": True, "tls": {"mode": "magic"}}}, "webhook/tls/mode"),
        ({"webhook": {"enabled": True, "tls": {"mode": "secret"}}}, "webhook.tls.secret.name"),
        ({"webhook": {"enabled": True, "tls": {"mode": "secret", "secret": {"name": "x"}}}}, "caBundle"),
        ({"webhook": {"enabled": True, "tls": {"certManager": {"issuerType": "issuer"}}}}, "issuerName"),
        ({"consumableShares": "many"}, "consumableShares"),
        ({"nvidiaDriverRoot": "driver"}, "nvidiaDriverRoot"),
        (
            {"kubeletPlugin": {"migMode": "static", "kubeletPluginsDirectoryPath": "/a/plugins"}},
            "in one directory",
        ),
        ({"image": {"digest": "latest"}}, "image/digest"),
    ],
)
def test_values_that_cannot_work_are_refused_and_named(values, text):
    assert text in refused(values)


def test_the_namespace_default_and_a_surge_before_1_33_are_refused():
    assert "namespace default" in refused({}, namespace="default")
    assert render({"allowDefaultNamespace": True}, namespace="default")
    surge = {"kubeletPlugin": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}}
    assert "maxSurge" in refused(surge, version="1.32")
    assert render(surge, version="1.33")
    assert "1.32.0" in refused({}, version="1.31")


# -- security ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"release": "gpu"}, {"values": {"fullnameOverride": "x"}}, {"values": {"serviceAccount": {"name": "own"}}}, {"values": {"namespaceOverride": "elsewhere"}}])  # fmt: skip
def test_the_admission_policy_matches_the_account_that_the_plugin_runs_as(how):
    objects = render(how.get("values"), release=how.get("release", "dra-driver-nvidia-gpu"))
    plugin = plugin_of(objects)
    account = plugin["spec"]["template"]["spec"]["serviceAccountName"]
    user = f"system:serviceaccount:{plugin['metadata']['namespace']}:{account}"
    policies = of_kind(objects, "ValidatingAdmissionPolicy")
    bindings = {
        each["spec"]["policyName"]: each["spec"]
        for each in of_kind(objects, "ValidatingAdmissionPolicyBinding")
    }
    assert len(policies) == len(bindings) == 2
    for policy in policies:
        assert policy["spec"]["matchConditions"][0]["expression"] == f'request.userInfo.username == "{user}"'
        assert bindings[policy["metadata"]["name"]]["validationActions"] == ["Deny"]
        assert policy["spec"]["failurePolicy"] == "Fail"


def test_every_account_exists_and_has_the_least_rights():
    objects = render(EVERYTHING)
    accounts = {each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")}
    used = {spec["serviceAccountName"] for spec in pod_specs(objects).values()}
    bound = {
        s["name"]
        for each in objects
        if each["kind"].endswith("RoleBinding") or each["kind"] == "RoleBinding"
        for s in each.get("subjects", [])
    }
    assert used == accounts and bound <= accounts
    for role in (*of_kind(objects, "ClusterRole"), *of_kind(objects, "Role")):
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], name_of(role)
            assert "secrets" not in rule["resources"], name_of(role)
    plain = render()
    (plugin,) = [
        each for each in of_kind(plain, "ClusterRole") if each["metadata"]["name"].endswith("-kubeletplugin")
    ]
    rights = {resource: sorted(rule["verbs"]) for rule in plugin["rules"] for resource in rule["resources"]}
    # Source: kubelet-plugin contract; each is used by name in the code.
    assert rights == {
        "resourceclaims": ["get", "list"],
        "resourceclaims/status": ["patch", "update"],
        "resourceclaims/driver": ["associated-node:patch", "associated-node:update"],
        "resourceslices": ["create", "delete", "get", "list", "update", "watch"],
        "nodes": ["get", "list", "watch"],
        "gpunodepolicies": ["get", "list", "watch"],
        "gpunodes": ["create", "get", "patch"],
        "gpunodes/status": ["create", "get", "patch"],
        "events": ["create", "patch"],
    }
    (granular,) = [rule for rule in plugin["rules"] if rule["resources"] == ["resourceclaims/driver"]]
    assert granular["resourceNames"] == ["gpu.nvidia.com"]


def test_only_what_touches_hardware_is_privileged_and_nothing_is_on_the_hosts_network():
    for name, spec in pod_specs(render(EVERYTHING)).items():
        (container,) = spec["containers"]
        hardware = name.endswith(("kubelet-plugin", "mps-keeper"))
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert not spec.get("hostNetwork") and not any(
            "hostPort" in port for port in container.get("ports", [])
        )
        assert bool(context.get("privileged")) == hardware
        assert not spec.get("initContainers")
        assert spec.get("hostPID", False) == hardware
        if not hardware:
            assert (
                context["runAsNonRoot"]
                and context["capabilities"] == {"drop": ["ALL"]}
                and not context["allowPrivilegeEscalation"]
            )
            assert spec["securityContext"]["runAsUser"] == 65532
            assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        assert "memory" in container["resources"]["requests"]


def test_replicas_stand_on_different_nodes_and_are_drained_one_after_the_other():
    objects = render(EVERYTHING)
    deployments = of_kind(objects, "Deployment")
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert len(deployments) == 2
    for each in deployments:
        assert each["spec"]["replicas"] == 2
        labels = each["spec"]["template"]["metadata"]["labels"]
        (spread,) = each["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
        (budget,) = [b for b in budgets if b["spec"]["selector"]["matchLabels"].items() <= labels.items()]
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["metadata"]["name"] == each["metadata"]["name"]


def test_pods_go_to_linux_nodes_that_take_them():
    chosen = {"kubeletPlugin": {"nodeSelector": {"gpu": "yes"}}, "fleet": {"tolerations": [{"key": "infra"}]}}
    specs = pod_specs(render({**EVERYTHING, **chosen}))
    for name, spec in specs.items():
        assert spec["nodeSelector"]["kubernetes.io/os"] == "linux", name
        assert spec["nodeSelector"].get("gpu", "") == ("yes" if name.endswith(("plugin", "keeper")) else "")
    # Also in a cluster where every node has a taint it finds a place, or nothing could be uninstalled.
    check = next(spec for name, spec in specs.items() if name.endswith("uninstall-check"))
    assert check["tolerations"] == [{"key": "infra"}, {"key": "nvidia.com/gpu", "operator": "Exists"}]
    # A node that is emptied of what does not tolerate its taint keeps the driver, without which no pod with a GPU can end.
    for name, spec in specs.items():
        if name.endswith(("plugin", "keeper")):
            assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
            assert spec["priorityClassName"] == "system-node-critical"


def test_a_webhook_that_ends_serves_until_nobody_is_sent_to_it_any_more():
    spec = pod_specs(render(EVERYTHING))["dra-driver-nvidia-gpu-webhook"]
    seconds = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < seconds < spec.get("terminationGracePeriodSeconds", 30) - 10


def test_what_serves_metrics_is_scraped():
    objects = render(EVERYTHING)
    pods = {
        w["metadata"]["name"]: w["spec"]["template"]
        for w in objects
        if w["kind"] in ("DaemonSet", "Deployment")
    }
    scraped = set()
    for monitor in of_kind(objects, "PodMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        (name,) = [n for n, pod in pods.items() if selector <= pod["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        ports = {port["name"] for port in pods[name]["spec"]["containers"][0]["ports"]}
        assert endpoint["port"] in ports and endpoint["path"] == "/metrics"
        scraped.add(name)
    assert scraped == {"dra-driver-nvidia-gpu-kubelet-plugin", "dra-driver-nvidia-gpu-fleet"}


def test_selectors_find_their_pods_and_each_other_not():
    objects = render(EVERYTHING)
    workloads = [each for each in objects if each["kind"] in ("DaemonSet", "Deployment")]
    for each in workloads:
        selector = each["spec"]["selector"]["matchLabels"]
        found = [
            w for w in workloads if selector.items() <= w["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert found == [each]
    (service,) = of_kind(objects, "Service")
    assert (
        sum(
            service["spec"]["selector"].items() <= w["spec"]["template"]["metadata"]["labels"].items()
            for w in workloads
        )
        == 1
    )


def test_self_signed_certificates_are_for_the_services_name(tmp_path):
    import base64

    values = {"webhook": {"enabled": True, "tls": {"mode": "self-signed"}}}
    objects = render(values)
    (secret,) = of_kind(objects, "Secret")
    for key, value in secret["data"].items():
        (tmp_path / key).write_bytes(base64.b64decode(value))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    found = ssl._ssl._test_decode_cert(str(tmp_path / "tls.crt"))
    (service,) = of_kind(objects, "Service")
    assert ("DNS", f"{service['metadata']['name']}.{NAMESPACE}.svc") in found["subjectAltName"]
    for kind in ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"):
        (configuration,) = of_kind(objects, kind)
        for hook in configuration["webhooks"]:
            assert hook["clientConfig"]["caBundle"] == secret["data"]["ca.crt"]
            assert hook["clientConfig"]["service"]["name"] == service["metadata"]["name"]
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert trusting.get_ca_certs()


def test_openshift_gets_its_bindings_where_its_api_is_there():
    plain = [each for each in of_kind(render(), "RoleBinding") if "openshift" in each["metadata"]["name"]]
    assert plain == []
    found = {
        each["roleRef"]["name"].rpartition(":")[2]: [s["name"] for s in each["subjects"]]
        for each in of_kind(render(apis=("security.openshift.io/v1",)), "RoleBinding")
        if "openshift" in each["metadata"]["name"]
    }
    base = "dra-driver-nvidia-gpu-service-account"
    assert found == {
        "privileged": [f"{base}-kubeletplugin"],
        "nonroot-v2": [f"{base}-fleet", f"{base}-uninstall"],
    }


def test_the_uninstall_check_is_a_pre_delete_hook():
    (job,) = of_kind(render(), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert container_of(job)["command"] == ["dra", "uninstall-check"] and job["spec"]["backoffLimit"] == 0
    assert of_kind(render({"uninstallCheck": {"enabled": False}}), "Job") == []


# -- what is made from the chart ---------------------------------------------------------------------------


def test_the_manifests_are_rendered_from_the_chart():
    needs("helm")
    done = subprocess.run(
        ["python3", str(ROOT / "deploy/render.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_classes_of_mig_profiles_come_by_option_and_are_the_manifests(all_versions):
    manifest = ROOT / "deploy/manifests/deviceclasses-mig.yaml"
    assert (CHART / "files/deviceclasses-mig.yaml").read_text() == manifest.read_text(), "run: make manifests"
    wanted = {each["metadata"]["name"] for each in read_all(manifest.read_text()) if each}
    found = of_kind(render({"deviceClasses": {"migProfiles": True}}), "DeviceClass")
    assert wanted < {each["metadata"]["name"] for each in found}
    old = of_kind(render({"deviceClasses": {"migProfiles": True}}, version="1.33"), "DeviceClass")
    assert not wanted & {each["metadata"]["name"] for each in old}


def test_the_schema_of_the_values_is_current_and_refuses_no_default():
    import importlib.util

    spec = importlib.util.spec_from_file_location("values_schema", ROOT / "deploy/values_schema.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (CHART / "values.schema.json").read_text() == made.text()


def test_the_chart_is_of_this_version():
    chart = read((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_helm_lint_has_nothing_to_say():
    needs("helm")
    done = subprocess.run(
        [str(TOOLS / "helm"), "lint", "--strict", str(CHART), "-n", NAMESPACE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_dashboard_shows_metrics_that_exist():
    board = json.loads((CHART / "files/dashboard.json").read_text())
    asked = {
        name for panel in board["panels"] for target in panel["targets"]
        for name in re.findall(r"\b((?:nvidia_dra|dra)_[a-z_]+)", target["expr"])
    }  # fmt: skip
    code = "\n".join(path.read_text() for path in Path(ROOT, "dra").rglob("*.py"))
    missing = {name for name in asked if name.removesuffix("_bucket") not in code}
    assert not missing
