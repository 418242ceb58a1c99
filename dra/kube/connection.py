"""The HTTP connection to the API server: where it is, who we are, one request.

The only module that imports the package `kubernetes`, and of it only the configuration loaders and
`ApiClient`, which owns the connection pool, TLS and the token. No API class and no model is ever touched:
they cost 5 to 20 MiB each. Loaded when the first connection is made, not on import.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dra.api.imports import PYDANTIC
from dra.errors import KubeError
from dra.kube.failures import Call, failure_from_answer, failure_from_exception
from dra.kube.lean_transport import transport_alone, without_oauth

# Connecting is local to a cluster: longer than this means that nobody is there.
CONNECT_SECONDS = 2.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CHUNK = 1 << 16
# The stand-ins of the import below are seen by all threads.
_IMPORTING = PYDANTIC


@dataclass(frozen=True, slots=True)
class KubeOptions:
    """How to reach the API server.

    Without `kubeconfig`: the pod's service account, else `$KUBECONFIG`, else `~/.kube/config`.
    """

    kubeconfig: str | None = None
    # Context of the kubeconfig; None is its current one.
    context: str | None = None
    user_agent: str = "dra"
    # Connections kept open; more are made when needed and dropped afterwards.
    connections: int = 16
    connect_seconds: float = CONNECT_SECONDS
    service_account_dir: Path = _SERVICE_ACCOUNT


def agent_of(program: str, instance: str) -> str:
    """Give a user agent that tells instances apart in the API server's audit log: `program (instance)`."""
    shown = "".join(each if each.isascii() and each.isprintable() else "?" for each in instance)
    return f"{program} ({shown})" if shown else program


class Connection:
    """Requests to one API server. Thread-safe.

    The token is read again every minute and after a 401; after a TLS failure the CA and the certificates
    are read again too.
    """

    def __init__(self, options: KubeOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._api: Any = None
        self._loader: Any = None

    @property
    def host(self) -> str:
        """URL of the API server, empty until the configuration could be loaded."""
        return str(self._api.configuration.host) if self._api is not None else ""

    def send(
        self,
        call: Call,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Any = None,
        content_type: str = "application/json",
        read_seconds: float,
    ) -> Any:
        """Send one request and give urllib3's response, its body unread.

        Raises:
            KubeError: for any answer that is not 2xx, and for any failure to get one.
        """
        api = self._client(call)
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            # The body does not pass through param_serialize, which would walk and copy it.
            verb, url, headers, _, _ = api.param_serialize(
                method, target, header_params=headers, auth_settings=["BearerToken"]
            )
            timeout = (self._options.connect_seconds, max(0.05, read_seconds))
            answer = api.call_api(verb, url, headers, body=body, _request_timeout=timeout).response
        except Exception as error:
            raise self.translate(call, error) from error
        if 200 <= answer.status < 300:
            return answer
        try:
            text = read_body(answer, deadline=time.monotonic() + read_seconds)
        except Exception:
            text = b""
        raise failure_from_answer(call, answer.status, text, answer.headers)

    def read(self, call: Call, answer: Any, *, read_seconds: float) -> bytes:
        """Read the rest of a response's body; the whole takes at most about `read_seconds`."""
        try:
            return read_body(answer, deadline=time.monotonic() + read_seconds)
        except Exception as error:
            raise self.translate(call, error) from error

    def refresh_credentials(self) -> None:
        """Read token, certificates and CA again before the next request."""
        with self._lock:
            self._api = None

    def close(self) -> None:
        """Close idle connections; the object can be used again."""
        with self._lock:
            api, self._api = self._api, None
        if api is not None:
            api.close()

    def translate(self, call: Call, error: Exception) -> KubeError:
        """Give the `KubeError` for an exception of the transport."""
        if isinstance(error, KubeError):
            return error
        failure = failure_from_exception(call, error, host=self.host or "the API server")
        if failure is None and "SSLError" in str(error)[:40]:
            # The client wraps TLS failures in its own exception, the class name on the first line.
            failure = KubeError(
                "DRA-API-TLS",
                f"{call}: TLS with {self.host} failed: {str(error)[:200]}",
                remedy="Check the cluster's CA certificate and this node's clock.",
            )
        if failure is None:
            failure = _configuration_failure(error)
        if failure.code == "DRA-API-TLS":
            self.refresh_credentials()
        return failure

    def _client(self, call: Call) -> Any:
        api = self._api
        if api is not None:
            return api
        with self._lock:
            if self._api is None:
                try:
                    self._api = _new_client(self._options)
                except Exception as error:
                    raise _configuration_failure(error, call=call) from error
            return self._api


def read_body(answer: Any, *, deadline: float) -> bytes:
    """Read a response to its end, so that its connection can be used again.

    Raises:
        TimeoutError: the server sends, but so slowly that the deadline passed.
    """
    parts: list[bytes] = []
    try:
        for part in answer.stream(_CHUNK):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError
    except BaseException:
        with suppress(Exception):
            answer.close()
        raise
    answer.release_conn()
    return b"".join(parts)


def lines_of(answer: Any) -> Iterator[bytes]:
    """Give the complete lines of a streamed response as they come."""
    rest = b""
    for part in answer.stream(_CHUNK):
        rest += part
        if b"\n" in part:
            *whole, rest = rest.split(b"\n")
            yield from (line for line in whole if line.strip())


def _new_client(options: KubeOptions) -> Any:
    with _IMPORTING, transport_alone():
        from kubernetes.client.api_client import ApiClient
        from kubernetes.client.configuration import Configuration
        from kubernetes.config import incluster_config  # noqa: F401  the loader of a pod's service account

    configuration = Configuration()
    _load(configuration, options)
    # We decide what is repeated: an update that is sent twice by a library is a conflict with ourselves.
    configuration.retries = False
    configuration.connection_pool_maxsize = options.connections
    configuration.keep_alive = True
    client = ApiClient(configuration)
    client.user_agent = options.user_agent
    return client


def _load(configuration: Any, options: KubeOptions, environment: Mapping[str, str] = os.environ) -> None:
    if options.kubeconfig:
        _load_kubeconfig(configuration, options.kubeconfig, options.context)
        return
    if environment.get("KUBERNETES_SERVICE_HOST"):
        loader = sys.modules["kubernetes.config.incluster_config"]
        loader.InClusterConfigLoader(
            token_filename=str(options.service_account_dir / "token"),
            cert_filename=str(options.service_account_dir / "ca.crt"),
            environ=environment,
        ).load_and_set(configuration)
        return
    path = environment.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    _load_kubeconfig(configuration, path, options.context)


def _load_kubeconfig(configuration: Any, path: str, context: str | None) -> None:
    with _IMPORTING, transport_alone(), without_oauth():
        from kubernetes.config import kube_config

    from dra.kube import kubeconfig

    # The loader's own message does not say which file.
    files = [file for part in path.split(os.pathsep) if part and (file := Path(part).expanduser()).is_file()]
    if not files:
        raise FileNotFoundError(f"there is no kubeconfig {path}, and no service account of a pod")
    for file in files:
        kubeconfig.check_file(file)
    kube_config.logging = kubeconfig.LOADER_LOG
    with kubeconfig.LOADER_LOG.listening() as complaints:
        try:
            kube_config.load_kube_config(
                config_file=path, context=context, client_configuration=configuration, persist_config=False
            )
        except Exception as error:
            named = type(error).__name__ == "ConfigException" or isinstance(error, OSError)
            reason = kubeconfig.without_objects(str(error) if named else repr(error))
            raise kubeconfig.unusable(path, reason) from error
    if complaints:
        # A command for credentials that fails; without them nothing but a 401 would come.
        raise kubeconfig.unusable(path, "; ".join(complaints))
    kubeconfig.check_server(path, str(configuration.host))


def _configuration_failure(error: Exception, *, call: Call | None = None) -> KubeError:
    prefix = f"{call}: " if call else ""
    if isinstance(error, KubeError):
        return KubeError(
            error.code, f"{prefix}{error.message}", remedy=error.remedy, retryable=error.retryable
        )
    if type(error).__name__ == "ConfigException" or isinstance(error, (OSError, ValueError)):
        return KubeError(
            "DRA-API-CREDENTIALS",
            f"{prefix}cannot load the configuration for the API server: {error}",
            remedy="Run in a pod with a service account, or give --kubeconfig a readable file.",
        )
    return KubeError(
        "DRA-API-INTERNAL", f"{prefix}{type(error).__name__}: {error}", remedy="Report this as a bug."
    )
