"""From an empty cluster to an empty cluster, as docs/quickstart.md goes: install, first pod, break it, find out why, fix it,
update the driver, and take it away with nothing left."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import pytest

from dra.cli.main import main
from dra.diagnose.doctor.model import EXIT_CODES
from dra.sim.cluster import SimCluster, read_manifests
from tests.places import SHORT
from tests.rights import granted, used

ROOT = Path(__file__).parents[2]
MANIFESTS = [
    ROOT / f"deploy/manifests/{name}.yaml"
    for name in ("rbac", "crds", "admission-policy", "deviceclasses", "daemonset", "mps-keeper", "fleet")
]
EXAMPLE = ROOT / "examples/gpu-per-pod.yaml"
NODE = "node-1"


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory(prefix="dsi", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), [(NODE, "l40s-x4")]) as made:
            made.wait_ready(timeout_seconds=90)
            yield made


def running(cluster, *names, seconds=90):
    def ready():
        phases = {p["metadata"]["name"]: p["status"].get("phase") for p in cluster.pods()}
        return all(phases.get(name) == "Running" for name in names)

    cluster.until(ready, f"{', '.join(names)} to run", timeout_seconds=seconds)


def dra(cluster, capsys, *words):
    capsys.readouterr()
    code = main([*words, "--kubeconfig", str(cluster.kubeconfig)])
    return code, capsys.readouterr().out


def doctor(cluster, capsys):
    """What `dra doctor` says on the node itself."""
    node = cluster.nodes[NODE]
    code, out = dra(
        cluster, capsys, "doctor", "--simulate", node.profile, "--host-root", str(node.root), "--node-name", NODE, "-o", "json"
    )  # fmt: skip
    return code, json.loads(out)


def one_pod(name):
    """A pod beside the example's, with the example's template."""
    (pod,) = [each for each in read_manifests([EXAMPLE]) if each["metadata"]["name"] == "first"]
    return {**pod, "metadata": {**pod["metadata"], "name": name}}


def test_install_use_break_repair_update_and_uninstall(cluster, capsys):
    node = cluster.nodes[NODE]
    # Install: everything that the chart renders is taken as it is.
    made = [each for file in MANIFESTS for each in cluster.apply(file)]
    assert {each["kind"] for each in made} >= {
        "Namespace",
        "DaemonSet",
        "Deployment",
        "DeviceClass",
        "ClusterRole",
    }
    # The first pods.
    cluster.apply(EXAMPLE)
    running(cluster, "first", "second")
    code, report = doctor(cluster, capsys)
    assert report["brokenRung"] is None and code in (0, 3), report
    # Break it: the driver's modules go while nobody uses NVML, and a new pod comes.
    node.stop_driver()
    node.machine.control.unload_driver(force=True)
    namespace = "gpu-per-pod"
    assert cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods", one_pod("third"))[0] == 201
    # Why? The pod says where, the doctor there says what is broken and what to do.
    cluster.until(
        lambda: dra(cluster, capsys, "explain", "pod/third", "-n", namespace)[0] == 1,
        "explain to see it pending",
    )
    code, report = doctor(cluster, capsys)
    assert (code, report["brokenRung"]) == (EXIT_CODES["driver"], "driver")
    assert report["rungs"][0]["findings"][0]["code"] == "DRA-DRIVER-NOT-LOADED"
    # What it says is done; the next rung is the driver's pod, which is not there.
    node.machine.control.load_driver()
    code, report = doctor(cluster, capsys)
    assert (code, report["brokenRung"]) == (EXIT_CODES["kubelet"], "kubelet")
    node.start_driver()
    running(cluster, "first", "second", "third")
    assert doctor(cluster, capsys)[1]["brokenRung"] is None
    # Update: the driver is replaced; who runs goes on, and who comes is served.
    before = {p["metadata"]["uid"] for p in cluster.pods()}
    node.stop_driver()
    node.start_driver()
    cluster.wait_ready(timeout_seconds=90)
    assert cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods", one_pod("fourth"))[0] == 201
    running(cluster, "first", "second", "third", "fourth")
    assert before < {p["metadata"]["uid"] for p in cluster.pods()}
    # Uninstall is refused, and names who is in the way.
    code, out = dra(cluster, capsys, "uninstall-check")
    assert code == 1 and "used by pod fourth" in out
    for name in ("third", "fourth"):
        cluster.api.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")
    cluster.delete(EXAMPLE)
    cluster.until(lambda: not cluster.claims(), "the claims to go", timeout_seconds=90)
    cluster.until(
        lambda: dra(cluster, capsys, "uninstall-check")[0] == 0, "the check to agree", timeout_seconds=90
    )
    # All of this went with the rights that the chart gives.
    assert used(cluster.api.requests.all(), "dra/gpu.nvidia.com") <= granted("rbac.yaml")
    # And now nothing is left: on the node, and in the API.
    cluster.until(lambda: not list(node.cdi_root.glob("*claim_*")), "the CDI files to go", timeout_seconds=90)
    assert not list((node.state_dir / "claims").glob("*.json"))
    node.stop_driver()
    with contextlib.suppress(KeyError):
        cluster.delete(*reversed(MANIFESTS))
    for kind in (
        "/apis/resource.k8s.io/v1/deviceclasses",
        "/apis/apps/v1/daemonsets",
        "/apis/apps/v1/deployments",
    ):
        cluster.until(lambda kind=kind: not cluster.items(kind), f"{kind} to be empty", timeout_seconds=90)
    assert list((node.root / "var/lib/kubelet/plugins_registry").iterdir()) == []
