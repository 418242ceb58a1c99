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
