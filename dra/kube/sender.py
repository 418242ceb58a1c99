"""One request to the API server: its pace, the API version that it is sent in, and whether it is sent once more."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dra.api.versions import GROUP, from_v1
from dra.errors import KubeError
from dra.kube.answers import bad_answer
from dra.kube.clock import Clock, TokenBucket
from dra.kube.connection import Connection
from dra.kube.failures import Call
from dra.kube.negotiation import Negotiation
from dra.kube.resources import Resource

# For calls whose caller has no deadline of its own.
DEFAULT_TIMEOUT_SECONDS = 10.0

Json = dict[str, Any]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Target:
    """What a call is about, with the verb as RBAC has it."""

    verb: str
    resource: Resource
    name: str | None
    namespace: str | None
    subresource: str = ""
    shown_name: str = ""

    @property
    def call(self) -> Call:
        plural = f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural
        name = self.name or self.shown_name
        return Call(self.verb, plural, self.resource.group, name, self.namespace or "")


class Sender:
    """Sends requests. Thread-safe.

    Args:
        limit: what requests wait for; None: for nothing.
        before_write: called right before each request that changes something is sent, after every wait; what it raises
            is raised in place of sending.
        negotiation: what is known of the server's versions; learnt anew, if not given.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        clock: Clock,
        limit: TokenBucket | None = None,
        before_write: Callable[[], None] = lambda: None,
        negotiation: Negotiation | None = None,
    ) -> None:
        self._connection, self._clock = connection, clock
        self._limit, self._before_write = limit, before_write
        self.negotiation = negotiation or Negotiation(self._get_json, clock=clock)

    def with_limit(self, limit: TokenBucket | None) -> Sender:
        """Give this one with a limit of its own."""
        return Sender(
            self._connection, clock=self._clock, limit=limit,
            before_write=self._before_write, negotiation=self.negotiation,
        )  # fmt: skip

    def fenced(self, check: Callable[[], None]) -> Sender:
        """Give this one with `check` as its `before_write`."""
        return Sender(
            self._connection, clock=self._clock, limit=self._limit,
            before_write=check, negotiation=self.negotiation,
        )  # fmt: skip

    def request(
        self,
        target: Target,
        method: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        convert: bool = True,
        needs_version: bool = False,
        free: bool = False,
        timeout_seconds: float,
    ) -> tuple[Json, str]:
        """Send, and give the answer's JSON with the API version it was asked in."""
        resource = target.resource
        if not free:
            self._pace()

        def sending(version: str) -> tuple[Json, str]:
            sent = body
            if convert and isinstance(body, Mapping):
                sent = _sent(resource, body, version, needs_version=needs_version)
            path = resource.path(
                version=version, namespace=target.namespace, name=target.name, subresource=target.subresource
            )
            answer = self.exchange(
                target.call,
                method,
                path,
                query=list((query or {}).items()),
                body=sent,
                content_type=content_type,
                read_seconds=timeout_seconds,
            )
            return answer, version

        return self.negotiated(resource, sending)

    def negotiated(self, resource: Resource, act: Callable[[str], Answer]) -> Answer:
        """Do `act(version)`; if the server stopped serving that version, once more with another."""
        version = self.negotiation.version_for(resource)
        try:
            return act(version)
        except KubeError as error:
            if error.code != "DRA-API-NOT-SERVED" or len(resource.versions) == 1:
                raise
            self.negotiation.forget()
            other = self.negotiation.version_for(resource)
            if other == version:
                raise
            return act(other)

    def exchange(self, call: Call, method: str, path: str, **options: Any) -> Json:
        """One round trip, repeated once where that is safe: stale token, kept connection that was closed."""
        try:
            return self._round_trip(call, method, path, **options)
        except KubeError as error:
            if error.code == "DRA-API-UNAUTHORIZED":
                self._connection.refresh_credentials()
            elif not (error.code == "DRA-API-INTERRUPTED" and method == "GET"):
                raise
        return self._round_trip(call, method, path, **options)

    def _round_trip(self, call: Call, method: str, path: str, *, read_seconds: float, **options: Any) -> Json:
        if method != "GET":
            self._before_write()
        answer = self._connection.send(call, method, path, read_seconds=read_seconds, **options)
        text = self._connection.read(call, answer, read_seconds=read_seconds)
        try:
            document = json.loads(text)
        except ValueError as error:
            raise _no_object(call, text) from error
        if not isinstance(document, dict):
            raise _no_object(call, text)
        return document

    def _get_json(self, call: Call, path: str) -> Json:
        return self.exchange(call, "GET", path, read_seconds=DEFAULT_TIMEOUT_SECONDS)

    def _pace(self) -> None:
        if self._limit is not None and (seconds := self._limit.take()) > 0:
            self._clock.wait(threading.Event(), seconds)


def _sent(resource: Resource, body: Mapping[str, Any], version: str, *, needs_version: bool) -> Json:
    document = dict(body)
    if needs_version or "apiVersion" in document:
        document["apiVersion"] = resource.api_version(version)
    if resource.group == GROUP:
        return from_v1(document, version=version, kind=resource.kind)
    return document


def _no_object(call: Call, text: bytes) -> KubeError:
    shown = text[:80].decode("utf-8", "replace")
    return bad_answer(call, f"the answer is not a JSON object: {shown!r}")
