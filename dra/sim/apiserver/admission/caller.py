"""Calls a webhook over HTTPS: where it is, whom to trust, what went wrong.

A service has no address of its own here. It is looked for, in this order, among those registered with `Services.register`,
in the annotation `sim.gpudra.dev/address` of the Service object (`127.0.0.1:9443`), and in the Endpoints of its name.

Source: k8s.io/apiserver/pkg/util/webhook and client-go's error texts.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from base64 import b64decode
from collections.abc import Callable
from functools import lru_cache
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
ADDRESS_ANNOTATION = "sim.gpudra.dev/address"
Read = Callable[[str, tuple[str, str]], "Json | None"]


class WebhookUnreachable(Exception):  # noqa: N818 - the text is the outcome
    """A webhook could not be asked, or its answer is none."""


class Services:
    """Where the simulated services really listen. Safe for threads.

    Args:
        read: gives an object by the key of its kind, and namespace and name.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[str, int]] = {}

    def register(self, namespace: str, name: str, host: str, port: int) -> None:
        """Say where a service listens, whatever port its clients name."""
        with self._lock:
            self._known[namespace, name] = (host, port)

    def forget(self, namespace: str, name: str) -> None:
        """Take back `register`."""
        with self._lock:
            self._known.pop((namespace, name), None)

    def address(self, namespace: str, name: str, port: int) -> tuple[str, int]:
        """Give host and port of a service.

        Raises:
            WebhookUnreachable: there is none.
        """
        with self._lock:
            known = self._known.get((namespace, name))
        if known is not None:
            return known
        service = self._read("/services", (namespace, name))
        if service is None:
            raise WebhookUnreachable(f'service "{name}" not found')
        noted = (service["metadata"].get("annotations") or {}).get(ADDRESS_ANNOTATION, "")
        host, colon, text = noted.rpartition(":")
        if colon and text.isdecimal():
            return host.strip("[]"), int(text)
        endpoints = self._read("/endpoints", (namespace, name)) or {}
        for subset in endpoints.get("subsets") or []:
            for place in subset.get("addresses") or []:
                ports = [entry.get("port") for entry in subset.get("ports") or []]
                return str(place["ip"]), int(ports[0] if ports else port)
        raise WebhookUnreachable(f'no endpoints available for service "{name}"')


@lru_cache(maxsize=64)
def _context(bundle: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=b64decode(bundle).decode() if bundle else None)
    # As the real server: no demands on extensions of the authority, and any certificate of the bundle is a root.
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", ssl.VerifyFlags(0))
    context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", ssl.VerifyFlags(0))
    return context


def ask(services: Services, config: Json, review: Json) -> Json:
    """Send an AdmissionReview and give the answer's `response`.

    Raises:
        WebhookUnreachable: no connection, no trust, no time, no answer that is one.
    """
    seconds = int(config.get("timeoutSeconds") or 10)
    client = config.get("clientConfig") or {}
    url = _url(client)
    parts = urlsplit(url)
    shown = f"{url}{'&' if parts.query else '?'}timeout={seconds}s"
    try:
        status, answer = _post(services, client, shown, json.dumps(review).encode(), seconds)
    except WebhookUnreachable as error:
        raise WebhookUnreachable(f'failed to call webhook: Post "{shown}": {error}') from error
    except (OSError, HTTPException, ValueError) as error:
        raise WebhookUnreachable(f'failed to call webhook: Post "{shown}": {_words(error)}') from error
    if status != 200:
        raise WebhookUnreachable(f"failed to call webhook: {_refusal(status, answer)}")
    return _response(answer, str(review["request"]["uid"]))


def _url(client: Json) -> str:
    if client.get("url"):
        return str(client["url"])
    service = client.get("service") or {}
    port, path = int(service.get("port") or 443), str(service.get("path") or "").lstrip("/")
    return f"https://{service.get('name')}.{service.get('namespace')}.svc:{port}/{path}"


def _post(services: Services, client: Json, url: str, body: bytes, seconds: int) -> tuple[int, bytes]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    service = None if client.get("url") else client.get("service") or {}
    if service is not None:
        address = services.address(service.get("namespace", ""), service.get("name", ""), parts.port or 443)
    else:
        address = (host, parts.port or 443)
    raw = socket.create_connection(address, timeout=seconds)
    try:
        secured = _context(client.get("caBundle") or "").wrap_socket(raw, server_hostname=host)
    except BaseException:
        raw.close()
        raise
    connection = HTTPConnection(host, parts.port or 443, timeout=seconds)
    connection.sock = secured
    try:
        target = parts.path or "/"
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "User-Agent": "kube-apiserver-admission",
        }
        connection.request("POST", f"{target}?{parts.query}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _words(error: Exception) -> str:
    """Give a failure as the real server words it, where that is known."""
    match error:
        case TimeoutError():
            return "context deadline exceeded"
        case ConnectionRefusedError():
            return "dial tcp: connect: connection refused"
        case ssl.SSLCertVerificationError():
            return f"tls: failed to verify certificate: x509: {error.verify_message}"
        case socket.gaierror():
            return "dial tcp: lookup failed: no such host"
        case ConnectionError():
            return "EOF"
    return str(error)


def _refusal(status: int, answer: bytes) -> str:
    """Give a status that is no success in the words of client-go."""
    known = {
        400: "the server rejected our request for an unknown reason",
        404: "the server could not find the requested resource",
        503: "the server is currently unable to handle the request",
        504: "the server was unable to return a response in the time allotted, but may still be processing the request",
    }
    if status in known:
        return known[status]
    text = json.dumps(answer.decode("utf-8", "replace").strip()[:2048])
    if status < 500:
        return f"the server responded with the status code {status} but did not return more information"
    return f"an error on the server ({text}) has prevented the request from succeeding"


def _response(answer: bytes, uid: str) -> Json:
    try:
        review = json.loads(answer)
    except ValueError as error:
        why = f"couldn't get version/kind; json parse error: {error}"
        raise WebhookUnreachable(f"failed to call webhook: {why}") from error
    version, kind = (
        (review.get("apiVersion"), review.get("kind")) if isinstance(review, dict) else (None, None)
    )
    if (version, kind) != ("admission.k8s.io/v1", "AdmissionReview"):
        short = str(version or "").rpartition("/")[2]
        raise WebhookUnreachable(
            f"failed to call webhook: converting ({short}.{kind or ''}) to (v1.AdmissionReview): unknown conversion"
        )
    response = review.get("response")
    if not isinstance(response, dict):
        raise WebhookUnreachable("received invalid webhook response: webhook response was absent")
    if response.get("uid") != uid:
        raise WebhookUnreachable(
            f'received invalid webhook response: expected response.uid="{uid}", got "{response.get("uid") or ""}"'
        )
    return response
