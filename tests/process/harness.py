"""A node in real parts: the daemon as a process, real sockets, simulated GPUs, API server and kubelet.

`Node` owns everything and ends everything. The daemon is the code that runs in production; what it is given that
production does not have is `--simulate`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from dra.api.claim import ClaimRef
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.pb.grpc_health_pb2 import HealthCheckRequest, HealthCheckResponse
from dra.pb.services import HEALTH_CHECK
from dra.sim.apiserver import SimApiServer
from dra.sim.kubelet import SimKubelet, Timings
from dra.sim.leash import Leash
from dra.sim.mps import NodeKeeper
from dra.sim.node import SimulatedNode
from dra.sim.runtime import Runtime
from tests.places import SHORT
from tests.process.invariants import check_exclusive, check_files

DRIVER = "gpu.nvidia.com"
NODE = "node-a"
RESOURCE_API = "/apis/resource.k8s.io/v1"
FAST = Timings(scan=0.05, first_back_off=0.1, health_retry=0.2, reconcile=3600)


def wait_until(condition: Callable[[], Any], *, seconds: float = 60.0, what: str = "") -> Any:
    """Give the first true answer of `condition`; for states of other processes, which nobody announces.

    What takes long to look at is looked at less often: the daemon that is waited for needs the processor too.
    """
    end = time.monotonic() + seconds
    while True:
        began = time.thread_time()
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what or condition}")
        time.sleep(min(max(0.01, 5 * (time.thread_time() - began)), 0.1))


def probe(port: int, service: str) -> tuple[int, str]:
    """Ask a daemon's health service as the kubelet's probes do; gives the status and what is missing."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = channel.unary_unary(
            HEALTH_CHECK.path,
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        response, call = stub.with_call(HealthCheckRequest(service=service), timeout=5)
        return response.status, dict(call.trailing_metadata()).get("dra-missing", "")


class Service:
    """One process of ours. `periods` shortens what a test would have to wait for: see `tuned_daemon`."""

    def __init__(
        self,
        command: tuple[str, ...],
        *,
        arguments: tuple[str, ...],
        environment: dict[str, str],
        log: Path,
        periods: dict[str, float],
    ) -> None:
        self.log = log
        self._log_file = log.open("w")
        self.started = time.monotonic()
        if periods:
            command = (str(Path(__file__).parent / "tuned_daemon.py"), *command[2:])
            environment = {**environment, "DRA_TEST_PERIODS": json.dumps(periods)}
        self.process = subprocess.Popen(
            [sys.executable, *command, "--log-level", "debug", *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=self._log_file,
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it logged."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one event."""
        return [entry for entry in self.events if entry["event"] == event]

    def terminate(self, *, within_seconds: float) -> int:
        """SIGTERM; gives the exit status. It must end in time."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(within_seconds=within_seconds)

    def pause(self) -> None:
        """SIGSTOP, and wait until the whole process stands still."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: (
                {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}
                == {"T"}
            ),
            what="all threads stand still",
        )

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.wait(within_seconds=45)

    def wait(self, *, within_seconds: float) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(within_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {within_seconds} s:\n{self.log.read_text()[-3000:]}"
            ) from None

    def close(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(5)
        self._log_file.close()


class DaemonProcess(Service):
    """One `dra plugin` process of a node; with `--healthcheck-port` it can be probed."""

    def probe(self, service: str) -> tuple[int, str]:
        """Ask as the kubelet's probes do; gives the status and what is missing."""
        port = wait_until(lambda: self.logged("plugin_started"), what="it has started")[0]["probe_port"]
        return probe(port, service)

    def __init__(self, node: Node, *, arguments: tuple[str, ...], **options: Any) -> None:
        own = (
            "--simulate", node.profile, "--host-root", str(node.root), "--node-name", NODE,
            "--kubeconfig", str(node.kubeconfig),
        )  # fmt: skip
        super().__init__(("-m", "dra.cli.plugin"), arguments=(*own, *arguments), **options)


class Node:
    """One simulated node. Its root is short: the paths of sockets are limited."""

    place = SHORT

    def __init__(self, *, profile: str = "dgx-h100", version: str = "1.36") -> None:
        self.profile = profile
        self.root = Path(tempfile.mkdtemp(prefix="n", dir=self.place))
        self.kubelet_root = self.root / "var/lib/kubelet"
        self.plugins = self.kubelet_root / "plugins"
        self.registry = self.kubelet_root / "plugins_registry"
        self.registry.mkdir(parents=True)
        self.machine = SimulatedNode(profile, self.root)
        self.api = self.api_server(version)
        self.kubeconfig = self.api.write_kubeconfig(self.root / "kubeconfig")
        self.client = KubeClient(Connection(KubeOptions(kubeconfig=str(self.kubeconfig))))
        made = self.api.create(
            "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        )
        self.uid = str(made["metadata"]["uid"])
        # GPUs with MIG instances that the test made by hand, and how many.
        self.partitions: dict[str, int] = {}
        self.daemons: list[DaemonProcess] = []
        self.services: list[Service] = []
        self._kubelets: list[SimKubelet] = []
        self._leash = Leash()
        self.mps = NodeKeeper(profile, self.root, self._leash)

    def api_server(self, version: str) -> Any:
        """Start the API server."""
        return SimApiServer(version=version).start()

    def close(self) -> None:
        """End all processes and threads, and remove the files."""
        for kubelet in self._kubelets:
            kubelet.stop()
        for process in (*self.services, *self.daemons):
            process.close()
        self.mps.close()
        self._leash.close()
        self.client.close()
        self.api.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- parts -------------------------------------------------------------------------------------

    def kubelet(self, *, minor: int = 36, timings: Timings = FAST) -> SimKubelet:
        """Start a kubelet (once more: after `stop` of the one before)."""
        kubelet = SimKubelet(
            NODE, self.kubelet_root, self.client, slices=self.client, runtime=Runtime(self.root),
            minor=minor, timings=timings,
        )  # fmt: skip
        self._kubelets.append(kubelet)
        kubelet.start()
        return kubelet

    def keeper(self) -> NodeKeeper:
        """Start the MPS keeper, a process of its own."""
        self.mps.start()
        wait_until(lambda: self.mps.listens, what="the MPS keeper listens")
        return self.mps

    def daemon(
        self,
        *arguments: str,
        pod_uid: str = "",
        crash_at: str = "",
        periods: dict[str, float] | None = None,
        **environment: str,
    ) -> DaemonProcess:
        """Start a daemon."""
        variables = {"POD_UID": pod_uid, "DRA_CRASH_AT": crash_at, **environment}
        log = self.root / f"daemon-{len(self.daemons)}.log"
        made = DaemonProcess(self, arguments=arguments, environment=variables, log=log, periods=periods or {})
        self.daemons.append(made)
        return made

    def fleet(
        self, identity: str, *arguments: str, periods: dict[str, float] | None = None, **environment: str
    ) -> Service:
        """Start a replica of `dra fleet`."""
        made = Service(
            ("-m", "dra.cli.main", "fleet"),
            arguments=("--identity", identity, "--kubeconfig", str(self.kubeconfig), *arguments),
            environment=environment,
            log=self.root / f"fleet-{len(self.services)}.log",
            periods=periods or {},
        )
        self.services.append(made)
        return made

    # -- the API -----------------------------------------------------------------------------------

    def slices(self) -> list[dict[str, Any]]:
        """The published slices."""
        _, answer = self.api.request("GET", f"{RESOURCE_API}/resourceslices")
        return list(answer["items"])

    def wait_published(self, *, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until all slices of the pool are there."""

        def whole() -> list[dict[str, Any]] | None:
            found = self.slices()
            return found if found and len(found) == found[0]["spec"]["pool"]["resourceSliceCount"] else None

        found = wait_until(whole, seconds=seconds, what="slices are published")
        assert isinstance(found, list)
        return found

    def pod(self, name: str, *claims: dict[str, Any]) -> dict[str, Any]:
        """Give a pod that uses claims; it is known to the claims, not to the API."""
        return {
            "metadata": {"namespace": "default", "name": name, "uid": f"uid-{name}"},
            "spec": {
                "restartPolicy": "Never",
                "resourceClaims": [
                    {"name": f"c{index}", "resourceClaimName": claim["metadata"]["name"]}
                    for index, claim in enumerate(claims)
                ],
                "containers": [
                    {
                        "name": "main",
                        "image": "cuda",
                        "command": ["nvidia-smi", "-L"],
                        "resources": {"claims": [{"name": f"c{index}"} for index in range(len(claims))]},
                    }
                ],
            },
            "status": {},
        }

    def claim(
        self,
        name: str,
        *devices: str,
        pods: tuple[str, ...] = ("p",),
        admin: bool = False,
        share: str = "",
        consumed: dict[str, str] | None = None,
        configs: tuple[dict[str, Any], ...] = (),
    ) -> dict[str, Any]:
        """Create a claim that the scheduler has given these devices, reserved for pods.

        `admin`: for monitoring. `share`: the share id, if the devices are given out in shares; `consumed`: what it
        takes of their capacities. `configs`: opaque parameters for all requests.
        """
        access = {"adminAccess": True} if admin else {}
        requests = [
            {"name": f"r{index}", "exactly": {"deviceClassName": "gpu.nvidia.com", **access}}
            for index in range(len(devices))
        ]
        opaque = [{"opaque": {"driver": DRIVER, "parameters": parameters}} for parameters in configs]
        base = f"{RESOURCE_API}/namespaces/default/resourceclaims"
        made = self.api.create(
            base,
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": requests, "config": opaque}},
            },
        )
        results = [
            {"request": f"r{index}", "driver": DRIVER, "pool": NODE, "device": device, **access,
             **({"shareID": share} if share else {}),
             **({"consumedCapacity": consumed} if consumed else {})}
            for index, device in enumerate(devices)
        ]  # fmt: skip
        made["status"] = {
            "allocation": {
                "devices": {
                    "results": results,
                    "config": [{"source": "FromClaim", "requests": [], **each} for each in opaque],
                }
            },
            "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in pods],
        }
        status, answer = self.api.request("PUT", f"{base}/{name}/status", made)
        assert status == 200, answer
        return dict(answer)

    def claim_of(self, name: str) -> dict[str, Any]:
        """Give a claim that was created."""
        return dict(self.api.request("GET", f"{RESOURCE_API}/namespaces/default/resourceclaims/{name}")[1])

    def allow_monitoring(self) -> None:
        """Let claims of the namespace `default` ask for admin access."""
        self.api.request(
            "PATCH",
            "/api/v1/namespaces/default",
            {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}},
            content_type="application/merge-patch+json",
        )

    def delete_claim(self, name: str) -> None:
        """Delete a claim as `kubectl delete --force` of its pod and of it does: at once, unprepared or not."""
        path = f"{RESOURCE_API}/namespaces/default/resourceclaims/{name}"
        _, claim = self.api.request("GET", path)
        claim["metadata"]["finalizers"] = []
        claim["status"].pop("reservedFor", None)
        self.api.request("PUT", f"{path}/status", claim)
        self.api.request("PUT", path, self.api.request("GET", path)[1])
        status, answer = self.api.request("DELETE", path)
        assert status == 200, answer

    def told_events(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """The Events on a claim."""
        _, answer = self.api.request("GET", "/api/v1/namespaces/default/events")
        uid = claim["metadata"]["uid"]
        return [event for event in answer["items"] if event["involvedObject"]["uid"] == uid]

    # -- the disk ----------------------------------------------------------------------------------

    @property
    def state_dir(self) -> Path:
        """The driver's directory."""
        return self.plugins / DRIVER

    def record_file(self, uid: str) -> Path:
        """Where the record of a claim is."""
        return self.state_dir / "claims" / f"{uid}.json"

    def cdi_file(self, uid: str) -> Path:
        """Where the CDI file of a claim is."""
        return self.root / "var/run/cdi" / f"k8s.{DRIVER}-claim_{uid}.yaml"

    def read_records(self) -> dict[str, dict[str, Any]]:
        """The records by claim UID, as JSON."""
        return {uid: json.loads(self.record_file(uid).read_text()) for uid in self.records()}

    def records(self) -> set[str]:
        """UIDs of the claims that have a record."""
        return {path.stem for path in (self.state_dir / "claims").glob("*.json")}

    def cdi_files(self) -> set[str]:
        """UIDs of the claims that have a CDI file of ours."""
        prefix = f"k8s.{DRIVER}-claim_"
        return {
            path.stem.removeprefix(prefix) for path in (self.root / "var/run/cdi").glob(f"{prefix}*.yaml")
        }

    def leftovers(self) -> list[str]:
        """Names of files that no running driver should leave behind, such as temporary ones."""
        folders = (self.state_dir / "claims", self.root / "var/run/cdi")
        return sorted(
            path.name
            for folder in folders
            if folder.is_dir()
            for path in folder.iterdir()
            if path.suffix not in (".json", ".yaml")
        )

    def check_consistent(self) -> None:
        """What the files say holds together, also while no driver runs."""
        check_exclusive(self)
        check_files(self)


def ref_of(claim: dict[str, Any]) -> ClaimRef:
    """Give the claim as the kubelet names it to a driver."""
    metadata = claim["metadata"]
    return ClaimRef(metadata["namespace"], metadata["name"], metadata["uid"])


def new_uid() -> str:
    """Give a pod UID."""
    return str(uuid.uuid4())
