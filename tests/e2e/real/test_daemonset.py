"""The DaemonSet as it is shipped, in real pods: projected token, downward API, mounts, probes, rolling update.

Of the manifest only the places change that this machine has elsewhere: the kubelet's directories, where the driver
lies, and where Python and this package come from (in place of an image, which nothing here can build).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.real.cluster import IMAGE, MANIFESTS, PLUGIN_NAMESPACE, REPOSITORY, SLICES, Cluster
from tests.e2e.real.control_plane import NODE_NAME
from tests.e2e.real.driver import DRIVER, SIMULATED
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real

NAME = "dra-driver-nvidia-gpu-kubelet-plugin"
DAEMON_SETS = f"/apis/apps/v1/namespaces/{PLUGIN_NAMESPACE}/daemonsets"
PODS = (
    f"/api/v1/namespaces/{PLUGIN_NAMESPACE}/pods?labelSelector=dra-driver-nvidia-gpu-component=kubelet-plugin"
)


def host_path(spec: dict[str, Any], name: str, path: str, at: str, **mount: Any) -> None:
    """Mount a path of the machine into the pod; in place of the volume of this name, if there is one."""
    volumes = spec.setdefault("volumes", [])
    volumes[:] = [volume for volume in volumes if volume["name"] != name]
    volumes.append({"name": name, "hostPath": {"path": path}})
    mounts = spec["containers"][0].setdefault("volumeMounts", [])
    before = next((entry for entry in mounts if entry["name"] == name), {})
    mounts[:] = [entry for entry in mounts if entry["name"] != name]
    mounts.append({**before, "name": name, "mountPath": at, **mount})


def adapted_manifest(on: Cluster, kind: str) -> dict[str, Any]:
    """Give the shipped manifest with the places of this machine."""
    manifest = yaml.safe_load((MANIFESTS / "daemonset.yaml").read_text())
    spec = manifest["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["dra", "plugin"]
    container |= {"image": IMAGE, "command": [sys.executable, "-m", "dra.cli.main", "plugin"]}
    root = on.directory / ("machine" if kind == SIMULATED else "driver-root")
    host_path(spec, "registry", str(on.node.registry), str(on.node.registry))
    host_path(spec, "plugins", str(on.node.plugins), str(on.node.plugins))
    host_path(spec, "cdi", str(on.node.cdi), str(on.node.cdi))
    host_path(spec, "driver-root", str(root), "/driver-root")
    # The whole machine cannot be mounted so that it follows, where its own / is not a shared mount.
    host_path(
        spec, "host-root", str(root if kind == SIMULATED else "/"), "/host-root", mountPropagation="None"
    )
    if kind == SIMULATED:
        # The simulation writes its state.
        host_path(spec, "driver-root", str(root), "/driver-root", readOnly=False)
    else:
        host_path(
            spec, "configuration", os.environ["DRA_TEST_DRIVER_ROOT"], os.environ["DRA_TEST_DRIVER_ROOT"]
        )
    python = dict.fromkeys((sys.base_prefix, sys.prefix, str(REPOSITORY), "/usr/lib", "/usr/lib64"))
    for number, path in enumerate(path for path in python if Path(path).is_dir()):
        host_path(spec, f"python-{number}", path, path, readOnly=True)
    more = {
        "KUBERNETES_SERVICE_HOST": on.control_plane.address,
        "KUBERNETES_SERVICE_PORT": on.control_plane.url.rpartition(":")[2],
        "KUBELET_REGISTRAR_DIRECTORY_PATH": str(on.node.registry),
        "KUBELET_PLUGINS_DIRECTORY_PATH": str(on.node.plugins),
        "CDI_ROOT": str(on.node.cdi),
        "NVIDIA_DRIVER_ROOT": str(root),
        "LOG_LEVEL": "debug",
        # The machine's own /dev is no test's to change.
        "DEV_CHAR_LINKS": "true" if kind == SIMULATED else "false",
        **({"DRA_SIMULATE": "dgx-h100"} if kind == SIMULATED else {}),
        **{name: value for name, value in os.environ.items() if name.startswith("MOCK_")},
    }
    kept = [entry for entry in container["env"] if entry["name"] not in more]
    container["env"] = kept + [{"name": name, "value": value} for name, value in more.items()]
    return dict(manifest)


def plugin_pods(on: Cluster) -> list[dict[str, Any]]:
    """The pods of the DaemonSet."""
    return list(on.get(PODS)["items"])


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod has passed its probes."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def words_of(on: Cluster) -> str:
    """What the pods of the DaemonSet say, for errors."""
    said = [on.kubectl("logs", "-n", PLUGIN_NAMESPACE, f"daemonset/{NAME}", "--tail=60", check=False)]
    for pod in plugin_pods(on):
        said += on.messages(PLUGIN_NAMESPACE, pod["metadata"]["name"])
    return "\n".join(said)


@pytest.fixture
def daemon_set(on_each, driver_kind):
    """The node with the DaemonSet in place of our process."""
    on = on_each
    on.drivers.stop()
    # The pod has to publish the GPUs itself.
    on.control_plane.call("DELETE", SLICES)
    if driver_kind != SIMULATED:
        shared = on.directory / "driver-root"
        shared.mkdir(exist_ok=True)
        subprocess.run(["mount", "--rbind", os.environ["DRA_TEST_DRIVER_ROOT"], str(shared)], check=True)
    on.kubectl("label", "node", NODE_NAME, "nvidia.com/gpu.present=true", "--overwrite")
    on.kubectl("apply", "-f", "-", stdin=json.dumps(adapted_manifest(on, driver_kind)))
    try:
        try:
            wait_until(
                lambda: any(map(is_ready, plugin_pods(on))), seconds=60, what="the plugin's pod is ready"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{words_of(on)}") from None
        on.wait_published()
        yield on
        on.delete_own_pods()
    finally:
        on.control_plane.call("DELETE", f"{DAEMON_SETS}/{NAME}")
        wait_until(lambda: not plugin_pods(on), seconds=60, what="the plugin's pods are gone")
        if driver_kind != SIMULATED:
            subprocess.run(["umount", "--lazy", str(on.directory / "driver-root")], check=False)


def test_the_shipped_daemonset_serves_pods_through_a_rolling_update(daemon_set):
    on = daemon_set
    ns = on.namespace()
    for name in ("one", "two", "three"):
        on.claim(ns, name)
    on.pod(ns, "before", "one")
    try:
        on.wait_phase(ns, "before")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{words_of(on)}") from None
    assert len(on.gpu_nodes(ns, "before")) == 1
    slices = {item["metadata"]["uid"] for item in on.slices()}
    (first,) = plugin_pods(on)
    on.kubectl("rollout", "restart", "-n", PLUGIN_NAMESPACE, f"daemonset/{NAME}")
    on.pod(ns, "during", "two")
    on.kubectl("rollout", "status", "-n", PLUGIN_NAMESPACE, f"daemonset/{NAME}", "--timeout=60s", seconds=70)
    wait_until(lambda: len(plugin_pods(on)) == 1, seconds=60, what="the old pod is gone")
    (second,) = plugin_pods(on)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    # Pods of both kinds end and start as if nothing had happened.
    on.pod(ns, "after", "three")
    for pod in ("before", "during", "after"):
        on.wait_phase(ns, pod)
        assert len(on.gpu_nodes(ns, pod)) == 1
    assert {item["metadata"]["uid"] for item in on.slices()} == slices
    sockets = sorted(path.name for path in on.node.registry.iterdir())
    assert sockets == [f"{DRIVER}-{second['metadata']['uid']}-reg.sock"]
    assert all(container["restartCount"] == 0 for container in second["status"]["containerStatuses"])
