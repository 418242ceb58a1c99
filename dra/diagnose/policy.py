"""What a change of GpuNodePolicies would do, and how far the fleet is with those that there are. Data, no printing.

What the flags of each node say is not in the API: where no policy speaks, the answer is `as the flags say`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dra.api.gpu_settings import BLOCKS, IDLE_BLOCKS, GpuIdentity, GpuSettings, block_name
from dra.api.policy import (
    Policy,
    Resolution,
    UnreadablePolicy,
    conflicts_in_words,
    decode_policy,
    read_policy,
    resolve,
)
from dra.errors import ConfigError, ValueFormatError
from dra.inventory.allocations import claims_on_gpus, sides_in_pool
from dra.inventory.names import GpuName, MigName, parse_device_name, profile_slug
from dra.values import PciAddress

FLAGS = "as the flags say"
MAX_NODES_NAMED = 8
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetGpu:
    """A GPU as the slices show it: `profiles` are the MIG profiles that are published of it, as in device names."""

    node: str
    device: str
    identity: GpuIdentity
    claims: tuple[str, ...] = ()
    profiles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Change:
    """One block of one GPU that would change.

    Args:
        when: `at once`, or `when idle`.
        waits_for: claims (namespace/name) that have the GPU now.
        doubt: why the node's driver may refuse it.
    """

    node: str
    device: str
    product: str
    block: str
    before: str
    after: str
    when: str
    waits_for: tuple[str, ...] = ()
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class PolicyDiff:
    """What would change.

    Args:
        conflicts: those that would be after the change.
        held: policies that are not valid after the change either, and the nodes that change nothing because of them.
    """

    changes: tuple[Change, ...] = ()
    conflicts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = field(default=())
    held: tuple[str, ...] = field(default=())


def fleet_gpus(slices: Iterable[Json], claims: Iterable[Json], *, driver: str) -> tuple[FleetGpu, ...]:
    """Give the GPUs of a fleet from its ResourceSlices (v1), by node and device."""
    listed = tuple(claims)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    pools: dict[str, list[Json]] = {}
    for each in slices:
        spec = each.get("spec") or {}
        node = spec.get("nodeName")
        if spec.get("driver") != driver or not node:
            continue
        pools.setdefault(_pool(spec), []).extend(spec.get("devices") or ())
        for device in spec.get("devices") or ():
            name = parse_device_name(str(device.get("name") or ""))
            if not isinstance(name, GpuName | MigName):
                continue
            gpu = found.setdefault((node, name.minor), {"profiles": set(), "pool": _pool(spec)})
            _note(gpu, device.get("attributes") or {}, whole=isinstance(name, GpuName))
            if isinstance(name, MigName):
                gpu["profiles"].add(name.profile)
    busy = {
        pool: claims_on_gpus(listed, driver=driver, pool=pool, sides=sides_in_pool(devices))
        for pool, devices in pools.items()
    }
    return tuple(
        FleetGpu(
            node,
            str(GpuName(minor)),
            GpuIdentity(gpu.get("uuid", ""), gpu.get("product", ""), gpu.get("pci")),
            busy[gpu["pool"]].get(minor, ()),
            frozenset(gpu["profiles"]),
        )
        for (node, minor), gpu in sorted(found.items())
    )


def _pool(spec: Json) -> str:
    return str((spec.get("pool") or {}).get("name") or "")


def _note(gpu: dict[str, Any], attributes: Json, *, whole: bool) -> None:
    def text(name: str) -> str:
        return str((attributes.get(name) or {}).get("string") or "")

    gpu.setdefault("product", text("productName"))
    uuid = text("uuid") if whole else text("parentUUID")
    if uuid:
        gpu["uuid"] = uuid
    try:
        address = PciAddress.parse(text("resource.kubernetes.io/pciBusID"))
    except ValueFormatError:
        return
    gpu["pci"] = address


def diff_policies(
    before: Iterable[Policy | UnreadablePolicy],
    after: Iterable[Policy | UnreadablePolicy],
    *,
    labels: Mapping[str, Mapping[str, str]],
    gpus: Sequence[FleetGpu],
) -> PolicyDiff:
    """Say what would change on which nodes.

    Args:
        before: the policies that there are.
        after: those that there would be.
        labels: of each node.
        gpus: of the fleet.
    """
    olds = [each for each in before if isinstance(each, Policy)]
    listed = tuple(after)
    news = [each for each in listed if isinstance(each, Policy)]
    unreadable = [each for each in listed if isinstance(each, UnreadablePolicy)]
    held: dict[str, list[str]] = {}
    changes: list[Change] = []
    conflicts: dict[str, None] = {}
    nodes: dict[str, list[FleetGpu]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node, []).append(gpu)
    for node, its in nodes.items():
        in_the_way = [each for each in unreadable if each.may_choose(labels.get(node, {}))]
        if in_the_way:
            for each in in_the_way:
                held.setdefault(each.problem, []).append(node)
            continue
        identities = [gpu.identity for gpu in its]
        old, new = (resolve(each, labels=labels.get(node, {}), gpus=identities) for each in (olds, news))
        for gpu in its:
            changes += _changes_of(gpu, old, new)
        conflicts.update(
            dict.fromkeys(f"{node}: {each}" for each in conflicts_in_words(new.conflicts).values())
        )
    touched = dict.fromkeys(change.node for change in changes)
    return PolicyDiff(
        tuple(changes),
        tuple(conflicts),
        tuple(touched),
        tuple(
            f"{problem} Nothing changes on {', '.join(its[:MAX_NODES_NAMED])}"
            f"{f' and {len(its) - MAX_NODES_NAMED} more' if len(its) > MAX_NODES_NAMED else ''} while it is so."
            for problem, its in sorted(held.items())
        ),
    )


def _changes_of(gpu: FleetGpu, old: Resolution, new: Resolution) -> Iterable[Change]:
    was, will = old.settings.of(gpu.identity), new.settings.of(gpu.identity)
    for block in BLOCKS:
        said = [bool(each.settings.source_of(gpu.identity, block)) for each in (old, new)]
        if getattr(was, block) == getattr(will, block) and said[0] == said[1]:
            continue
        idle = block in IDLE_BLOCKS
        yield Change(
            gpu.node, gpu.device, gpu.identity.product, block_name(block),
            _words(was, block) if said[0] else FLAGS,
            _words(will, block) if said[1] else FLAGS,
            "when idle" if idle else "at once",
            gpu.claims if idle else (),
            _doubt(gpu, will) if block == "mig" else "",
        )  # fmt: skip


def _doubt(gpu: FleetGpu, settings: GpuSettings) -> str:
    unknown = [name for name, _ in settings.mig.layout if profile_slug(name) not in gpu.profiles]
    if not unknown or not gpu.profiles:
        return ""
    return f"{', '.join(unknown)} is not among the profiles that {gpu.device} publishes"


def _words(settings: GpuSettings, block: str) -> str:
    value = getattr(settings, block)
    match block:
        case "sharing":
            return str(value)
        case "mig":
            mix = " + ".join(f"{number} x {name}" for name, number in value.layout)
            return f"{value.mode}: {mix}" if mix else str(value.mode)
        case "reserved":
            return "no" if value is None else f"{value.value or 'yes'} ({value.effect})"
        case "attributes":
            pairs = (f"{name}={next(iter(each.values()))}" for name, each in sorted(value.items()))
            return ", ".join(pairs) or "none"
        case "driver_capabilities":
            return ",".join(value or ())
        case "health":
            parts = [f"XID {xid}: {effect}" for xid, effect in sorted(value.xids.items())]
            if value.temperature_celsius is not None:
                parts.append(f"{value.temperature_celsius} C")
            return ", ".join(parts) or "none"
        case _:
            return str(value)


def with_files(
    current: Iterable[Json], written: Iterable[Json], deleted: Iterable[str] = ()
) -> tuple[Policy | UnreadablePolicy, ...]:
    """Give the policies that there would be, were the files applied and some deleted.

    Raises:
        ExceptionGroup: of ConfigErrors, all that is wrong: DRA-POLICY-INVALID for each policy of the files that is not
            valid; DRA-POLICY-UNKNOWN for each name to delete that is not there.
    """
    found = {str((body.get("metadata") or {}).get("name")): dict(body) for body in current}
    wrong = [
        ConfigError(
            "DRA-POLICY-UNKNOWN", f"there is no GpuNodePolicy {name}", remedy="See `dra policy status`."
        )
        for name in deleted
        if found.pop(name, None) is None
    ]
    for body in written:
        name = str((body.get("metadata") or {}).get("name"))
        known = (found.get(name) or {}).get("metadata") or {}
        # It keeps its age, which decides between equals.
        metadata = {"creationTimestamp": known.get("creationTimestamp"), **(body.get("metadata") or {})}
        found[name] = {**body, "metadata": metadata}
        try:
            decode_policy(found[name])
        except ConfigError as error:
            wrong.append(error)
    if wrong:
        raise ExceptionGroup("policies that cannot be", wrong)
    return tuple(read_policy(body) for body in found.values())


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy: how many nodes it chooses, and how far they are."""

    name: str
    weight: int
    matching: int = 0
    applied: int = 0
    waiting: int = 0
    refused: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU that is not as the policies say, or a node that changes nothing (`device` is empty)."""

    node: str
    device: str
    state: str
    message: str
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """How far a fleet is. `silent`: nodes with our slices whose driver says nothing of policies."""

    policies: tuple[PolicyRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether everything is as the policies say."""
        return not self.gpus and not any(row.problem for row in self.policies)

    def as_json(self) -> dict[str, Any]:
        """Give it as JSON."""
        return asdict(self)


def fleet_status(
    policies: Iterable[Json], gpu_nodes: Iterable[Json], *, nodes_with_slices: Iterable[str] = ()
) -> FleetStatus:
    """Say how far a fleet is, from what its nodes say."""
    reports = {str((each.get("metadata") or {}).get("name")): each.get("status") or {} for each in gpu_nodes}
    rows = [_row(body, reports) for body in policies]
    gpus = [
        GpuRow(node, "", "Waiting", str(condition.get("message", "")))
        for node, report in sorted(reports.items())
        for condition in report.get("conditions") or ()
        if condition.get("reason") == "PolicyInvalid"
    ]
    gpus += [
        GpuRow(
            node, str(gpu.get("device", "")), str(gpu.get("state", "")), str(gpu.get("message", "")),
            tuple(gpu.get("claims") or ()),
        )
        for node, report in sorted(reports.items())
        for gpu in report.get("gpus") or ()
        if gpu.get("state") != "Applied"
    ]  # fmt: skip
    silent = sorted(set(nodes_with_slices) - reports.keys())
    return FleetStatus(
        tuple(sorted(rows, key=lambda row: row.name)), tuple(gpus), tuple(silent) if rows else ()
    )


def _row(body: Json, reports: Mapping[str, Json]) -> PolicyRow:
    name = str((body.get("metadata") or {}).get("name") or "")
    weight = int((body.get("spec") or {}).get("weight") or 0)
    try:
        decode_policy(body)
    except ConfigError as error:
        return PolicyRow(name, weight, problem=str(error))
    counts = dict.fromkeys(("matching", "applied", "waiting", "refused"), 0)
    generation = int((body.get("metadata") or {}).get("generation") or 0)
    for report in reports.values():
        seen = {str(each.get("name")): each.get("generation") for each in report.get("policies") or ()}
        if name not in seen:
            continue
        counts["matching"] += 1
        states = {str(gpu.get("state")) for gpu in report.get("gpus") or ()}
        if "Refused" in states:
            counts["refused"] += 1
        elif states - {"Applied"} or seen[name] != generation:
            counts["waiting"] += 1
        else:
            counts["applied"] += 1
    return PolicyRow(
        name, weight, counts["matching"], counts["applied"], counts["waiting"], counts["refused"]
    )
