"""kubectl against the simulated API server, where kubectl is at hand (`KUBECTL`, `KUBEBUILDER_ASSETS` or the path)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer


def _kubectl() -> str | None:
    given = os.environ.get("KUBECTL")
    beside = Path(os.environ.get("KUBEBUILDER_ASSETS", "/nonexistent"), "kubectl")
    return given or (str(beside) if beside.is_file() else shutil.which("kubectl"))


pytestmark = pytest.mark.skipif(_kubectl() is None, reason="no kubectl: set KUBECTL or KUBEBUILDER_ASSETS")

Run = Callable[..., subprocess.CompletedProcess[str]]

SLICE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceSlice",
    "metadata": {"name": "s0"},
    "spec": {
        "driver": "gpu.example",
        "nodeName": "node-1",
        "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0", "attributes": {"model": {"string": "H100"}}}],
    },
}


@pytest.fixture
def kubectl(tmp_path: Path) -> Iterator[Run]:
    with SimApiServer() as server:
        config = server.write_kubeconfig(tmp_path / "kubeconfig")
        base = [_kubectl() or "", "--kubeconfig", str(config), "--cache-dir", str(tmp_path / "cache")]

        def run(*arguments: str, given: Any = None) -> subprocess.CompletedProcess[str]:
            text = json.dumps(given) if given is not None else None
            return subprocess.run([*base, *arguments], input=text, capture_output=True, text=True, timeout=60)

        yield run


def test_kubectl_applies_shows_and_deletes_a_slice_with_the_servers_columns(kubectl: Run) -> None:
    assert kubectl("apply", "-f", "-", given=SLICE).stdout == "resourceslice.resource.k8s.io/s0 created\n"
    assert kubectl("apply", "-f", "-", given=SLICE).stdout == "resourceslice.resource.k8s.io/s0 unchanged\n"
    lines = kubectl("get", "resourceslices").stdout.splitlines()
    assert lines[0].split() == ["NAME", "NODE", "DRIVER", "POOL", "AGE"]
    assert lines[1].split()[:4] == ["s0", "node-1", "gpu.example", "p"]
    assert "H100" in kubectl("describe", "resourceslice", "s0").stdout
    assert "deleted" in kubectl("delete", "resourceslice", "s0").stdout


def test_kubectl_hears_of_an_unknown_field_and_explains_the_known_ones(kubectl: Run) -> None:
    wrong = {**SLICE, "spec": {**SLICE["spec"], "nope": 1}}  # type: ignore[dict-item]
    refused = kubectl("apply", "-f", "-", given=wrong)
    assert refused.returncode == 1
    assert 'unknown field "spec.nope"' in refused.stderr
    assert "firstAvailable" in kubectl("explain", "resourceclaim.spec.devices.requests").stdout


def list_of(*items: Any) -> Any:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def test_kubectl_applies_a_list_and_hears_of_an_unknown_field_in_it(kubectl: Run) -> None:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "settings", "namespace": "team"},
        "data": {"a": "b"},
    }
    first = kubectl("apply", "-f", "-", given=list_of(namespace, settings, SLICE))
    assert first.stderr == ""
    assert first.stdout.splitlines() == [
        "namespace/team created", "configmap/settings created", "resourceslice.resource.k8s.io/s0 created",
    ]  # fmt: skip
    changed = {**settings, "data": {"c": "d"}}
    again = kubectl("apply", "-f", "-", given=list_of(namespace, changed))
    assert again.stdout.splitlines() == ["namespace/team unchanged", "configmap/settings configured"]
    assert (
        kubectl("get", "configmap", "settings", "-n", "team", "-o", "jsonpath={.data}").stdout == '{"c":"d"}'
    )
    refused = kubectl("apply", "-f", "-", given=list_of({**settings, "nope": 1}))
    assert refused.returncode == 1
    assert 'unknown field "nope"' in refused.stderr
    on_the_server = kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=list_of(settings))
    assert on_the_server.stdout == "configmap/settings serverside-applied\n"


def test_kubectl_applies_a_list_of_custom_objects_beside_their_definition(kubectl: Run) -> None:
    schema = {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "properties": {
                    "size": {"x-kubernetes-int-or-string": True},
                    "a": {"type": "string", "nullable": True},
                },
                "oneOf": [{"required": ["a"]}, {"required": ["size"]}],
            },
        },
    }
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "toys.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Cluster",
            "names": {"plural": "toys", "singular": "toy", "kind": "Toy", "listKind": "ToyList"},
            "versions": [version],
        },
    }
    made = kubectl("apply", "-f", "-", given=list_of(definition))
    assert made.stdout == "customresourcedefinition.apiextensions.k8s.io/toys.example.com created\n"
    toy = {"apiVersion": "example.com/v1", "kind": "Toy", "metadata": {"name": "t"}, "spec": {"size": 3}}
    applied = kubectl("apply", "-f", "-", given=list_of(toy))
    assert (applied.stdout, applied.stderr) == ("toy.example.com/t created\n", "")


def test_kubectl_patches_waits_and_applies_on_the_server(kubectl: Run) -> None:
    request = {"name": "r", "exactly": {"deviceClassName": "c.example"}}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c"},
        "spec": {"devices": {"requests": [request]}},
    }
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", "-", given=claim).stdout
    result = {"request": "r", "driver": "d.example", "pool": "p", "device": "gpu-0"}
    status = json.dumps({"status": {"allocation": {"devices": {"results": [result]}}}})
    kubectl("patch", "resourceclaim", "c", "--subresource=status", "--type=merge", "-p", status)
    path = "--for=jsonpath={.status.allocation.devices.results[0].device}=gpu-0"
    assert kubectl("wait", "resourceclaim/c", path, "--timeout=5s").returncode == 0
    assert kubectl("get", "resourceclaims").stdout.splitlines()[1].split()[1] == "allocated"


def test_kubectl_creates_namespaces_and_reads_who_it_is(kubectl: Run) -> None:
    assert kubectl("create", "namespace", "x").stdout == "namespace/x created\n"
    assert "already exists" in kubectl("create", "namespace", "x").stderr
    assert kubectl("auth", "can-i", "list", "pods").stdout == "yes\n"
    assert "deleted" in kubectl("delete", "namespace", "x", "--timeout=10s").stdout
