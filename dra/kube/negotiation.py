"""Which version of an API group to speak with this server, and which Kubernetes it is."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from dra.errors import KubeError
from dra.kube.clock import Clock
from dra.kube.failures import Call
from dra.kube.resources import Resource

# An upgraded server serves new versions without dropping the old ones at once: look again now and then.
NEGOTIATED_SECONDS = 600.0
# A server that serves nothing that we know may only be starting, or a proxy spoke in its place.
UNSERVED_SECONDS = 2.0
# What a 404 on the group itself may mean.
_UNSERVED = frozenset({"DRA-API-NOT-SERVED", "DRA-API-NOT-FOUND", "DRA-API-OTHER-NOT-FOUND"})


class Negotiation:
    """Remembers what the server serves. Thread-safe; `fetch` does a GET and gives parsed JSON."""

    def __init__(self, fetch: Callable[[Call, str], dict[str, Any]], *, clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._served: dict[str, tuple[float, frozenset[str]]] = {}
        self._server: tuple[float, tuple[int, int], str] | None = None

    def version_for(self, resource: Resource) -> str:
        """Give the best version that both sides know.

        Raises:
            KubeError: DRA-API-NOT-SERVED, or why the server could not be asked.
        """
        if len(resource.versions) == 1:
            return resource.versions[0]
        served = self._served_versions(resource)
        for version in resource.versions:
            if version in served:
                return version
        raise KubeError(
            "DRA-API-NOT-SERVED",
            f"the API server does not serve {resource.group} at the moment, in none of the versions "
            + ", ".join(resource.versions)
            + (f" (it has {', '.join(sorted(served))})" if served else ""),
            remedy="It is tried again. If this stays, use Kubernetes 1.34 or newer, or switch on the gate DynamicResourceAllocation and "
            f"--runtime-config={resource.group}/v1beta1=true on the API server.",
            status=404,
            reason="NotFound",
        )

    def forget(self) -> None:
        """Ask again at the next call: something that was served is not any more, or the server changed."""
        with self._lock:
            self._served.clear()
            self._server = None

    def server_version(self, *, refresh: bool = False) -> tuple[int, int]:
        """Give (major, minor) of the server."""
        return self._server_facts(refresh=refresh)[1]

    def git_version(self, *, refresh: bool = False) -> str:
        """Give the server's full version, for example `v1.36.2`."""
        return self._server_facts(refresh=refresh)[2]

    def _server_facts(self, *, refresh: bool) -> tuple[float, tuple[int, int], str]:
        known = self._server
        if known is not None and not refresh and self._clock.now() - known[0] < NEGOTIATED_SECONDS:
            return known
        document = self._fetch(Call("get", "version"), "/version")
        facts = (self._clock.now(), parse_version(document), str(document.get("gitVersion") or ""))
        self._server = facts
        return facts

    def _served_versions(self, resource: Resource) -> frozenset[str]:
        group = resource.group
        known = self._served.get(group)
        if known is not None:
            good = not known[1].isdisjoint(resource.versions)
            if self._clock.now() - known[0] < (NEGOTIATED_SECONDS if good else UNSERVED_SECONDS):
                return known[1]
        try:
            document = self._fetch(Call("get", "apigroup", name=group), f"/apis/{group}")
            entries = _entries(document, group)
        except KubeError as error:
            if error.code not in _UNSERVED:
                raise
            entries = []
        served = frozenset(str(entry.get("version")) for entry in entries if isinstance(entry, dict))
        with self._lock:
            self._served[group] = (self._clock.now(), served)
        return served


def _entries(document: dict[str, Any], group: str) -> list[Any]:
    """Give the versions that an APIGroup lists."""
    entries = document.get("versions")
    if document.get("kind") == "APIGroup" and document.get("name") == group and isinstance(entries, list):
        return entries
    raise KubeError(
        "DRA-API-BAD-ANSWER",
        f"/apis/{group}: the answer is not the APIGroup {group} (its kind is {document.get('kind')!r})",
        remedy="Check that the address is that of a Kubernetes API server and that no proxy stands in between.",
        status=200,
    )


def parse_version(document: dict[str, Any]) -> tuple[int, int]:
    """Read major and minor from `/version`; vendors write minors such as `34+`.

    Raises:
        KubeError: DRA-API-BAD-ANSWER.
    """
    numbers = []
    for key in ("major", "minor"):
        match = re.match(r"\d+", str(document.get(key) or ""))
        if match is None:
            raise KubeError(
                "DRA-API-BAD-ANSWER",
                f"/version says {key}={document.get(key)!r}, which is not a number",
                remedy="Check that the address is that of a Kubernetes API server.",
            )
        numbers.append(int(match[0]))
    return numbers[0], numbers[1]
