"""All nodes' reasons put together for a reader: one Reason a cause, the most telling first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dra.allocator.model import Device, DeviceId
from dra.diagnose.explain.cluster import CLAIM, NODE, POD
from dra.diagnose.explain.misses import lines_of, nearest
from dra.diagnose.explain.model import DeviceOutcome, NodeOutcome, NodeReason, Reason
from dra.diagnose.explain.nodes import Survey, Surveyor
from dra.diagnose.explain.remedies import (
    REMEDIES,
    TITLES,
    capacity,
    failing,
    no_match,
    obstacle_remedy,
    taint,
)
from dra.diagnose.explain.requests import Asked
from dra.diagnose.explain.written import Written
from dra.values.words import counted

# Lines of one reason in the short form; all nodes are in the wide one.
MAX_LINES = 4
# What is nearest to success comes first.
ORDER = (
    "compete", "combination", "constraint", "too-long", "too-costly", "fragmented", "short", "held", "taint", "pool-incomplete",
    "pool-invalid", "capacity", "too-many", "slice-missing", "pool-empty", "no-match", "claim-elsewhere",
    "no-devices",
)  # fmt: skip


@dataclass(slots=True)
class Group:
    """The nodes that fail for one cause."""

    code: str
    claim: str
    request: str
    found: list[tuple[NodeOutcome, NodeReason]]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(outcome.name for outcome, _ in self.found)

    @property
    def where(self) -> str:
        """Give `n1`, `n1 and n2`, or `12 nodes`."""
        return _where(self.nodes)


class Summary:
    """Turns a survey into reasons."""

    def __init__(self, surveyor: Surveyor, survey: Survey, *, claims: bool = True) -> None:
        """Read a survey; `claims` is False for a pod that has none and asks for no devices."""
        self._claims = claims
        self._surveyor = surveyor
        self._survey = survey
        self._asked = {(asked.claim, asked.name): asked for asked in survey.asked}
        self._several = len({asked.claim for asked in survey.asked}) > 1 or len(survey.asked) > 1

    def reasons(self) -> list[Reason]:
        """Give the causes, the most telling first."""
        nodes = self._survey.nodes
        found = [*self._survey.faults, *self._aborts()]
        if found:
            return found
        good = [node for node in nodes if node.fits and not node.obstacles]
        if good:
            return [self._fits_now(good)]
        blocked = [node for node in nodes if node.fits and node.obstacles]
        if blocked:
            found.append(self._obstacles(blocked))
        found += [self._group(group) for group in self._groups()]
        unsure = [node.name for node in nodes if node.fits is None and not node.reasons]
        if unsure:
            found.append(
                Reason(
                    "not-searched",
                    f"{_where(unsure)}: not searched, as the other nodes took too many steps, or the selectors cost too much",
                    nodes=tuple(unsure),
                )
            )
        return found

    # -- single causes -----------------------------------------------------------------------------

    def _aborts(self) -> list[Reason]:
        seen: dict[str, list[str]] = {}
        codes: dict[str, str] = {}
        for name, reason in self._survey.aborts:
            seen.setdefault(reason.text, []).append(name)
            codes[reason.text] = reason.code
        return [self._abort(codes[text], text, names) for text, names in seen.items()]

    def _abort(self, code: str, text: str, names: list[str]) -> Reason:
        details: list[str] = []
        remedy = ""
        message = f"{text}; this ends the scheduling attempt for all nodes (met on {_where(names)})"
        claim = request = ""
        if code == "cel-runtime":
            hit = self._failing_device(names)
            if hit is not None:
                node, asked, outcome = hit
                claim, request = asked.claim, asked.name
                miss = nearest([(node, outcome)])
                if miss is not None:
                    details = lines_of(miss, asked, self._device(node, outcome.device))[1:]
                where = f"device {outcome.device.device} (driver {outcome.device.driver}) of node {node}"
                message = (
                    f"{asked.what}: {outcome.trace.error if outcome.trace else text} on {where};"
                    " this ends the scheduling attempt for all nodes"
                )
                remedy = outcome.trace.remedy if outcome.trace else ""
            remedy = failing(details, remedy)
        elif code == "pool-incomplete":
            remedy = "Wait until the driver has published the pool; if it stays so, look at the driver's log on that node."
        elif code == "pool-invalid":
            remedy = "Correct what the driver publishes; its slices contradict each other."
        elif code == "constraint":
            remedy = (
                "With allocationMode All every matching device must meet the constraint; narrow the selector."
            )
        return Reason(code, message, remedy, tuple(details), claim=claim, request=request, nodes=tuple(names))

    def _failing_device(self, names: Sequence[str]) -> tuple[str, Asked, DeviceOutcome] | None:
        wanted = set(names)
        for node in self._survey.nodes:
            for request in node.requests if node.name in wanted else []:
                for outcome in request.devices:
                    if outcome.stage == "error":
                        return node.name, self._asked[request.claim, request.request], outcome
        return None

    def _fits_now(self, good: Sequence[NodeOutcome]) -> Reason:
        names = tuple(node.name for node in good)
        cluster = self._surveyor.cluster
        partly = any(not cluster.knows(kind) for kind in (CLAIM, POD, NODE))
        return Reason(
            "fits-now",
            f"as far as could be read, it fits on {_where(names)}"
            if partly
            else f"it fits on {_where(names)} now",
            "The scheduler tries again after each change, at the latest after five minutes; if it stays pending,"
            " look at its last message and whether kube-scheduler runs with DynamicResourceAllocation.",
            nodes=names,
        )

    def _obstacles(self, blocked: Sequence[NodeOutcome]) -> Reason:
        texts = Counter(node.obstacles[0].text for node in blocked)
        firsts = [node.obstacles[0] for node in blocked]
        lines = [
            f"{node.name}: {'; '.join(item.detail for item in node.obstacles)}"
            for node in blocked[:MAX_LINES]
        ]
        names = tuple(node.name for node in blocked)
        shown = ", ".join(text for text, _ in texts.most_common(3))
        have = "the devices are free" if self._survey.asked else "its claims are usable"
        message = f"{have} on {_where(names)}, but the pod may not go there: {shown}"
        if not self._claims:
            message = f"the pod may not go to {_where(names)}: {shown}"
        return Reason(
            "pod-unschedulable",
            message,
            obstacle_remedy(firsts, self._survey.namespace),
            _cut(lines, len(blocked)),
            nodes=names,
        )

    # -- grouped causes ----------------------------------------------------------------------------

    def _groups(self) -> list[Group]:
        groups: dict[tuple[str, str, str], Group] = {}
        for node in self._survey.nodes:
            if node.fits:
                continue
            for reason in node.reasons:
                key = (reason.code, reason.claim, reason.request)
                group = groups.setdefault(key, Group(*key, []))
                group.found.append((node, reason))
        positions = {code: number for number, code in enumerate(ORDER)}
        return sorted(groups.values(), key=lambda group: positions.get(group.code, 0))

    def _group(self, group: Group) -> Reason:
        asked = self._asked.get((group.claim, group.request))
        prefix = f"{asked.what}: " if asked is not None and self._several else ""
        write: Callable[[Group, Asked | None], tuple[str, str, list[str]]] = {
            "held": self._held,
            "no-match": self._no_match,
            "too-many": self._too_many,
            "taint": self._taint,
            "no-devices": self._no_devices,
            "fragmented": self._short,
            "short": self._short,
            "claim-elsewhere": self._elsewhere,
        }.get(group.code, self._plain)
        message, remedy, lines = write(group, asked)
        lines += self._besides(group)
        return Reason(
            group.code, prefix + message, remedy, tuple(lines), group.claim, group.request, nodes=group.nodes
        )

    @staticmethod
    def _besides(group: Group) -> list[str]:
        """Say that the pod could not go there either; a node without devices is out of the question anyhow."""
        blocked = [node for node, _ in group.found if node.obstacles]
        if not blocked or group.code in {"no-devices", "claim-elsewhere"}:
            return []
        texts = Counter(node.obstacles[0].text for node in blocked)
        shown = ", ".join(text for text, _ in texts.most_common(2))
        return [f"besides, the pod may not go to {_where([node.name for node in blocked])}: {shown}"]

    def _held(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        outcomes = list(self._outcomes(group))
        held = sum(outcome.stage == "held" for _, outcome in outcomes)
        matching = sum(outcome.stage in {"held", "short", "taint", "free"} for _, outcome in outcomes)
        every = f"all {matching}" if held == matching else f"{held} of {matching}"
        needed = f"; {asked.count} free on one node are needed" if asked and asked.count > 1 else ""
        lines, idle = [], []
        for node, _ in group.found:
            by_holder: dict[str, list[str]] = {}
            for name, outcome in outcomes:
                if name == node.name and outcome.stage == "held":
                    by_holder.setdefault(outcome.detail, []).append(outcome.device.device)
            lines.append(
                f"{node.name}: " + "; ".join(f"{_names(d)} by {h}" for h, d in list(by_holder.items())[:3])
            )
            if len(by_holder) > 3:
                lines[-1] += f"; {counted(len(by_holder) - 3, 'more holder')}"
            if len(lines) >= MAX_LINES:
                break
        for _, outcome in outcomes:
            for holder in self._surveyor.holdings.of(outcome.device):
                if outcome.stage == "held" and holder.idle and holder.claim not in idle:
                    idle.append(holder.claim)
        remedy = "Wait until a holder ends, or delete one of the pods."
        if idle:
            remedy = f"Nobody uses {', '.join(idle[:3])} any more: check that kube-controller-manager runs, or delete it."
        message = f"{every} matching devices on {group.where} are held by other claims{needed}"
        return message, remedy, list(_cut(lines, len(group.found)))

    def _no_match(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        outcomes = list(self._outcomes(group))
        found = nearest(outcomes)
        lines: list[str] = []
        if found is not None and asked is not None:
            lines = lines_of(found, asked, self._device(found.node, found.outcome.device))
        what, remedy = no_match(asked, self._written(group), found)
        return f"none of the {len(outcomes)} devices on {group.where} matches {what}", remedy, lines

    def _too_many(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        sizes = [
            (request.matching, node.name)
            for node, _ in group.found
            for request in node.requests
            if (request.claim, request.request) == (group.claim, group.request)
        ]
        size, name = max(sizes, key=lambda item: item[0])
        needed = asked.count if asked else 0
        largest = f"the largest node has {size} ({name})"
        return (
            f"it needs {needed} matching devices on one node, {largest}",
            "Ask for fewer devices a pod and run several pods.",
            [],
        )

    def _short(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        message, remedy, lines = self._plain(group, asked)
        for node, _ in group.found[: MAX_LINES - len(lines)]:
            users = self._users(node.name, group)
            if users:
                shown = "; ".join(
                    f"{_names(devices)} by {holder}" for holder, devices in list(users.items())[:3]
                )
                more = f"; {counted(len(users) - 3, 'more holder')}" if len(users) > 3 else ""
                lines.append(f"{node.name}: in use: {shown}{more}")
        return message, remedy, lines

    def _users(self, node: str, group: Group) -> dict[str, list[str]]:
        """Give who uses what a node is short of: holder -> devices."""
        holdings = self._surveyor.holdings
        funnel = self._survey.funnels.get((node, group.claim, group.request))
        users: dict[str, list[str]] = {}
        for device, pool, shortage in funnel.shortages if funnel else ():
            for used in holdings.users_of(pool, device.consumes) if shortage.keys else [device.id]:
                for holder in holdings.of(used):
                    names = users.setdefault(str(holder), [])
                    if used.device not in names:
                        names.append(used.device)
        return users

    def _taint(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        del asked
        taints: dict[str, list[str]] = {}
        for node, outcome in self._outcomes(group):
            if outcome.stage == "taint":
                taints.setdefault(outcome.detail, []).append(f"{outcome.device.device} on {node}")
        count = sum(map(len, taints.values()))
        lines = [f"{text}: {_names(devices)}" for text, devices in list(taints.items())[:MAX_LINES]]
        remedy = taint(self._written(group))
        word = "device is" if count == 1 else "devices are"
        return f"{count} matching {word} tainted on {group.where}", remedy, list(_cut(lines, len(taints)))

    def _no_devices(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        driver = ", ".join(sorted(asked.selectors.drivers())) if asked else ""
        whose = f" of {driver}" if driver else ""
        if len(group.found) == len(self._survey.nodes):
            message = f"no node has published devices{whose}"
            return message, "Install the driver, or check that it runs on the nodes that have GPUs.", []
        return f"{group.where} {'has' if len(group.found) == 1 else 'have'} no devices{whose}", "", []

    def _elsewhere(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        del asked
        return f"claim {group.claim} is not usable on {group.where}: it is allocated elsewhere", "", []

    def _plain(self, group: Group, asked: Asked | None) -> tuple[str, str, list[str]]:
        del asked
        texts: dict[str, list[str]] = {}
        for node, reason in group.found:
            texts.setdefault(reason.text, []).append(node.name)
        remedy = group.found[0][1].remedy or REMEDIES.get(group.code, "")
        if group.code == "capacity":
            remedy = capacity(self._written(group))
        if len(texts) == 1:
            return f"{group.where}: {next(iter(texts))}", remedy, []
        lines = [f"{_where(names)}: {text}" for text, names in list(texts.items())[:MAX_LINES]]
        return f"{group.where}: {TITLES.get(group.code, group.code)}", remedy, list(_cut(lines, len(texts)))

    def _written(self, group: Group) -> Written:
        return self._survey.written.of(group.claim, group.request)

    # -- looking up --------------------------------------------------------------------------------

    def _outcomes(self, group: Group) -> Iterable[tuple[str, DeviceOutcome]]:
        for node, _ in group.found:
            for request in node.requests:
                if (request.claim, request.request) == (group.claim, group.request):
                    for outcome in request.devices:
                        yield node.name, outcome

    def _device(self, node: str, device_id: DeviceId) -> Device | None:
        pools = self._survey.pools.get(node, ())
        return next((item for pool in pools for item in pool.devices if item.id == device_id), None)


def _where(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{len(names)} nodes ({names[0]}, {names[1]} …)"


def _names(devices: Sequence[str]) -> str:
    if len(devices) <= 3:
        return ", ".join(devices)
    return f"{len(devices)} devices ({devices[0]} …)"


def _cut(lines: Sequence[str], total: int) -> tuple[str, ...]:
    more = total - len(lines)
    return (*lines, f"… and {more} more") if more > 0 else tuple(lines)
