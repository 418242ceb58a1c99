"""A real control plane: etcd, kube-apiserver and, where they are, kube-controller-manager and kube-scheduler.

With a network it runs inside of it and is reached by the node's address; without one it runs on loopback.
Everybody has a token; the API server's certificate is the one that it makes for itself.
"""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.real.assets import SCHEDULING, Assets
from tests.e2e.real.network import Network
from tests.e2e.real.processes import Program, wait_until
from tests.real_apiserver import _elliptic_key, free_port

START_SECONDS = 90.0
NODE_NAME = "node-a"
_USERS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", "system:authenticated"),
    "scheduler": ("system:kube-scheduler", "system:authenticated"),
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
}
# What pods with claims need. Others would only take time from the tests.
_CONTROLLERS = (
    "serviceaccount-token", "serviceaccount", "root-ca-certificate-publisher", "namespace", "garbage-collector",
    "resourceclaim", "daemonset", "deployment", "replicaset", "node-lifecycle", "taint-eviction", "device-taint-eviction", "pod-garbage-collector",
    "validatingadmissionpolicy-status",
)  # fmt: skip


class ApiError(Exception):
    """The API server's refusal."""

    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(f"{status}: {answer.get('message', answer) if isinstance(answer, dict) else answer}")
        self.status = status


class ControlPlane:
    """The processes, and ways to talk to the API server."""

    def __init__(self, assets: Assets, directory: Path, network: Network | None) -> None:
        self.assets, self.directory, self.network = assets, directory, network
        self.address = network.node if network else "127.0.0.1"
        self._port, self._etcd_port = (6443, 2379) if network else (free_port(), free_port())
        self.url = f"https://{self.address}:{self._port}"
        self.tokens = {name: secrets.token_hex(16) for name in _USERS}
        self.programs: dict[str, Program] = {}
        self._certificates = directory / "certificates"
        self._context: ssl.SSLContext | None = None

    @property
    def api_server(self) -> Program:
        """The API server's process."""
        return self.programs["kube-apiserver"]

    def start(self) -> None:
        """Start everything; returns when pods could be created."""
        lines = [f'{self.tokens[name]},{user},{user},"{group}"' for name, (user, group) in _USERS.items()]
        self._write("tokens.csv", "\n".join(lines) + "\n")
        self._write("service-accounts.key", _elliptic_key())
        url, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port()}"
        self._program(
            "etcd", f"--data-dir={self.directory / 'etcd'}", "--unsafe-no-fsync", f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}", "--log-level=warn",
        ).start()  # fmt: skip
        self._api_server(url)
        self.start_api_server()
        if not all(self.assets.has(name) for name in SCHEDULING):
            return
        self._program(
            "kube-controller-manager", f"--kubeconfig={self.kubeconfig('controllers')}", "--secure-port=0",
            "--leader-elect=false", "--use-service-account-credentials=true",
            f"--service-account-private-key-file={self.directory / 'service-accounts.key'}",
            f"--root-ca-file={self.ca_file}", f"--controllers={','.join(f'{c}-controller' for c in _CONTROLLERS)}",
        ).start()  # fmt: skip
        self._program(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig('scheduler')}",
            "--secure-port=0",
            "--leader-elect=false",
        ).start()
        wait_until(
            lambda: self.get("/api/v1/namespaces/default/serviceaccounts/default", missing=True),
            seconds=START_SECONDS, what="the default service account is there",
        )  # fmt: skip

    def start_api_server(self) -> None:
        """Start the API server (again) and wait until it is ready."""
        self.api_server.start_and_wait(self._ready, seconds=START_SECONDS)

    def stop(self) -> None:
        """End all of it."""
        for program in reversed(self.programs.values()):
            program.stop()

    # -- talking to it -----------------------------------------------------------------------------

    @property
    def ca_file(self) -> Path:
        """The certificate to trust."""
        return self._certificates / "apiserver.crt"

    def kubeconfig(self, name: str, *, token: str = "") -> Path:
        """Give a kubeconfig file of one of our users, or of the holder of a token. JSON is YAML."""
        user = {"token": token or self.tokens[name]}
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "c", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }
        return self._write(f"{name}.kubeconfig", json.dumps(content))

    def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Send one request as administrator; give the status and the answer."""
        if self._context is None:
            self._context = ssl.create_default_context(cafile=str(self.ca_file))
        connection = http.client.HTTPSConnection(self.address, self._port, timeout=15, context=self._context)
        try:
            headers = {"Authorization": f"Bearer {self.tokens['admin']}", "Content-Type": content_type}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in (answer.getheader("Content-Type") or "")
            return answer.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Send a request that must succeed; gives the answer. Raises ApiError."""
        status, answer = self.request(method, path, body, **more)
        if status >= 400:
            raise ApiError(status, answer)
        return answer

    def get(self, path: str, *, missing: bool = False) -> Any:
        """Give an object, list or text; None for what is missing, if that is fine."""
        try:
            return self.call("GET", path)
        except ApiError as error:
            if missing and error.status == 404:
                return None
            raise

    def kubectl(self, *arguments: str, check: bool = True, seconds: float = 60.0, stdin: str = "") -> str:
        """Run kubectl as administrator; gives what it printed, both streams."""
        done = subprocess.run(
            [self.assets.path("kubectl"), f"--kubeconfig={self.kubeconfig('admin')}", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False, input=stdin,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}"
        return done.stdout

    # -- parts -------------------------------------------------------------------------------------

    def _api_server(self, etcd: str) -> None:
        key = self.directory / "service-accounts.key"
        self._program(
            "kube-apiserver", f"--etcd-servers={etcd}", f"--bind-address={'0.0.0.0' if self.network else '127.0.0.1'}",
            f"--advertise-address={self.address}", f"--secure-port={self._port}", f"--cert-dir={self._certificates}",
            "--endpoint-reconciler-type=none", f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/16", "--allow-privileged=true", "--profiling=false",
            "--kubelet-preferred-address-types=InternalIP",
            # Manifests of older clusters are applied too.
            "--runtime-config=resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true",
        )  # fmt: skip

    def _ready(self) -> bool:
        try:
            return self.ca_file.exists() and self.request("GET", "/readyz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _peer_port(self) -> int:
        return 2380 if self.network else free_port()

    def _program(self, name: str, *arguments: str) -> Program:
        made = Program(
            name,
            [self.assets.path(name), *arguments],
            log=self.directory / f"{name}.log",
            netns=self.network.name if self.network else "",
        )
        self.programs[name] = made
        return made

    def _write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o600)
        return path
