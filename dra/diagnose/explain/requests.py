"""The requests of a pod's claims, read once for all nodes, and what is wrong with them wherever they go."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dra.allocator.capacity import requested
from dra.allocator.model import MAX_RESULTS
from dra.cel import CelCompileError, compile_selector
from dra.cel.selector import COST_LIMIT
from dra.diagnose.explain.claims import is_special
from dra.diagnose.explain.cluster import CLASS, Cluster, Json
from dra.diagnose.explain.model import Reason
from dra.diagnose.explain.selectors import Budget, NamedSelector, RequestSelectors


@dataclass(slots=True, eq=False)
class Asked:
    """A request or sub-request. `group` is its number among the claim's requests: alternatives share it."""

    claim: str
    name: str
    group: int
    class_name: str
    mode: str
    count: int
    admin: bool
    tolerations: tuple[Mapping[str, Any], ...]
    capacity: Mapping[str, int]
    selectors: RequestSelectors

    @property
    def what(self) -> str:
        """Give `request NAME of claim NAME`."""
        return f"request {self.name} of claim {self.claim}"


@dataclass(slots=True)
class Reader:
    """Reads claims; `faults` are the causes that hold on every node, `asked` what can be looked for."""

    cluster: Cluster
    faults: list[Reason]
    asked: list[Asked]
    budget: Budget = field(default_factory=Budget)

    def read(self, claim: Json) -> None:
        """Take a claim's requests in."""
        name = claim["metadata"]["name"]
        devices = (claim.get("spec") or {}).get("devices") or {}
        least = 0
        for group, raw in enumerate(devices.get("requests") or []):
            alternatives = raw.get("firstAvailable") or []
            bodies = (
                [(f"{raw['name']}/{sub['name']}", sub) for sub in alternatives]
                if alternatives
                else [(raw["name"], raw.get("exactly") or {})]
            )
            counts = []
            for full, body in bodies:
                counts.append(_count(body))
                self._one(name, full, group, body)
            least += min(counts)
        if least > MAX_RESULTS:
            who, remedy = (
                f"claim {name}",
                "Spread the devices over several claims of the pod, or over several pods.",
            )
            if is_special(claim):
                who = "the claim for the pod's extended resources"
                remedy = (
                    "Spread the devices over several pods, or name several claims in place of the resources."
                )
            text = f"{who} asks for {least} devices; a claim can have {MAX_RESULTS}"
            self.faults.append(Reason("too-many-devices", text, remedy, claim=name))

    def _one(self, claim: str, full: str, group: int, body: Mapping[str, Any]) -> None:
        class_name = body.get("deviceClassName") or ""
        found: list[NamedSelector] = []
        if self.cluster.knows(CLASS) or self.cluster.find(CLASS, class_name):
            class_raw = self.cluster.find(CLASS, class_name)
            if class_raw is None:
                self.faults.append(self._class_missing(claim, full, class_name))
                return
            raws = (class_raw.get("spec") or {}).get("selectors") or []
            if not self._compile(found, raws, origin=f"class {class_name}", claim=claim, request=full):
                return
        else:
            self.faults.append(
                Reason(
                    "not-read",
                    f"DeviceClass {class_name}, which request {full} of claim {claim} names, is not known:"
                    f" DeviceClasses {self.cluster.unread[CLASS]}",
                    "Add the output of kubectl get deviceclasses -o yaml, or the right to list deviceclasses.",
                    claim=claim,
                    request=full,
                )
            )
            return
        raws = body.get("selectors") or []
        if not self._compile(found, raws, origin="request", claim=claim, request=full):
            return
        self.asked.append(
            Asked(
                claim=claim,
                name=full,
                group=group,
                class_name=class_name,
                mode=body.get("allocationMode") or "ExactCount",
                count=body.get("count") or 1,
                admin=bool(body.get("adminAccess")),
                tolerations=tuple(body.get("tolerations") or ()),
                capacity=requested(body),
                selectors=RequestSelectors(found, self.budget),
            )
        )

    def _compile(
        self, found: list[NamedSelector], raws: Sequence[Json], *, origin: str, claim: str, request: str
    ) -> bool:
        where = origin if origin != "request" else f"request {request} of claim {claim}"
        again = (
            "a claim cannot be changed, so make it (and its pod) anew."
            if origin == "request"
            else "the pod is tried again when the DeviceClass has changed."
        )
        for index, raw in enumerate(raws):
            expression = (raw.get("cel") or {}).get("expression") or ""
            reason = Reason("", "", claim=claim, request=request)
            try:
                selector = compile_selector(expression)
            except CelCompileError as error:
                caret = error.caret()
                problem = error.issues[0].message if error.issues else error.message
                reason = replace(
                    reason,
                    code="cel-compile",
                    message=f"selector #{index} of {where} does not compile, which ends every scheduling attempt: {problem}",
                    remedy=f"Correct the CEL expression; {again}",
                    details=tuple(caret.split("\n")) if caret else (expression,),
                )
            else:
                found.append(NamedSelector(origin, index, selector))
                if selector.max_cost <= COST_LIMIT:
                    continue
                reason = replace(
                    reason,
                    code="cel-cost",
                    message=f"selector #{index} of {where} may cost {selector.max_cost}; the API server takes none that"
                    f" may cost more than {COST_LIMIT}",
                    remedy=f"Simplify it: loops in loops and comparisons of long texts cost most; {again}",
                )
            self.faults.append(reason)
            return False
        return True

    def _class_missing(self, claim: str, request: str, class_name: str) -> Reason:
        names = sorted(item["metadata"]["name"] for item in self.cluster.all(CLASS))
        near = difflib.get_close_matches(class_name, names, n=1, cutoff=0.6)
        have = (
            f"there are {', '.join(names[:6])}{' …' if len(names) > 6 else ''}" if names else "there is none"
        )
        guess = f" Did you mean {near[0]}?" if near else ""
        return Reason(
            "class-missing",
            f"request {request} of claim {claim} names DeviceClass {class_name!r}, which does not exist",
            f"Create it, or name another class: {have}.{guess}",
            claim=claim,
            request=request,
        )


def _count(body: Mapping[str, Any]) -> int:
    # All counts at least one; how many they are is different on each node.
    return 1 if body.get("allocationMode") == "All" else body.get("count") or 1
