"""The cluster under test: control plane, node, driver; what tests create in it, and how they look at it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.e2e.real.assets import find_assets, why_no_node
from tests.e2e.real.control_plane import NODE_NAME, ControlPlane
from tests.e2e.real.driver import DRIVER, DriverProcess, Drivers
from tests.e2e.real.network import Network
from tests.e2e.real.node import RealNode, remove_tree
from tests.e2e.real.processes import wait_until

REPOSITORY = Path(__file__).parents[3]
MANIFESTS = REPOSITORY / "deploy/manifests"
EXAMPLES = REPOSITORY / "examples"
RESOURCE = "/apis/resource.k8s.io/v1"
SLICES = f"{RESOURCE}/resourceslices"
IMAGE = "ubuntu:22.04"
PLUGIN_NAMESPACE = "dra-driver-nvidia-gpu"
PLUGIN_ACCOUNT = "dra-driver-nvidia-gpu-service-account-kubeletplugin"
POD_SECONDS = 120.0
WAIT_FOR_EVER = "trap 'exit 0' TERM; sleep 9999 & wait"
# Namespaces that come with the cluster or live as long as it.
_STANDING = {"default", "kube-system", "kube-public", "kube-node-lease", PLUGIN_NAMESPACE}


class Cluster:
    """Everything under one directory, which is removed at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.why_no_node = why_no_node()
        self.assets = find_assets()
        self.network = None if self.why_no_node else Network()
        self.control_plane: ControlPlane
        self.node: RealNode
        self.drivers: Drivers
        self._count = 0

    def start(self) -> None:
        """Start all that this machine can carry. Whatever was started is ended by `stop`, also after an error."""
        if self.network is not None:
            try:
                self.network.start()
            except OSError as error:
                self.why_no_node, self.network = f"no network namespace: {error}", None
        self.control_plane = ControlPlane(self.assets, self.directory, self.network)
        self.control_plane.start()
        for name in ("rbac", "admission-policy", "deviceclasses"):
            self.kubectl("apply", "-f", str(MANIFESTS / f"{name}.yaml"))
        plugins, registry, cdi = (self.directory / name for name in ("plugins", "registry", "cdi"))
        if self.network is not None:
            self.node = RealNode(self.assets, self.directory, self.control_plane, self.network)
            self._start_node()
            plugins, registry, cdi = self.node.plugins, self.node.registry, self.node.cdi
        else:
            self.create_node(NODE_NAME)
            registry.mkdir()
        self.drivers = Drivers(
            self.directory, plugins=plugins, registry=registry, cdi=cdi,
            kubeconfig=self.control_plane.kubeconfig("plugin", token=self.plugin_token()),
        )  # fmt: skip

    def _start_node(self) -> None:
        """Start the node; returns when its kubelet has deleted the slices that it found.

        It does so once after each start, but only when it has seen its Node, which it looks for ever more seldom: what a
        driver has published by then is deleted too.
        """
        self.create(
            SLICES,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"name": "before-the-kubelet"},
                "spec": {
                    "driver": "other.example.com",
                    "nodeName": NODE_NAME,
                    "pool": {"name": "before", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "d"}],
                },
            },
        )
        self.node.start()
        wait_until(lambda: not self.slices(), seconds=120, what="the kubelet has wiped the slices", every=0.2)

    def stop(self) -> None:
        """End all of it."""
        for part, end in (("drivers", "close"), ("node", "stop"), ("control_plane", "stop")):
            if (made := getattr(self, part, None)) is not None:
                getattr(made, end)()
        if self.network is not None:
            self.network.stop()
        remove_tree(self.directory)

    # -- the API -----------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, **more: Any) -> str:
        """Run kubectl as administrator."""
        return self.control_plane.kubectl(*arguments, **more)

    def get(self, path: str, *, missing: bool = False) -> Any:
        """Give an object, list or text of the API."""
        return self.control_plane.get(path, missing=missing)

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object."""
        return dict(self.control_plane.call("POST", path, body))

    def create_node(self, name: str) -> None:
        """Create a Node object that no kubelet stands for."""
        self.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})

    def plugin_token(self, *, node_name: str = NODE_NAME) -> str:
        """Give a token of the driver's service account as its DaemonSet's pod on a node has it: bound to that pod."""
        pod = self.create(
            f"/api/v1/namespaces/{PLUGIN_NAMESPACE}/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"generateName": "plugin-"},
                "spec": {
                    "nodeName": node_name,
                    "serviceAccountName": PLUGIN_ACCOUNT,
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{"name": "main", "image": IMAGE, "command": ["sleep", "infinity"]}],
                },
            },
        )
        bound = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
        answer = self.create(
            f"/api/v1/namespaces/{PLUGIN_NAMESPACE}/serviceaccounts/{PLUGIN_ACCOUNT}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": 3600, "boundObjectRef": bound},
            },
        )
        return str(answer["status"]["token"])

    # -- the driver --------------------------------------------------------------------------------

    def use_driver(self, kind: str, *flags: str) -> DriverProcess:
        """Have a driver of this kind with these flags running, registered and its GPUs published."""
        if self.drivers.current is not None and (self.drivers.kind, self.drivers.flags) != (kind, flags):
            self.drivers.stop()
            self.control_plane.call("DELETE", SLICES)
        if self.drivers.current is None or not self.drivers.process.running:
            self.drivers.start(kind, flags=flags)
        self.wait_registered()
        return self.drivers.process

    def wait_registered(self, *, times: int = 1) -> None:
        """Wait until the kubelet has registered the running driver (so many times) and its GPUs are in the API."""
        wait_until(
            lambda: len(self.drivers.process.logged("kubelet_registered_driver")) >= times and self._whole_pool(),
            seconds=60, what="the driver is registered and has published",
        )  # fmt: skip

    def wait_published(self) -> dict[str, dict[str, Any]]:
        """Wait until all slices of the pool are in the API, and give its GPUs."""
        return dict(wait_until(self._whole_pool, seconds=60, what="GPUs are published"))

    def _whole_pool(self) -> dict[str, dict[str, Any]]:
        """Give the GPUs if no slice of the pool is missing: slices are written one after the other."""
        pools = [item["spec"]["pool"] for item in self.slices() if item["spec"]["driver"] == DRIVER]
        newest = max((pool["generation"] for pool in pools), default=0)
        counts = [pool["resourceSliceCount"] for pool in pools if pool["generation"] == newest]
        return self.devices() if counts and len(counts) == counts[0] else {}

    def slices(self) -> list[dict[str, Any]]:
        """The published slices of this node."""
        items = self.get(SLICES)["items"]
        return [item for item in items if item["spec"].get("nodeName") == NODE_NAME]

    def devices(self, kind: str = "gpu") -> dict[str, dict[str, Any]]:
        """The published devices of one type by name: whole GPUs, or `mig`."""
        found = [device for item in self.slices() for device in item["spec"].get("devices", ())]
        return {d["name"]: d for d in found if d["attributes"]["type"].get("string") == kind}

    def leave_nothing(self) -> None:
        """Delete the pods and claims of the test, and check that nothing of them stays on the node.

        Namespaces stay: they take longer to go than all the rest, and the whole cluster is thrown away.
        """
        names = self.delete_own_pods()
        for name in names:
            for kind in ("resourceclaims", "resourceclaimtemplates"):
                self.control_plane.call("DELETE", f"{RESOURCE}/namespaces/{name}/{kind}")
        wait_until(
            lambda: not self._all(f"{RESOURCE}/resourceclaims", names),
            seconds=POD_SECONDS,
            what="the claims are gone",
        )
        try:
            wait_until(lambda: not self.drivers.leftovers(), seconds=60, what="nothing is left on the node")
        except AssertionError as error:
            raise AssertionError(f"{error}; there are {self.drivers.leftovers()}") from None

    def delete_own_pods(self) -> set[str]:
        """Delete the pods of tests and wait until they are gone; gives the namespaces of tests."""
        names = {item["metadata"]["name"] for item in self.get("/api/v1/namespaces")["items"]} - _STANDING
        for name in names:
            self.control_plane.call("DELETE", f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=1")
        wait_until(
            lambda: not self._all("/api/v1/pods", names), seconds=POD_SECONDS, what="the pods are gone"
        )
        return names

    def _all(self, path: str, namespaces: set[str]) -> list[dict[str, Any]]:
        return [item for item in self.get(path)["items"] if item["metadata"]["namespace"] in namespaces]

    # -- pods --------------------------------------------------------------------------------------

    def apply_example(self, name: str) -> None:
        """Apply one of the repository's examples, unchanged."""
        path = str(EXAMPLES / f"{name}.yaml")
        said = ""

        def applied() -> bool:
            nonlocal said
            said = self.kubectl("apply", "-f", path, check=False)
            # A new namespace has no service account yet, and the API server waits a second for it.
            return 'serviceaccount "default" not found' not in said

        wait_until(applied, seconds=60, what="the namespace has its service account", every=0.5)
        assert "Error" not in said, said

    def namespace(self, **labels: str) -> str:
        """Make a namespace for a test."""
        self._count += 1
        name = f"test-{self._count}"
        metadata = {"name": name, "labels": labels}
        self.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        wait_until(
            lambda: self.get(f"/api/v1/namespaces/{name}/serviceaccounts/default", missing=True),
            seconds=60, what="the default service account is there",
        )  # fmt: skip
        return name

    def claim(self, namespace: str, name: str, **request: Any) -> dict[str, Any]:
        """Create a claim for devices of the class of GPUs."""
        exactly = {"deviceClassName": DRIVER, **request}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        return self.create(
            f"{RESOURCE}/namespaces/{namespace}/resourceclaims",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name},
                "spec": spec,
            },
        )

    def template(self, namespace: str, name: str, **request: Any) -> None:
        """Create a template of claims for devices of the class of GPUs."""
        exactly = {"deviceClassName": DRIVER, **request}
        self.create(
            f"{RESOURCE}/namespaces/{namespace}/resourceclaimtemplates",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": {"name": name},
                "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
            },
        )

    def pod(
        self,
        namespace: str,
        name: str,
        *claims: str,
        command: str = WAIT_FOR_EVER,
        by: str = "resourceClaimName",
        **spec: Any,
    ) -> dict[str, Any]:
        """Create a pod that uses claims by their names, or by the names of templates."""
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 3,
                "automountServiceAccountToken": False,
                "resourceClaims": [{"name": claim, by: claim} for claim in claims],
                "containers": [
                    {
                        "name": "main",
                        "image": IMAGE,
                        "command": ["bash", "-c", command],
                        "resources": {"claims": [{"name": claim} for claim in claims]},
                    }
                ],
                **spec,
            },
        }
        return self.create(f"/api/v1/namespaces/{namespace}/pods", body)

    def read_pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Give a pod, None if there is none."""
        found = self.get(f"/api/v1/namespaces/{namespace}/pods/{name}", missing=True)
        return None if found is None else dict(found)

    def wait_phase(
        self, namespace: str, name: str, phase: str = "Running", *, seconds: float = POD_SECONDS
    ) -> dict[str, Any]:
        """Wait for a pod's phase; the pod's events are in the error."""

        def check() -> dict[str, Any] | None:
            pod = self.read_pod(namespace, name)
            return pod if pod is not None and pod["status"].get("phase") == phase else None

        try:
            found = wait_until(check, seconds=seconds, what=f"pod {namespace}/{name} is {phase}")
        except AssertionError as error:
            text = "\n".join(self.messages(namespace, name))
            raise AssertionError(f"{error}\n{text}\n{self.drivers.last_words()}") from None
        return dict(found)

    def wait_gone(self, namespace: str, name: str, *, seconds: float = POD_SECONDS) -> None:
        """Wait until there is no pod of this name."""
        wait_until(
            lambda: self.read_pod(namespace, name) is None,
            seconds=seconds,
            what=f"pod {namespace}/{name} is gone",
        )

    def delete_pod(self, namespace: str, name: str) -> None:
        """Delete a pod and wait until it is gone."""
        self.control_plane.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds=1")
        self.wait_gone(namespace, name)

    def messages(self, namespace: str, name: str) -> list[str]:
        """What the events of an object say."""
        items = self.get(f"/api/v1/namespaces/{namespace}/events?fieldSelector=involvedObject.name={name}")[
            "items"
        ]
        return [f"{item['reason']}: {item.get('message', '')}" for item in items]

    def run_in(
        self, namespace: str, pod: str, command: str, *, container: str = "main", check: bool = True
    ) -> str:
        """Run a shell command in a container, by kubectl."""
        return self.kubectl(
            "exec", "-n", namespace, pod, "-c", container, "--", "bash", "-c", command, check=check
        )

    def gpu_nodes(self, namespace: str, pod: str, *, container: str = "main") -> set[int]:
        """Give the minor numbers of the GPUs whose device nodes a container has, as their nodes say."""
        text = self.run_in(namespace, pod, "stat -c '%n %t %T' /dev/nvidia[0-9]*", container=container)
        found = re.findall(r"^/dev/nvidia(\d+) (\w+) (\w+)$", text, re.MULTILINE)
        for number, major, minor in found:
            assert (int(major, 16), int(minor, 16)) == (195, int(number)), text
        return {int(number) for number, _, _ in found}

    def log_of(self, namespace: str, pod: str, *, container: str = "main") -> str:
        """Give what a container printed."""
        return str(self.get(f"/api/v1/namespaces/{namespace}/pods/{pod}/log?container={container}"))

    def claims_of(self, namespace: str) -> dict[str, dict[str, Any]]:
        """Give the claims of a namespace by name."""
        items = self.get(f"{RESOURCE}/namespaces/{namespace}/resourceclaims")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def allocated(self, namespace: str, pod: str) -> set[str]:
        """Give the names of the devices that a pod's claims got, as the API shows them."""
        found = self.read_pod(namespace, pod)
        assert found is not None
        names = [
            claim["resourceClaimName"]
            for claim in (
                *found["spec"].get("resourceClaims", ()),
                *found["status"].get("resourceClaimStatuses", ()),
            )
            if "resourceClaimName" in claim
        ]
        extended = found["status"].get("extendedResourceClaimStatus")
        if extended:
            names.append(extended["resourceClaimName"])
        claims = self.claims_of(namespace)
        return {device for name in names for device in devices_of(claims[name])}


def devices_of(claim: dict[str, Any]) -> set[str]:
    """Give the names of the devices that a claim was given."""
    results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
    for result in results:
        assert (result["driver"], result["pool"]) == (DRIVER, NODE_NAME), json.dumps(result)
    return {result["device"] for result in results}
