"""Requests of a claim, checked and resolved before the search.

Source: structured allocator, phase 3: every fault of a request is an error of the whole scheduling attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.capacity import requested
from dra.allocator.model import (
    MAX_RESULTS,
    AllocatorError,
    CompileSelector,
    Device,
    Features,
    Pool,
    Selector,
)


@dataclass(slots=True, eq=False)
class Request:
    """One request or sub-request, ready for the search.

    `name` is `base` or `base/sub`. `count` is how many devices it needs; for mode All `all_devices` are those.
    `key` is equal for requests that look for the same devices, so that verdicts are shared.
    """

    name: str
    class_name: str
    class_raw: Mapping[str, Any]
    count: int
    admin: bool
    tolerations: tuple[Mapping[str, Any], ...]
    selectors: tuple[Selector, ...]
    key: tuple[str, ...]
    asked: dict[str, int]
    all_devices: list[Device] | None = None


@dataclass(slots=True)
class ClaimSearch:
    """A claim with its requests; each entry of `requests` has one alternative, or those of `firstAvailable`."""

    raw: Mapping[str, Any]
    name: str
    requests: list[list[Request]] = field(default_factory=list)


# Tells whether a device matches a request's selectors; may raise AllocatorError.
Matches = Callable[[Request, Device], bool]
# Tells whether a device could ever give what a request asks for.
Fits = Callable[[Request, Device], bool]


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests against classes, gates and the node's pools."""

    features: Features
    classes: Mapping[str, Mapping[str, Any]]
    compile_selector: CompileSelector
    pools: Sequence[Pool]
    matches: Matches
    fits: Fits

    def read(self, claim: Mapping[str, Any]) -> ClaimSearch:
        """Check a claim and give it in searchable form.

        Raises:
            AllocatorError: the texts are those of the scheduler.
        """
        name = claim["metadata"]["name"]
        result = ClaimSearch(claim, name)
        devices = (claim.get("spec") or {}).get("devices") or {}
        total = 0
        for raw in devices.get("requests") or []:
            alternatives = raw.get("firstAvailable") or []
            if alternatives:
                if not self.features.prioritized_list:
                    raise AllocatorError(
                        f"claim {name}, request {raw['name']}: has subrequests, but the DRAPrioritizedList feature is disabled"
                    )
                read = [
                    self._request(
                        sub, f"{raw['name']}/{sub['name']}", f"claim {name}, subrequest {sub['name']}"
                    )
                    for sub in alternatives
                ]
            else:
                where = f"claim {name}, request {raw['name']}"
                read = [self._request(raw.get("exactly") or {}, raw["name"], where)]
            total += min(request.count for request in read)
            result.requests.append(read)
        return result if total <= MAX_RESULTS else _too_many(name, total)

    def _request(self, raw: Mapping[str, Any], name: str, where: str) -> Request:
        class_name = raw.get("deviceClassName") or ""
        if not class_name:
            raise AllocatorError(f"{where}: missing device class name (unsupported request type?)")
        class_raw = self.classes.get(class_name)
        if class_raw is None:
            raise AllocatorError(
                f'{where}: could not retrieve device class {class_name}: "not found" not found'
            )
        expressions = raw.get("selectors") or []
        for index, selector in enumerate(expressions):
            if not (selector.get("cel") or {}).get("expression"):
                raise AllocatorError(
                    f"{where}, selector #{index}: CEL expression empty (unsupported selector type?)"
                )
        if raw.get("capacity") and not self.features.consumable_capacity:
            raise AllocatorError(
                f"{where}: has capacity requests, but the DRAConsumableCapacity feature is disabled"
            )
        admin = bool(raw.get("adminAccess"))
        if admin and not self.features.admin_access:
            raise AllocatorError(f"{where}: admin access is requested, but the feature is disabled")
        request = Request(
            name=name,
            class_name=class_name,
            class_raw=class_raw,
            count=raw.get("count") or 1,
            admin=admin,
            tolerations=tuple(raw.get("tolerations") or ()),
            selectors=(),
            key=(class_name, *[item["cel"]["expression"] for item in expressions]),
            asked=requested(raw),
        )
        mode = raw.get("allocationMode") or "ExactCount"
        if mode == "All":
            request.all_devices = self._all_devices(request, where)
            request.count = len(request.all_devices)
        elif mode != "ExactCount":
            raise AllocatorError(f"{where}: unsupported count mode {mode}")
        return request

    def _all_devices(self, request: Request, where: str) -> list[Device]:
        found: list[Device] = []
        for pool in self.pools:
            if pool.incomplete:
                raise AllocatorError(
                    f"{where}: asks for all devices, but resource pool {pool} is currently being updated"
                )
            if pool.invalid:
                raise AllocatorError(
                    f"{where}: asks for all devices, but resource pool {pool} is currently invalid"
                )
            found += [
                device
                for device in pool.devices
                if self.matches(request, device) and self.fits(request, device)
            ]
        return found


def _too_many(name: str, total: int) -> ClaimSearch:
    raise AllocatorError(
        f"claim {name}: number of requested devices {total} exceeds the claim limit of {MAX_RESULTS}"
    )
