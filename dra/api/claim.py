"""A ResourceClaim as a driver sees it: who it is, what was allocated, and which configuration applies.

Pure: takes the JSON of any served version of resource.k8s.io (the allocation has the same shape in v1, v1beta2
and v1beta1) and gives frozen values. Source: resource.k8s.io/v1 ResourceClaim.status.allocation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

from dra.values import Quantity

ClaimUid = NewType("ClaimUid", str)


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """What the kubelet sends: enough to fetch a claim and to be sure that it is the same one."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        """Give `namespace/name`, as users write it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """One entry of `status.allocation.devices.results`.

    `request` is `name` or, for a `firstAvailable` request, `name/subrequest`.
    """

    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = None
    admin_access: bool = False
    consumed_capacity: Mapping[str, Quantity] = field(default_factory=dict)

    @property
    def request_name(self) -> str:
        """The base name of the request, which the kubelet compares with a container's."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class OpaqueConfig:
    """One entry of `status.allocation.devices.config` with opaque parameters."""

    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...]
    driver: str
    parameters: Mapping[str, Any]
