"""The chart, rendered by real Helm: values in, objects out."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.yaml_text import read_all

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-chart/bin"
CHART = ROOT / "deploy/helm/dra-driver-nvidia-gpu"
NAMESPACE = "dra-driver-nvidia-gpu"
VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
EVERYTHING: dict[str, Any] = {
    "namespace": {"create": True},
    "webhook": {"enabled": True},
    "featureGates": {"PassthroughSupport": True},
    "kubeletPlugin": {"networkPolicy": {"enabled": True}, "nodeLabels": "api", "cleanUpMpsDeployments": True},
    "serviceMonitor": {"enabled": True},
    "grafanaDashboard": {"enabled": True},
    "priorityClassQuota": {"enabled": True},
    "openshift": {"enabled": True},
}
# Kinds that come with other operators: no schema of Kubernetes' own says what is in them.
FOREIGN = {"PodMonitor", "Issuer", "Certificate"}


def needs(tool: str) -> None:
    """Skip without a tool of `make setup-chart`; in CI it has to be there."""
    if (TOOLS / tool).is_file():
        return
    assert not os.environ.get("CI"), f"{TOOLS / tool} is not there: make setup-chart"
    pytest.skip(f"needs {tool}: make setup-chart")


def render(
    values: dict[str, Any] | None = None,
    *,
    version: str = "1.36",
    release: str = "dra-driver-nvidia-gpu",
    namespace: str = NAMESPACE,
    apis: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Render; gives the objects. AssertionError with Helm's words where it refuses."""
    needs("helm")
    command = [
        str(TOOLS / "helm"),
        "template",
        release,
        str(CHART),
        "-n",
        namespace,
        "--kube-version",
        f"{version}.0",
    ]
    command += ["--values", "-", *(f"--api-versions={api}" for api in apis)]
    done = _run(tuple(command), json.dumps(values or {}))
    assert done.returncode == 0, done.stderr
    return [document for document in read_all(done.stdout) if document]


@cache
def _run(command: tuple[str, ...], values: str) -> subprocess.CompletedProcess[str]:
    """Run Helm, once for the same values."""
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False)


def refused(values: dict[str, Any], **how: Any) -> str:
    """Give what Helm says of values that it refuses."""
    with pytest.raises(AssertionError) as caught:
        render(values, **how)
    return str(caught.value)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Give the objects of a kind."""
    return [each for each in objects if each["kind"] == kind]


def plugin_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the plugin's DaemonSet."""
    (found,) = [
        each for each in of_kind(objects, "DaemonSet") if each["metadata"]["name"].endswith("kubelet-plugin")
    ]
    return found


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    """Give a workload's one container."""
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found


def environment_of(workload: dict[str, Any]) -> dict[str, str]:
    """Give the environment of a workload's container; what the downward API gives is empty."""
    return {entry["name"]: entry.get("value", "") for entry in container_of(workload).get("env", [])}


def pod_specs(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give the pods' specs by the name of what makes them."""
    kinds = ("DaemonSet", "Deployment", "Job")
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] in kinds
    }


def name_of(each: dict[str, Any]) -> str:
    """Give `Kind/name`, for errors."""
    return f"{each['kind']}/{each['metadata']['name']}"


def check_schemas(rendered: list[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """Give what is wrong with (version, objects), by the schemas of Kubernetes; each of equal objects once."""
    needs("kubernetes-validate")
    lines = dict.fromkeys(
        json.dumps({"version": version, "where": f"{version} {name_of(each)}", "object": each})
        for version, objects in rendered
        for each in objects
        if each["kind"] not in FOREIGN
    )
    done = subprocess.run(
        [str(TOOLS / "python"), str(Path(__file__).parent / "objects.py")],
        input="\n".join(lines), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
