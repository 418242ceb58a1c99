"""The search: claim by claim, request by request, device by device; the first whole solution wins.

Deterministic first fit with back-tracking, as the structured allocator of Kubernetes 1.36 ("incubating") does
it. Devices of one request are taken in rising position, so that combinations and not permutations are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dra.allocator.capacity import consumed, fits_whole
from dra.allocator.constraints import Constraint
from dra.allocator.model import (
    MAX_RESULTS,
    AllocatedState,
    AllocatorError,
    Device,
    DeviceId,
    Features,
    Pool,
    SearchLimitError,
)
from dra.allocator.pools import counters_left
from dra.allocator.requests import ClaimSearch, Matches, Request
from dra.allocator.taints import untolerated


@dataclass(slots=True)
class Chosen:
    """A device given to a request; `consumed` is None for a device that is not shared."""

    request: Request
    device: Device
    consumed: dict[str, int] | None


class _TooManyResults(Exception):  # noqa: N818
    """A branch needs more results than a claim may hold; another sub-request may need fewer."""


@dataclass(slots=True)
class Search:
    """One attempt on one node. `run` gives the devices for each claim, or None if they do not fit."""

    features: Features
    pools: Sequence[Pool]
    claims: Sequence[ClaimSearch]
    constraints: Sequence[Sequence[Constraint]]
    allocated: AllocatedState
    matches: Matches
    # Devices that may be tried; 0 is no limit.
    max_steps: int = 0
    steps: int = 0
    # Devices that this attempt gave out: how often, and for which claims.
    _taken: dict[DeviceId, list[int]] = field(default_factory=dict)
    _results: list[list[Chosen]] = field(default_factory=list)
    # What is left of each counter, computed when a pool's counters are first asked for.
    _counters: dict[tuple[str, str], dict[tuple[str, str], int]] = field(default_factory=dict)
    _capacity: dict[DeviceId, dict[str, int]] = field(default_factory=dict)
    _by_pool: dict[tuple[str, str], Pool] = field(default_factory=dict)

    def run(self) -> list[list[Chosen]] | None:
        """Search; raises AllocatorError where the scheduler's allocator returns an error."""
        self._results = [[] for _ in self.claims]
        self._by_pool = {(pool.driver, pool.name): pool for pool in self.pools}
        try:
            found = self._request(0, 0)
        except _TooManyResults:
            found = False
        return self._results if found else None

    def _request(self, claim: int, index: int) -> bool:
        """Satisfy the request `index` of `claim` and all that follows."""
        while claim < len(self.claims) and index >= len(self.claims[claim].requests):
            claim, index = claim + 1, 0
        if claim >= len(self.claims):
            return True
        alternatives = self.claims[claim].requests[index]
        if len(alternatives) == 1 and "/" not in alternatives[0].name:
            return self._alternative(claim, index, alternatives[0])
        too_many = 0
        for request in alternatives:
            try:
                if self._alternative(claim, index, request):
                    return True
            except _TooManyResults:
                too_many += 1
        if too_many == len(alternatives):
            # Whichever devices were chosen before, their number alone is in the way.
            raise _TooManyResults
        return False

    def _alternative(self, claim: int, index: int, request: Request) -> bool:
        if len(self._results[claim]) + request.count > MAX_RESULTS:
            raise _TooManyResults
        if request.all_devices is not None:
            # Mode All needs at least one device.
            return bool(request.all_devices) and self._all(claim, index, request, 0)
        return self._exact(claim, index, request, request.count, 0, 0)

    def _all(self, claim: int, index: int, request: Request, position: int) -> bool:
        devices = request.all_devices or []
        if position >= len(devices):
            return self._request(claim, index + 1)
        device = devices[position]
        if self._in_use(claim, request, device) or not self._take(claim, request, device, must=True):
            return False
        found = False
        try:
            found = self._all(claim, index, request, position + 1)
        finally:
            if not found:
                self._give_back(claim, request, device)
        return found

    def _exact(
        self, claim: int, index: int, request: Request, left: int, pool_index: int, start: int
    ) -> bool:
        if left == 0:
            return self._request(claim, index + 1)
        for number in range(pool_index, len(self.pools)):
            pool = self.pools[number]
            if pool.incomplete or pool.invalid:
                continue
            devices = pool.devices
            for position in range(start if number == pool_index else 0, len(devices)):
                device = devices[position]
                if self._in_use(claim, request, device) or not self.matches(request, device):
                    continue
                if not self._take(claim, request, device, must=False):
                    continue
                # A shared device may serve one request twice; any other comes once.
                following = position if device.multi and self.features.consumable_capacity else position + 1
                found = False
                try:
                    found = self._exact(claim, index, request, left - 1, number, following)
                finally:
                    if not found:
                        self._give_back(claim, request, device)
                if found:
                    return True
        return False

    def _in_use(self, claim: int, request: Request, device: Device) -> bool:
        taken = self._taken.get(device.id, ())
        if request.admin:
            # Others' use does not matter, but a claim gets a device once.
            return claim in taken
        if self._shares(device):
            return device.id in self.allocated.devices
        return bool(taken) or device.id in self.allocated.devices or device.id in self.allocated.shared

    def _shares(self, device: Device) -> bool:
        return device.multi and self.features.consumable_capacity

    def _take(self, claim: int, request: Request, device: Device, *, must: bool) -> bool:
        """Give a device to a request if counters, taints, constraints and capacity allow it."""
        self.steps += 1
        if self.max_steps and self.steps > self.max_steps:
            raise SearchLimitError(self.max_steps)
        takes: dict[str, int] | None = None
        if self.features.consumable_capacity:
            if device.multi:
                takes = consumed(device, request.asked)
                if takes is None or not self._has_capacity(device, takes):
                    return False
            elif not fits_whole(device, request.asked):
                return False
        counts = self._consumes_now(device)
        if counts and not self._has_counters(device):
            return False
        if self.features.device_taints and untolerated(device.taints, request.tolerations):
            return False
        constraints = self.constraints[claim]
        for number, constraint in enumerate(constraints):
            if constraint.add(request.name, device):
                continue
            for earlier in reversed(constraints[:number]):
                earlier.remove(request.name, device)
            if must:
                base = request.name.replace("/", ", subrequest ")
                raise AllocatorError(
                    f"claim {self.claims[claim].name}, request {base}: cannot add device {device.id}"
                    " because a claim constraint would not be satisfied"
                )
            return False
        if counts:
            left = self._pool_counters(device)
            for key, amount in device.consumes.items():
                left[key] -= amount
        if takes is not None:
            used = self._used(device)
            for name, amount in takes.items():
                used[name] = used.get(name, 0) + amount
        self._taken.setdefault(device.id, []).append(claim)
        self._results[claim].append(Chosen(request, device, takes))
        return True

    def _give_back(self, claim: int, request: Request, device: Device) -> None:
        chosen = self._results[claim].pop()
        self._taken[device.id].pop()
        if not self._taken[device.id]:
            del self._taken[device.id]
        if self._consumes_now(device):
            left = self._pool_counters(device)
            for key, amount in device.consumes.items():
                left[key] += amount
        if chosen.consumed is not None:
            used = self._used(device)
            for name, amount in chosen.consumed.items():
                used[name] -= amount
        for constraint in reversed(self.constraints[claim]):
            constraint.remove(request.name, device)

    def _consumes_now(self, device: Device) -> bool:
        """Tell whether taking the device costs counters: not when a share already holds it.

        An admin pays them again, as in Kubernetes up to 1.37 (its issue 140729): monitoring of a device in use needs
        counters that have room for it twice.
        """
        if not device.consumes or not self.features.partitionable_devices:
            return False
        return not self._shares(device) or not (
            device.id in self._taken
            or device.id in self.allocated.devices
            or device.id in self.allocated.shared
        )

    def _has_counters(self, device: Device) -> bool:
        left = self._pool_counters(device)
        return all(left.get(key, 0) >= amount for key, amount in device.consumes.items())

    def _pool_counters(self, device: Device) -> dict[tuple[str, str], int]:
        """Give what is left of the pool's counters after all that is allocated and still published."""
        key = (device.id.driver, device.id.pool)
        left = self._counters.get(key)
        if left is None:
            left = counters_left(self._by_pool[key], self.allocated)
            self._counters[key] = left
        return left

    def _used(self, device: Device) -> dict[str, int]:
        used = self._capacity.get(device.id)
        if used is None:
            used = self._capacity[device.id] = dict(self.allocated.capacity.get(device.id, {}))
        return used

    def _has_capacity(self, device: Device, takes: Mapping[str, int]) -> bool:
        from dra.values import Quantity

        used = self._used(device)
        capacities = device.raw.get("capacity") or {}
        return all(
            used.get(name, 0) + amount <= Quantity.of(capacities[name]["value"]).nano
            for name, amount in takes.items()
        )
