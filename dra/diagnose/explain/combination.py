"""Each request could be met alone, but not all together: is it a constraint, a device wanted twice, shared counters?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra.allocator.allocate import Allocator
from dra.allocator.model import AllocatorError, Pool, SearchLimitError
from dra.diagnose.explain.model import NodeReason, RequestOutcome
from dra.diagnose.explain.selectors import TooCostly

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Combination:
    """Claims that do not fit on a node together; `requests` say how far its devices got with each request alone."""

    allocator: Allocator
    node: Mapping[str, Any]
    claims: Sequence[Json]
    pools: Sequence[Pool]
    requests: Sequence[RequestOutcome]

    def fits(self, claims: Sequence[Json]) -> bool | None:
        """Tell whether other claims would fit; None where the search was too long or failed."""
        try:
            return self.allocator.allocate(self.node, claims) is not None
        except (AllocatorError, SearchLimitError, TooCostly):
            return None


def why_together(case: Combination) -> NodeReason:
    """Find the smallest change that would make the claims fit, and give it as the reason."""
    return _constraint(case) or _requests(case) or _claims(case) or _unknown()


def _constraint(case: Combination) -> NodeReason | None:
    for number, claim in enumerate(case.claims):
        constraints = _devices(claim).get("constraints") or []
        for index, constraint in enumerate(constraints):
            rest = [item for position, item in enumerate(constraints) if position != index]
            changed = [*case.claims[:number], _with(claim, constraints=rest), *case.claims[number + 1 :]]
            if case.fits(changed):
                return _constraint_reason(case, claim, constraint)
        if len(constraints) > 1:
            changed = [*case.claims[:number], _with(claim, constraints=[]), *case.claims[number + 1 :]]
            if case.fits(changed):
                names = ", ".join(_attribute(item) for item in constraints)
                text = f"no set of devices meets the constraints of claim {_name(claim)} together ({names})"
                return NodeReason("constraint", _name(claim), "", text)
    return None


def _constraint_reason(case: Combination, claim: Json, constraint: Json) -> NodeReason:
    name = _attribute(constraint)
    kind = "matchAttribute" if constraint.get("matchAttribute") else "distinctAttribute"
    which = f" of requests {', '.join(constraint['requests'])}" if constraint.get("requests") else ""
    values = _free_values(case, claim, name)
    seen = ", ".join(f"{value} ×{count}" for value, count in sorted(values.items())[:8])
    text = f"{kind} {name}{which} cannot be met by the free devices"
    others = "have one value in common" if kind == "matchAttribute" else "have other values"
    held = any(item.stage == "held" for request in case.requests for item in request.devices)
    remedy = "Relax the constraint" + (f", or wait until devices that {others} are free." if held else ".")
    return NodeReason("constraint", _name(claim), "", f"{text}; they have {seen}" if seen else text, remedy)


def _free_values(case: Combination, claim: Json, name: str) -> Counter[str]:
    """Count the values of an attribute over the devices that are free for the claim."""
    free = {
        item.device
        for request in case.requests
        if request.claim == _name(claim)
        for item in request.devices
        if item.stage == "free"
    }
    domain, _, identifier = name.rpartition("/")
    found: Counter[str] = Counter()
    for pool in case.pools:
        for device in pool.devices:
            if device.id in free:
                attributes = device.raw.get("attributes") or {}
                own = attributes.get(identifier) if domain == device.id.driver else None
                value = attributes.get(name) or own
                found[str(next(iter(value.values()))) if value else "nothing (attribute missing)"] += 1
    return found


def _requests(case: Combination) -> NodeReason | None:
    """Find the first request that does not fit beside those before it."""
    for number, claim in enumerate(case.claims):
        requests = _devices(claim).get("requests") or []
        for end in range(1, len(requests) + 1):
            changed = [*case.claims[:number], _with(claim, requests=requests[:end])]
            if case.fits(changed) is False:
                return _beside(case, claim, number, end)
    return None


def _beside(case: Combination, claim: Json, number: int, end: int) -> NodeReason:
    request = _devices(claim)["requests"][end - 1]
    name = request["name"]
    if case.fits([_with(claim, requests=[request])]) is False:
        count = (request.get("exactly") or {}).get("count") or 1
        text = f"{count} devices fit one by one, but not together: they are cut from the same GPUs"
        return NodeReason("fragmented", _name(claim), name, text)
    others = [item["name"] for item in _devices(claim)["requests"][: end - 1]]
    earlier = [_name(item) for item in case.claims[:number]]
    beside = ", ".join([*(f"claim {item}" for item in earlier), *(f"request {item}" for item in others)])
    text = f"it could be met alone, but not beside {beside}: they need the same devices"
    return NodeReason("compete", _name(claim), name, text)


def _claims(case: Combination) -> NodeReason | None:
    if len(case.claims) < 2:
        return None
    names = ", ".join(_name(claim) for claim in case.claims)
    return NodeReason("compete", "", "", f"the claims {names} need the same devices")


def _unknown() -> NodeReason:
    return NodeReason("combination", "", "", "no combination of its devices meets all requests")


def _devices(claim: Json) -> Json:
    return (claim.get("spec") or {}).get("devices") or {}


def _with(claim: Json, **changes: Any) -> Json:
    spec = claim.get("spec") or {}
    devices = {**(spec.get("devices") or {}), **changes}
    if "requests" in changes:
        # Constraints may name requests that are left out here.
        names = {item["name"] for item in changes["requests"]}
        devices["constraints"] = [
            item
            for item in devices.get("constraints") or []
            if not item.get("requests") or all(name.partition("/")[0] in names for name in item["requests"])
        ]
    return {**claim, "spec": {**spec, "devices": devices}}


def _attribute(constraint: Json) -> str:
    return str(constraint.get("matchAttribute") or constraint.get("distinctAttribute"))


def _name(claim: Json) -> str:
    return str(claim["metadata"]["name"])
