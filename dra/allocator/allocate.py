"""The allocator: slices, classes and what is held in; allocations for the claims of a pod on a node out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dra.allocator.capacity import consumed, fits_whole, has_room
from dra.allocator.constraints import Constraint, make_constraint
from dra.allocator.model import (
    AllocatedState,
    AllocatorError,
    CompileSelector,
    Device,
    DeviceId,
    Features,
    Selector,
)
from dra.allocator.pools import PoolIndex
from dra.allocator.requests import ClaimSearch, Request, RequestReader
from dra.allocator.result import make_allocation
from dra.allocator.search import Search
from dra.errors import DraError
from dra.values import Quantity


class Allocator:
    """Decides as the structured allocator of Kubernetes 1.36 does.

    Made once for a state of the cluster; `allocate` may be called for many nodes. Selectors are compiled once
    and their verdicts are kept by device, so that a second node or claim does not pay again. Not thread-safe.
    """

    def __init__(
        self,
        *,
        slices: Iterable[Mapping[str, Any]],
        classes: Iterable[Mapping[str, Any]],
        allocated: AllocatedState,
        compile_selector: CompileSelector,
        features: Features | None = None,
        max_steps: int = 0,
    ) -> None:
        """Read the state once.

        Args:
            slices: v1 ResourceSlices.
            classes: v1 DeviceClasses.
            allocated: what claims hold already.
            compile_selector: the CEL compiler.
            features: the gates.
            max_steps: devices that one `allocate` may try before it gives up with SearchLimitError; 0 is no limit.
        """
        self.features = features or Features()
        self.allocated = allocated
        self.pools = PoolIndex(slices)
        # Devices tried so far, over all calls.
        self.steps = 0
        self._max_steps = max_steps
        self._classes = {item["metadata"]["name"]: item for item in classes}
        self._compile = compile_selector
        self._selectors: dict[str, Selector] = {}
        self._verdicts: dict[tuple[str, ...], dict[DeviceId, bool]] = {}
        self._claim_name = ""

    def allocate(
        self, node: Mapping[str, Any], claims: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Give the v1 AllocationResult of each claim, in their order; None if they do not fit on this node.

        Raises:
            AllocatorError: where the scheduler's allocator returns an error.
            SearchLimitError: `max_steps` were not enough.
        """
        self._claim_name = ""
        pools = self.pools.for_node(node, self.features)
        reader = RequestReader(
            features=self.features,
            classes=self._classes,
            compile_selector=self._compile,
            pools=pools,
            matches=self._matches,
            fits=self._fits,
        )
        read: list[ClaimSearch] = []
        for claim in claims:
            self._claim_name = claim["metadata"]["name"]
            read.append(reader.read(claim))
        constraints = [self._constraints(claim) for claim in claims]
        search = Search(
            features=self.features,
            pools=pools,
            claims=read,
            constraints=constraints,
            allocated=self.allocated,
            matches=self._matches,
            max_steps=self._max_steps,
        )
        try:
            found = search.run()
        finally:
            self.steps += search.steps
        if found is None:
            if any(pool.invalid for pool in pools):
                raise AllocatorError("invalid resource pools were encountered", on_node_only=True)
            return None
        name = node.get("metadata", {}).get("name", "")
        return [
            make_allocation(claim, chosen, node_name=name, features=self.features)
            for claim, chosen in zip(read, found, strict=True)
        ]

    def _constraints(self, claim: Mapping[str, Any]) -> list[Constraint]:
        made: list[Constraint] = []
        raws = ((claim.get("spec") or {}).get("devices") or {}).get("constraints") or []
        for number, raw in enumerate(raws):
            constraint = make_constraint(
                raw, lists=self.features.list_type_attributes, distinct=self.features.consumable_capacity
            )
            if constraint is None:
                raise AllocatorError(
                    f"claim {claim['metadata']['name']}, constraint #{number}: empty constraint"
                    " (unsupported constraint type?)"
                )
            made.append(constraint)
        return made

    def _fits(self, request: Request, device: Device) -> bool:
        if not self.features.consumable_capacity:
            return True
        if device.multi:
            takes = consumed(device, request.asked)
            return takes is not None and has_room(device, takes, self.allocated.capacity.get(device.id, {}))
        return fits_whole(device, request.asked)

    def _matches(self, request: Request, device: Device) -> bool:
        known = self._verdicts.setdefault(request.key, {})
        verdict = known.get(device.id)
        if verdict is None:
            verdict = known[device.id] = self._evaluate(request, device)
        return verdict

    def _evaluate(self, request: Request, device: Device) -> bool:
        class_selectors = (request.class_raw.get("spec") or {}).get("selectors") or []
        for number, raw in enumerate(class_selectors):
            where = f"class {request.class_name}: selector #{number}"
            if not self._one(raw["cel"]["expression"], device, where):
                return False
        for number, expression in enumerate(request.key[1:]):
            if not self._one(expression, device, f"claim {self._claim_name}: selector #{number}"):
                return False
        return True

    def _one(self, expression: str, device: Device, where: str) -> bool:
        selector = self._selectors.get(expression)
        if selector is None:
            try:
                selector = self._selectors[expression] = self._compile(expression)
            except DraError as error:
                raise AllocatorError(f"{where}: CEL compile error: {error.message}") from error
        try:
            return selector.evaluate(device.raw, driver=device.id.driver)
        except DraError as error:
            raise AllocatorError(f"{where}: CEL runtime error: {error.message}") from error


def allocated_state(claims: Iterable[Mapping[str, Any]]) -> AllocatedState:
    """Give what the allocated ones of `claims` hold; admin access holds nothing."""
    devices: set[DeviceId] = set()
    shared: set[DeviceId] = set()
    capacity: dict[DeviceId, dict[str, int]] = {}
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or []:
            if result.get("adminAccess"):
                continue
            device = DeviceId(result["driver"], result["pool"], result["device"])
            if not result.get("shareID"):
                devices.add(device)
                continue
            shared.add(device)
            used = capacity.setdefault(device, {})
            for name, amount in (result.get("consumedCapacity") or {}).items():
                used[name] = used.get(name, 0) + Quantity.of(amount).nano
    return AllocatedState(frozenset(devices), capacity, frozenset(shared))
