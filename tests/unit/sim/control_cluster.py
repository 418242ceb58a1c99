"""A simulated API server and control plane without threads and sockets, for tests of controllers."""

from __future__ import annotations

from typing import Any

from dra.cel import compile_selector
from dra.sim.apiserver import SimApiServer
from dra.sim.control.loop import ControlPlane

DRIVER = "gpu.nvidia.com"
# What kube-scheduler 1.36 adds where the claims of a pod have no place on any of so many nodes.
HELPLESS = " still not schedulable, preemption: 0/{0} nodes are available: {0} Preemption is not helpful for scheduling."
DRA = "/apis/resource.k8s.io/v1"
CLAIMS = f"{DRA}/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"


class ControlCluster:
    """Objects go in through the API; `sync` does rounds until nothing changes."""

    def __init__(self, *, version: str = "1.36", **options: Any) -> None:
        self.server = SimApiServer(version=version, **options)
        self.control = ControlPlane(self.server, compile_selector)

    def sync(self, rounds: int = 12) -> None:
        """Do rounds of all controllers and of the garbage collector until nothing is written any more."""
        for _ in range(rounds):
            before = self.server.storage.revision
            self.control.sync()
            while self.server.collector.sweep():
                pass
            if self.server.storage.revision == before:
                return
        raise AssertionError(f"the controllers still write after {rounds} rounds")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Make a call that must work."""
        status, answer = self.server.request(method, path, body)
        assert status < 300, (method, path, status, answer)
        return answer

    # -- cluster

    def gpu_class(self, name: str = DRIVER, **spec: Any) -> None:
        expression = f'device.driver == "{DRIVER}"'
        body = {"selectors": [{"cel": {"expression": expression}}], **spec}
        self.call("POST", f"{DRA}/deviceclasses", _object("DeviceClass", name, body))

    def node(self, name: str, *, labels: dict[str, str] | None = None, **spec: Any) -> None:
        allocatable = {"cpu": "8", "memory": "64Gi", "pods": "110", **spec.pop("allocatable", {})}
        self.call(
            "POST",
            "/api/v1/nodes",
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
                "spec": spec,
                "status": {"allocatable": allocatable, "capacity": allocatable},
            },
        )

    def gpus(self, node: str, count: int = 8, *, product: str = "H100", **more: Any) -> None:
        devices = [
            {"name": f"gpu-{number}", "attributes": {"productName": {"string": product}}, **more}
            for number in range(count)
        ]
        spec = {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        }
        self.call("POST", f"{DRA}/resourceslices", _object("ResourceSlice", f"{node}-slice", spec))

    def gpu_node(self, name: str, count: int = 8, **options: Any) -> None:
        self.node(name, **options)
        self.gpus(name, count)

    # -- users

    def template(self, name: str = "one-gpu", **request: Any) -> None:
        path = f"{DRA}/namespaces/default/resourceclaimtemplates"
        self.call("POST", path, _object("ResourceClaimTemplate", name, {"spec": claim_spec(**request)}))

    def claim(self, name: str, **request: Any) -> Any:
        return self.call("POST", CLAIMS, _object("ResourceClaim", name, claim_spec(**request)))

    def pod(self, name: str, *, claim: str = "", template: str = "", **spec: Any) -> Any:
        container: dict[str, Any] = {"name": "main", "image": "ubuntu"}
        entry: dict[str, Any] = {"name": "gpu"}
        if claim:
            entry["resourceClaimName"] = claim
        if template:
            entry["resourceClaimTemplateName"] = template
        if claim or template:
            container["resources"] = {"claims": [{"name": "gpu"}]}
            spec = {"resourceClaims": [entry], **spec}
        return self.call("POST", PODS, _object("Pod", name, {"containers": [container], **spec}))

    def end(self, pod: str, phase: str = "Succeeded") -> None:
        """Let a pod's containers end, as its kubelet would report."""
        current = self.get_pod(pod)
        status = {**current["status"], "phase": phase}
        self.call("PUT", f"{PODS}/{pod}/status", {**current, "status": status})

    def run(self, pod: str) -> None:
        """Let a pod be ready, as its kubelet would report."""
        current = self.get_pod(pod)
        ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
        status = {**current["status"], "phase": "Running", "conditions": ready}
        self.call("PUT", f"{PODS}/{pod}/status", {**current, "status": status})

    def run_all(self) -> None:
        """Let every pod that is on a node run, and every deleted one go."""
        for pod in self.list("pods"):
            name = pod["metadata"]["name"]
            if pod["metadata"].get("deletionTimestamp"):
                self.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
            elif pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending":
                self.run(name)

    # -- what came out

    def list(self, plural: str) -> list[Any]:
        paths = {"pods": PODS, "resourceclaims": CLAIMS, "events": "/api/v1/namespaces/default/events"}
        apps = "/apis/apps/v1/namespaces/default"
        return list(self.call("GET", paths.get(plural, f"{apps}/{plural}"))["items"])

    def get_pod(self, name: str) -> Any:
        return self.call("GET", f"{PODS}/{name}")

    def get_claim(self, name: str) -> Any:
        return self.call("GET", f"{CLAIMS}/{name}")

    def claim_of(self, pod: str) -> Any:
        status = self.get_pod(pod)["status"]
        return self.get_claim(status["resourceClaimStatuses"][0]["resourceClaimName"])

    def node_of(self, pod: str) -> str:
        return self.get_pod(pod)["spec"].get("nodeName", "")

    def reason(self, pod: str) -> str:
        """Why a pod waits."""
        conditions = self.get_pod(pod)["status"].get("conditions") or []
        return next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")

    def events(self, name: str) -> list[tuple[str, str]]:
        return [
            (event["reason"], event["message"])
            for event in self.list("events")
            if event["involvedObject"]["name"] == name
        ]


def devices_of(claim: Any) -> list[tuple[str, str]]:
    """(pool, device) of a claim's results."""
    results = claim["status"]["allocation"]["devices"]["results"]
    return [(result["pool"], result["device"]) for result in results]


def claim_spec(**request: Any) -> Any:
    """A claim's spec with one request `gpu`; `alternatives` make it a firstAvailable one."""
    alternatives = request.pop("alternatives", None)
    constraints = request.pop("constraints", None)
    if alternatives:
        requests = [{"name": "gpu", "firstAvailable": alternatives}]
    else:
        requests = [{"name": "gpu", "exactly": {"deviceClassName": DRIVER, **request}}]
    return {"devices": {"requests": requests, **({"constraints": constraints} if constraints else {})}}


def _object(kind: str, name: str, spec: Any) -> Any:
    version = "v1" if kind == "Pod" else "resource.k8s.io/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
