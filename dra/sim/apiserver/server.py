"""The door: a simulated API server on a loopback port, in this process.

with SimApiServer() as server:
    server.write_kubeconfig(path)
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from dra.api.rules.cause import CelCheck
from dra.sim.apiserver.api import Api
from dra.sim.apiserver.collector import Collector
from dra.sim.apiserver.exchange import Request, Response
from dra.sim.apiserver.faults import Faults, RequestLog
from dra.sim.apiserver.gates import Preset, gates_for, served_dra_versions
from dra.sim.apiserver.http import Listener
from dra.sim.apiserver.identity import User
from dra.sim.apiserver.kinds.custom import follow_definitions
from dra.sim.apiserver.registry import Registry
from dra.sim.apiserver.state import Options
from dra.sim.apiserver.storage import Storage

Json = dict[str, Any]
NAMESPACES = ("kube-system", "kube-public", "default", "kube-node-lease")


class SimApiServer:
    """A Kubernetes API server in memory.

    Args:
        host, port: where it listens; port 0 takes a free one (see `url`).
        version: the Kubernetes version it plays, `1.32` to `1.37`: served versions of resource.k8s.io and
            default feature gates follow.
        gates: "all" switches on every gate of DRA that the version knows, "default" those of a plain cluster.
        features: feature gates that differ from that, by Kubernetes name.
        token: the bearer token clients must send; None lets everybody in.
        cel_check: gives what is wrong with a CEL selector, None if nothing. "dra": this project's own compiler; None:
            expressions are not checked.
        clock: seconds since the epoch, for timestamps.
        node_lifecycle: give new nodes the taint `not-ready` and the TTL annotation, as a real control plane does;
            nothing here removes the taint.
        time_scale: how long one second of a watch's timeoutSeconds lasts; below 1 tests are quick.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        version: str = "1.36",
        features: Mapping[str, bool] | None = None,
        gates: Preset = "all",
        dra_versions: tuple[str, ...] | None = None,
        token: str | None = None,
        cel_check: CelCheck | Literal["dra"] | None = "dra",
        clock: Callable[[], float] = time.time,
        watch_seconds: float = 1800.0,
        bookmark_seconds: float = 60.0,
        time_scale: float = 1.0,
        node_lifecycle: bool = False,
    ) -> None:
        minor = int(version.split(".")[1])
        served = dra_versions if dra_versions is not None else served_dra_versions(minor)
        on = gates_for(minor, features, preset=gates)
        check: CelCheck | None
        if cel_check == "dra":
            from dra.sim.apiserver.cel import dra_cel_check

            check = dra_cel_check(on)
        else:
            check = cel_check
        options = Options(
            minor=minor,
            gates=on,
            dra_versions=served,
            cel_check=check,
            token=token,
            watch_seconds=watch_seconds,
            bookmark_seconds=bookmark_seconds,
            time_scale=time_scale,
            node_lifecycle=node_lifecycle,
            clock=clock,
        )
        self.storage = Storage()
        self.registry = Registry(served, minor=minor)
        self.storage.subscribe(partial(follow_definitions, self.registry))
        self.api = Api(self.storage, self.registry, options)
        self.collector = Collector(self.api)
        self.faults = Faults()
        self.requests = RequestLog()
        self._host, self._port, self._token = host, port, token
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._seed()

    def _seed(self) -> None:
        for name in NAMESPACES:
            self.create(
                "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            )

    def start(self) -> Self:
        """Listen and serve in threads of their own; gives itself."""
        self.api.stopping = False
        self._listener = Listener(
            (self._host, self._port), handle=self.api.handle, faults=self.faults, log=self.requests
        )
        # The port stays the same over stop and start: clients reconnect.
        self._port = self._listener.server_port
        self._thread = threading.Thread(
            target=self._listener.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="sim-apiserver",
            daemon=True,
        )
        self._thread.start()
        self.collector.start()
        return self

    def stop(self) -> None:
        """Stop listening and break all connections. The objects stay: `start` serves them again."""
        if self._listener is None:
            return
        self.api.stopping = True
        self._listener.stopping.set()
        self._listener.shutdown()
        self._listener.server_close()
        self.storage.wake_all()
        self._listener.close_connections()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self.collector.stop()
        self._listener = None

    def __enter__(self) -> Self:
        if self._listener is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens, for example `http://127.0.0.1:34567`."""
        return f"http://{self._host}:{self._port}"

    def write_kubeconfig(self, path: Path | str, *, token: str = "") -> Path:
        """Write a kubeconfig (JSON, which is YAML) that points here and give its path; its user is the administrator, or
        the one of another token.
        """
        token = token or self._token or ""
        user: Json = {"token": token} if token else {}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "sim", "cluster": {"server": self.url}}],
            "users": [{"name": "sim", "user": user}],
            "contexts": [
                {"name": "sim", "context": {"cluster": "sim", "user": "sim", "namespace": "default"}}
            ],
            "current-context": "sim",
        }
        target = Path(path)
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        target.chmod(0o600)
        return target

    def token_for(self, user: User) -> str:
        """Give a token with which requests are made by a user."""
        token = secrets.token_urlsafe(16)
        self.api.users[token] = user
        return token

    def serve_service(self, namespace: str, name: str, host: str, port: int) -> None:
        """Say where a Service really listens, so that webhooks configured by `clientConfig.service` are reached."""
        self.api.services.register(namespace, name, host, port)

    def expire_watches(self) -> None:
        """Compact all history and end all watches: clients that resume get 410 and must list again."""
        self.storage.bump()
        self.storage.compact()
        self.storage.wake_all()

    def break_connections(self) -> None:
        """Break every open connection, watches included."""
        if self._listener is not None:
            self._listener.close_connections()

    def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Make a call without a socket (and without faults or log): gives status and decoded answer."""
        sent = {key.lower(): value for key, value in (headers or {}).items()}
        sent |= {"accept": "application/json", "user-agent": "sim/1", "content-type": content_type}
        if self._token:
            sent.setdefault("authorization", f"Bearer {self._token}")
        raw = b"" if body is None else json.dumps(body).encode()
        response: Response = self.api.handle(Request(method, target, sent, raw))
        return response.status, json.loads(response.body) if response.body else None

    def create(self, collection: str, obj: Json) -> Json:
        """Create an object without a socket.

        Raises:
            RuntimeError: the server refused it.
        """
        status, answer = self.request("POST", collection, obj)
        if status != 201:
            raise RuntimeError(f"{collection}: {status} {answer}")
        return dict(answer)
