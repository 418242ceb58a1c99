"""What the user wrote for a request: a claim, a line such as `nvidia.com/gpu: 1`, or a part of a GPU. Remedies follow it.

Who writes `nvidia.com/gpu: 0.2` never sees the claim and the selector that the webhook and the fleet make of it, and
who writes `nvidia.com/gpu: 1` never sees the scheduler's claim: "correct the selector" helps neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dra.allocator.extended import extended_requests
from dra.api.fractions import CLAIM_PREFIX, Ask, asks_of_pod
from dra.diagnose.explain.cluster import Json
from dra.errors import ClaimError


@dataclass(frozen=True, slots=True)
class Written:
    """How a request came about.

    Attributes:
        line: `nvidia.com/gpu: 1 of container main`; empty where the user wrote a claim.
        resource: the extended resource, where the scheduler makes the claim of it.
        ask: the part of a GPU, where the webhook made a claim of it.
        template: the template that the claim is made from; empty where there is none.
    """

    line: str = ""
    resource: str = ""
    ask: Ask | None = None
    template: str = ""

    @property
    def how(self) -> str:
        """Say how the request is changed, as the end of a sentence."""
        if self.line:
            return ", and make the pod anew"
        if self.template:
            return f", in template {self.template}; then make the pod anew"
        return "; a claim cannot be changed, so make it and the pod anew"


class WrittenBy:
    """What a pod's user wrote, by the claim and the request that came of it."""

    def __init__(self, pod: Json | None, classes: Mapping[str, str]) -> None:
        """Read a pod, None for a claim that no pod uses; `classes` is the DeviceClass of each extended resource."""
        self._claims: dict[str, Written] = {}
        self._requests: dict[str, Written] = {}
        if pod is None:
            return
        self._read_claims(pod)
        requests, mappings = extended_requests(pod, classes)
        for request, mapping in zip(requests, mappings, strict=True):
            resource, count = mapping["resourceName"], request["exactly"]["count"]
            line = f"{resource}: {count} of container {mapping['containerName']}"
            self._requests[request["name"]] = Written(line, resource)

    def _read_claims(self, pod: Json) -> None:
        metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
        try:
            asks = asks_of_pod(metadata.get("annotations") or {})
        except ClaimError:
            asks = {}
        made = {
            item["name"]: item.get("resourceClaimName") for item in status.get("resourceClaimStatuses") or []
        }
        for entry in spec.get("resourceClaims") or []:
            template = str(entry.get("resourceClaimTemplateName") or "")
            name = entry.get("resourceClaimName") or made.get(entry["name"]) or entry["name"]
            ask = asks.get(template) if entry["name"].startswith(CLAIM_PREFIX) else None
            line = f"{asked(ask)}{_containers(spec, entry['name'])}" if ask else ""
            self._claims[name] = Written(line, ask=ask, template=template)

    def of(self, claim: str, request: str) -> Written:
        """Give what the user wrote for a request."""
        # The scheduler's claim has a name of its own, if it has one at all yet; its requests are told by theirs.
        return self._claims.get(claim) or self._requests.get(request) or Written()


def asked(ask: Ask) -> str:
    """Write an amount the short way, as users do."""
    parts = [f"nvidia.com/gpu: {ask.shares / ask.of:.4g}"] if ask.shares else []
    parts += [f"nvidia.com/gpumem: {ask.memory_mib}"] if ask.memory_mib else []
    return " with ".join(parts)


def _containers(spec: Json, claim: str) -> str:
    names = [
        container["name"]
        for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
        if any(item.get("name") == claim for item in (container.get("resources") or {}).get("claims") or [])
    ]
    return f" of container {' and '.join(names)}" if names else ""
