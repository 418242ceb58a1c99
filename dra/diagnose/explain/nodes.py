"""Node by node: could the pod go there, and could its claims have their devices there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dra.allocator.allocate import Allocator
from dra.allocator.extended import (
    classes_by_resource,
    extended_claim,
    extended_requests,
    plugin_resources,
    wanted,
)
from dra.allocator.model import AllocatorError, Features, Pool, SearchLimitError
from dra.allocator.nodes import node_matches
from dra.allocator.pod_filters import NodeUse, PodObstacle, is_done, obstacles
from dra.diagnose.explain.cluster import CLASS, NODE, POD, SLICE, Cluster, Json
from dra.diagnose.explain.combination import Combination, why_together
from dra.diagnose.explain.devices import Funnel, judge
from dra.diagnose.explain.holders import Holdings
from dra.diagnose.explain.model import NodeOutcome, NodeReason, Reason
from dra.diagnose.explain.node_reasons import reasons_of
from dra.diagnose.explain.plugin_state import DriverState
from dra.diagnose.explain.requests import Asked, Reader
from dra.diagnose.explain.selectors import Budget, TooCostly
from dra.diagnose.explain.written import WrittenBy

# Devices tried in one search, and in all of them together, before a node counts as not searched.
MAX_STEPS = 20_000
MAX_ALL_STEPS = 400_000


@dataclass(slots=True)
class Wanted:
    """What has to be placed: the pod (None for a claim that no pod uses) and its claims.

    `fixed` are allocated already and bind the pod to a node; `fresh` are to be allocated.
    """

    pod: Json | None
    fresh: list[Json]
    fixed: list[Json]


@dataclass(slots=True)
class Survey:
    """What was found out about all nodes. `aborts` end the scheduling attempt wherever they occur."""

    nodes: list[NodeOutcome] = field(default_factory=list)
    faults: list[Reason] = field(default_factory=list)
    aborts: list[tuple[str, NodeReason]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    funnels: dict[tuple[str, str, str], Funnel] = field(default_factory=dict)
    pools: dict[str, Sequence[Pool]] = field(default_factory=dict)
    written: WrittenBy = field(default_factory=lambda: WrittenBy(None, {}))
    namespace: str = ""


class Surveyor:
    """Looks at every node for one pod or claim. Made for one cluster; used once."""

    def __init__(self, cluster: Cluster, *, features: Features | None = None) -> None:
        self.cluster = cluster
        self.features = features or Features()
        self.holdings = Holdings(cluster)
        self.budget = Budget()
        self.allocator = Allocator(
            slices=cluster.all(SLICE),
            classes=cluster.all(CLASS),
            allocated=self.holdings.allocated,
            compile_selector=self.budget.compile,
            features=self.features,
            max_steps=MAX_STEPS,
        )
        self.by_resource = classes_by_resource(list(cluster.all(CLASS)))
        self.drivers = DriverState(cluster)
        self._placed = self._pods_by_node()

    def look(self, wanted_: Wanted) -> Survey:
        """Judge every node."""
        survey = Survey(written=WrittenBy(wanted_.pod, self.by_resource))
        survey.namespace = str((wanted_.pod or {"metadata": {}})["metadata"].get("namespace") or "")
        reader = Reader(self.cluster, survey.faults, survey.asked, self.budget)
        for claim in wanted_.fresh:
            reader.read(claim)
        special = self._extended(wanted_.pod)
        if special is not None:
            reader.read(special)
        broken = bool(survey.faults)
        for node in self._nodes():
            outcome = self._node(node, wanted_, special, survey, broken=broken)
            survey.nodes.append(outcome)
        return survey

    # -- one node ----------------------------------------------------------------------------------

    def _node(
        self, node: Json, wanted_: Wanted, special: Json | None, survey: Survey, *, broken: bool
    ) -> NodeOutcome:
        name = str(node["metadata"]["name"])
        outcome = NodeOutcome(name)
        served: set[str] = set()
        if wanted_.pod is not None and self.cluster.knows(NODE):
            served = self._obstacles(node, wanted_.pod, outcome)
        for claim in wanted_.fixed:
            selector = (claim["status"]["allocation"] or {}).get("nodeSelector")
            if selector and not node_matches(selector, node):
                text = f"claim {claim['metadata']['name']} is allocated elsewhere"
                outcome.reasons.append(NodeReason("claim-elsewhere", claim["metadata"]["name"], "", text))
        claims = list(wanted_.fresh)
        if special is not None:
            claims += self._special_here(wanted_.pod or {}, special, served)
        pools = survey.pools[name] = self.allocator.pools.for_node(node, self.features)
        self._requests(node, claims, pools, outcome, survey, broken=broken)
        return outcome

    def _requests(
        self,
        node: Json,
        claims: Sequence[Json],
        pools: Sequence[Pool],
        outcome: NodeOutcome,
        survey: Survey,
        *,
        broken: bool,
    ) -> None:
        names = {(claim["metadata"]["name"], request["name"]) for claim in claims for request in _raw(claim)}
        groups: dict[tuple[str, int], list[tuple[Asked, Funnel]]] = {}
        fails = False
        for asked in survey.asked:
            if (asked.claim, asked.name.partition("/")[0]) not in names:
                continue
            funnel = judge(asked, pools, self.holdings, self.features)
            outcome.requests.append(funnel.outcome)
            survey.funnels[outcome.name, asked.claim, asked.name] = funnel
            groups.setdefault((asked.claim, asked.group), []).append((asked, funnel))
            fails = fails or bool(funnel.outcome.counts["error"])
        short: list[NodeReason] = []
        for alternatives in groups.values():
            found = [reasons_of(asked, funnel, pools, node, self.drivers) for asked, funnel in alternatives]
            if all(found):
                short += [reason for reasons in found for reason in reasons]
        elsewhere = any(reason.code == "claim-elsewhere" for reason in outcome.reasons)
        outcome.reasons += short
        outcome.fits = False if short or elsewhere else None
        if broken or elsewhere or not claims:
            if not claims and not elsewhere:
                outcome.fits = True
            return
        # Mode All may end the attempt: a pool that is not whole, a constraint that refuses a device, too many devices.
        if short and not fails and all(asked.mode != "All" for asked in survey.asked):
            return
        self._search(node, claims, outcome, survey)

    def _search(self, node: Json, claims: Sequence[Json], outcome: NodeOutcome, survey: Survey) -> None:
        """Let the allocator decide where counting alone does not, or where a selector may end the attempt."""
        if self.allocator.steps > MAX_ALL_STEPS:
            outcome.fits = None
            return
        try:
            found = self.allocator.allocate(node, claims)
        except SearchLimitError as error:
            outcome.reasons.append(NodeReason("too-long", "", "", error.message))
            outcome.fits = None
            return
        except TooCostly:
            outcome.fits = None
            return
        except AllocatorError as error:
            outcome.fits = False
            reason = NodeReason(_abort_code(error.message), "", "", error.message)
            outcome.reasons.insert(0, reason)
            if not outcome.obstacles and not error.on_node_only:
                survey.aborts.append((outcome.name, reason))
            return
        if found is not None:
            outcome.fits = True
            outcome.reasons.clear()
        elif not outcome.reasons:
            outcome.fits = False
            together = why_together(
                Combination(self.allocator, node, claims, survey.pools[outcome.name], outcome.requests)
            )
            outcome.reasons.append(together)

    # -- the pod -----------------------------------------------------------------------------------

    def _obstacles(self, node: Json, pod: Json, outcome: NodeOutcome) -> set[str]:
        placed = self._placed.get(outcome.name)
        use = (placed[1] if placed else NodeUse()) if self.cluster.knows(POD) else None
        outcome.obstacles = obstacles(pod, node, use)
        if not any(wanted(container) for container in (pod.get("spec") or {}).get("containers") or []):
            return set()
        served, reason = plugin_resources(pod, node, placed[0] if placed else [], self.by_resource)
        if reason is not None:
            resource = reason.removeprefix("Insufficient ")
            why = (
                f"its device plugin has not enough {resource} left"
                if resource in served
                else f"it has no {resource} from a device plugin, and no DeviceClass stands for that name"
            )
            kind = "plugin-short" if resource in served else "no-class"
            outcome.obstacles.append(PodObstacle(kind, reason, why))
        return served

    def _extended(self, pod: Json | None) -> Json | None:
        if pod is None:
            return None
        requests, _ = extended_requests(pod, self.by_resource)
        return extended_claim(pod, requests) if requests else None

    def _special_here(self, pod: Mapping[str, object], special: Json, served: set[str]) -> list[Json]:
        """Give the claim for the extended resources that this node's device plugins do not serve."""
        if not served:
            return [special]
        left = {name: cls for name, cls in self.by_resource.items() if name not in served}
        requests, _ = extended_requests(pod, left)
        return [{**special, "spec": {"devices": {"requests": requests}}}] if requests else []

    # -- the cluster -------------------------------------------------------------------------------

    def _nodes(self) -> list[Json]:
        """Give the nodes by name; where they may not be read, those that slices name."""
        if self.cluster.knows(NODE):
            return sorted(self.cluster.all(NODE), key=lambda node: str(node["metadata"]["name"]))
        names: dict[str, None] = {}
        for item in self.cluster.all(SLICE):
            spec = item["spec"]
            for place in [spec, *(spec.get("devices") or [] if spec.get("perDeviceNodeSelection") else [])]:
                if place.get("nodeName"):
                    names[place["nodeName"]] = None
        return [{"metadata": {"name": name, "labels": {}}} for name in sorted(names)]

    def _pods_by_node(self) -> dict[str, tuple[list[Json], NodeUse]]:
        placed: dict[str, tuple[list[Json], NodeUse]] = {}
        for pod in self.cluster.all(POD):
            name = (pod.get("spec") or {}).get("nodeName")
            if name and not is_done(pod):
                pods, use = placed.setdefault(name, ([], NodeUse()))
                pods.append(pod)
                use.add(pod)
        return placed


def _raw(claim: Json) -> list[Json]:
    return ((claim.get("spec") or {}).get("devices") or {}).get("requests") or []


def _abort_code(message: str) -> str:
    if "CEL runtime error" in message:
        return "cel-runtime"
    if "CEL compile error" in message:
        return "cel-compile"
    if "currently being updated" in message:
        return "pool-incomplete"
    if "currently invalid" in message or "invalid resource pools" in message:
        return "pool-invalid"
    if "claim constraint" in message:
        return "constraint"
    return "request-invalid"
