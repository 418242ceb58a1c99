"""A real kube-apiserver with etcd, for tests: started on free loopback ports with its state in a directory.

The binaries come from `KUBEBUILDER_ASSETS` (the convention of envtest): a directory with `etcd` and
`kube-apiserver`. Without it tests skip and say so.

    @pytest.fixture(scope="module")
    def server(tmp_path_factory):
        with real_apiserver(tmp_path_factory.mktemp("apiserver")) as running:
            yield running

    @needs_real_apiserver
    def test_...(server): KubeOptions(kubeconfig=str(server.admin_kubeconfig))

RBAC is on; `kubeconfig_for(user, groups)` gives credentials of any user known at the start (`users`). The
older versions of resource.k8s.io are served too.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
_missing = [name for name in ("etcd", "kube-apiserver") if not ASSETS or not Path(ASSETS, name).is_file()]

needs_real_apiserver = pytest.mark.skipif(
    bool(_missing),
    reason="needs real binaries: set KUBEBUILDER_ASSETS to a directory with etcd and kube-apiserver",
)

ADMIN = "admin"
START_SECONDS = 60.0
SERVED = ("resource.k8s.io/v1beta1=true", "resource.k8s.io/v1beta2=true")


@dataclass
class RealApiServer:
    """Two running processes and where they are."""

    directory: Path
    port: int
    etcd_port: int
    gates: Sequence[str] = ()
    served: Sequence[str] = SERVED
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    etcd: subprocess.Popen | None = None
    apiserver: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca_file(self) -> Path:
        return self.directory / "certs" / "apiserver.crt"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.kubeconfig_for(ADMIN)

    def token_of(self, user: str) -> str:
        lines = (self.directory / "tokens.csv").read_text().splitlines()
        return next(line.split(",")[0] for line in lines if line.split(",")[1] == user)

    def kubeconfig_for(self, user: str, *, token: str | None = None) -> Path:
        path = self.directory / f"kubeconfig-{user.replace(':', '-')}{'-token' if token else ''}"
        ca = base64.b64encode(self.ca_file.read_bytes()).decode()
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: main\n"
            f'clusters: [{{name: c, cluster: {{server: "{self.url}", certificate-authority-data: {ca}}}}}]\n'
            f'users: [{{name: u, user: {{token: "{token or self.token_of(user)}"}}}}]\n'
            "contexts: [{name: main, context: {cluster: c, user: u}}]\n"
        )
        return path

    def start_apiserver(self) -> None:
        """Start kube-apiserver (again) and wait until it is ready."""
        key = self.directory / "service-accounts.key"
        if not key.exists():
            key.write_text(_elliptic_key())
        if not (self.directory / "tokens.csv").exists():
            rows = {ADMIN: ["system:masters"], **self.users}
            lines = [
                f'{secrets.token_hex(16)},{user},{user},"{",".join(groups)}"' for user, groups in rows.items()
            ]
            (self.directory / "tokens.csv").write_text("\n".join(lines) + "\n")
        command = [
            str(Path(ASSETS, "kube-apiserver")),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--cert-dir={self.directory / 'certs'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={self.directory / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--allow-privileged=true",
            "--profiling=false",
            *([f"--runtime-config={','.join(self.served)}"] if self.served else []),
            *([f"--feature-gates={','.join(self.gates)}"] if self.gates else []),
            *self.arguments,
        ]
        self.apiserver = self._spawn("kube-apiserver", command)
        self._wait(self.apiserver, "kube-apiserver", self._is_ready)

    def kill_apiserver(self) -> None:
        """Take the API server away as a crash does; the data stay in etcd."""
        if self.apiserver is not None:
            self.apiserver.kill()
            self.apiserver.wait(20)
            self.apiserver = None

    def freeze(self) -> None:
        """Let the API server accept connections and say nothing."""
        assert self.apiserver is not None
        self.apiserver.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.apiserver is not None
        self.apiserver.send_signal(signal.SIGCONT)

    def start_etcd(self) -> None:
        url, peer = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{free_port()}"
        command = [
            str(Path(ASSETS, "etcd")), f"--data-dir={self.directory / 'etcd'}", "--unsafe-no-fsync",
            f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--log-level=error",
        ]  # fmt: skip
        self.etcd = self._spawn("etcd", command)
        self._wait(self.etcd, "etcd", lambda: _answers(self.etcd_port))

    def stop(self) -> None:
        # An orderly end takes the API server ten seconds, and there is nothing to keep.
        for process in (self.apiserver, self.etcd):
            if process is not None and process.poll() is None:
                process.kill()
        for process in (self.apiserver, self.etcd):
            if process is not None:
                process.wait(10)

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen:
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.directory
            )

    def _wait(self, process: subprocess.Popen, name: str, ready) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self.directory / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} did not start (exit status {process.poll()}):\n{tail}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        if not self.ca_file.exists() or not _answers(self.port):
            return False
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
            )
            request = urllib.request.Request(
                f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.token_of(ADMIN)}"}
            )
            with opener.open(request, timeout=5) as answer:
                return answer.status == 200
        except (OSError, ssl.SSLError):
            return False


@contextlib.contextmanager
def real_apiserver(
    directory: Path,
    *,
    gates: Sequence[str] = (),
    served: Sequence[str] = SERVED,
    users: Mapping[str, Sequence[str]] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[RealApiServer]:
    """Start etcd and kube-apiserver; both are gone afterwards."""
    server = RealApiServer(
        directory,
        free_port(),
        free_port(),
        gates=gates,
        served=served,
        users=users or {},
        arguments=arguments,
    )
    try:
        server.start_etcd()
        server.start_apiserver()
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _elliptic_key() -> str:
    """Give a new P-256 key for signing service account tokens, as PEM (SEC 1; the public half may be left out)."""
    # Any number below the order of the curve will do; the first byte keeps it there.
    number = b"\x00" + secrets.token_bytes(31)
    curve = bytes.fromhex("a00a06082a8648ce3d030107")
    der = b"\x30\x31" + b"\x02\x01\x01" + b"\x04\x20" + number + curve
    return f"-----BEGIN EC PRIVATE KEY-----\n{base64.b64encode(der).decode()}\n-----END EC PRIVATE KEY-----\n"
