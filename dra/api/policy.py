"""What the GpuNodePolicies of a cluster mean for one node. Pure.

    policies = [decode_policy(each) for each in objects]
    resolution = resolve(policies, labels=node_labels, gpus=identities, base=flags)
    resolution.settings.of(gpu)

Of the policies that choose a node, one with more label requirements lies over one with fewer, then the higher weight
over the lower. Two that are equal in both and say different things of one GPU are a conflict: the older one counts,
and both are told. Each block (`sharing`, `mig`, ...) is taken as a whole from the uppermost policy that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dra.api.gpu_settings import (
    NO_SETTINGS,
    GpuIdentity,
    GpuSelector,
    HealthSettings,
    MigSettings,
    NodeSettings,
    ReservedSettings,
    SettingsLayer,
    SharingSettings,
    block_name,
)
from dra.api.imports import PYDANTIC
from dra.errors import ConfigError
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.api.policy_models import GpuGroup, NodeSelector, PolicySpec

GROUP = "gpudra.dev"
VERSION = "v1alpha1"
GROUP_VERSION = f"{GROUP}/{VERSION}"
KIND = "GpuNodePolicy"
INVALID = "DRA-POLICY-INVALID"

# A label of the node, operator, values. Source: metav1.LabelSelectorRequirement.
Requirement = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Policy:
    """One valid policy.

    Args:
        name, generation, created: of the object's metadata; `created` is RFC 3339, empty for one not in the API yet.
        specificity: the number of label requirements of its node selector.
        layers: its groups, those with the less exact selector first.
    """

    name: str
    generation: int
    created: str
    weight: int
    specificity: int
    requirements: tuple[Requirement, ...]
    layers: tuple[SettingsLayer, ...]

    def chooses(self, labels: Mapping[str, str]) -> bool:
        """Whether it is for a node with these labels."""
        return _fits(self.requirements, labels)

    @property
    def rank(self) -> tuple[int, int]:
        """What must be equal for a conflict."""
        return self.specificity, self.weight


@dataclass(frozen=True, slots=True)
class UnreadablePolicy:
    """One that is not valid, or that is of a version which is not known here.

    Args:
        problem: what is wrong, with code and remedy.
        requirements: of its node selector; None where not even that can be read.
    """

    name: str
    problem: str
    requirements: tuple[Requirement, ...] | None

    def may_choose(self, labels: Mapping[str, str]) -> bool:
        """Whether it is for a node with these labels, as far as can be known."""
        return self.requirements is None or _fits(self.requirements, labels)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two policies of equal rank that say different things of a GPU; `winner` counts."""

    winner: str
    loser: str
    block: str
    gpu: GpuIdentity


def conflicts_in_words(conflicts: Iterable[Conflict]) -> dict[tuple[str, str, str], str]:
    """Say conflicts for people, the GPUs of two policies and a block together: (winner, loser, block) → text.

    One for each GPU would be hundreds of Events in a small fleet.
    """
    gpus: dict[tuple[str, str, str], list[str]] = {}
    for each in conflicts:
        gpus.setdefault((each.winner, each.loser, each.block), []).append(each.gpu.uuid)
    return {
        (winner, loser, block): (
            f"policies {winner} and {loser} have equal node selectors and weights and both set "
            f"{block_name(block)} of {uuids[0] if len(uuids) == 1 else f'{len(uuids)} GPUs'}; "
            f"the older one, {winner}, counts"
        )
        for (winner, loser, block), uuids in gpus.items()
    }


@dataclass(frozen=True, slots=True)
class Resolution:
    """What holds on a node.

    Args:
        policies: names of those that choose the node, the uppermost first.
        conflicts: each pair of policies once for each block and GPU.
    """

    settings: NodeSettings
    policies: tuple[str, ...] = ()
    conflicts: tuple[Conflict, ...] = field(default=())


def decode_policy(body: Mapping[str, Any]) -> Policy:
    """Read a GpuNodePolicy.

    Raises:
        ConfigError: DRA-POLICY-INVALID with the path of the field.
    """
    with PYDANTIC:
        from pydantic import ValidationError

        from dra.api.policy_models import PolicySpec
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    name = str(metadata.get("name") or "")
    if body.get("kind") != KIND or body.get("apiVersion") != GROUP_VERSION:
        raise _invalid(
            name, f"is not a {KIND} of {GROUP_VERSION}", f"Set apiVersion: {GROUP_VERSION}, kind: {KIND}."
        )
    if not name:
        raise _invalid(name, "metadata.name: is missing", "Name the policy.")
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        raise _invalid(name, "spec: is missing", "Write spec.gpus with at least one group.")
    try:
        model = PolicySpec.model_validate(_as_stored(spec))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in ("spec", *first["loc"]))
        message = str(first["msg"]).removeprefix("Value error, ")
        raise _invalid(name, f"{path}: {message}", "See `kubectl explain gpunodepolicy.spec`.") from None
    return _policy(name, metadata, model)


def read_policy(body: Mapping[str, Any]) -> Policy | UnreadablePolicy:
    """Read a GpuNodePolicy; of one that is not valid give for which nodes it is."""
    try:
        return decode_policy(body)
    except ConfigError as error:
        return UnreadablePolicy(str(error.fields["policy"]), str(error), _requirements_of(body))


def _requirements_of(body: Mapping[str, Any]) -> tuple[Requirement, ...] | None:
    with PYDANTIC:
        from pydantic import ValidationError

        from dra.api.policy_models import NodeSelector
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        return None
    try:
        return _requirements(NodeSelector.model_validate(_as_stored(spec.get("nodeSelector") or {})))
    except ValidationError:
        return None


def _as_stored(spec: Any) -> Any:
    """Give a spec without what is null, and whole numbers as such: the API server takes 2.0 for an integer
    that no rule reads.

    In lists a null stays, and is wrong there.
    """
    if isinstance(spec, Mapping):
        return {key: _as_stored(each) for key, each in spec.items() if each is not None}
    if isinstance(spec, list):
        return [_as_stored(each) for each in spec]
    if isinstance(spec, float) and spec.is_integer():
        return int(spec)
    return spec


def resolve(
    policies: Iterable[Policy],
    *,
    labels: Mapping[str, str],
    gpus: Sequence[GpuIdentity] = (),
    base: NodeSettings = NO_SETTINGS,
) -> Resolution:
    """Say what holds on a node with these `labels` and `gpus`; `base` is what its flags say, below all policies."""
    # The uppermost last; of equal ones the older lies above.
    chosen = sorted(
        (policy for policy in policies if policy.chooses(labels)),
        key=lambda each: (each.created, each.name),
        reverse=True,
    )
    chosen.sort(key=lambda each: each.rank)
    settings = base
    for policy in chosen:
        settings = settings.over(policy.layers)
    return Resolution(
        settings, tuple(policy.name for policy in reversed(chosen)), tuple(_conflicts(chosen, gpus))
    )


def _conflicts(chosen: Sequence[Policy], gpus: Sequence[GpuIdentity]) -> Iterable[Conflict]:
    for at, loser in enumerate(chosen):
        for winner in chosen[at + 1 :]:
            if winner.rank != loser.rank:
                continue
            for gpu in gpus:
                one, other = _blocks(winner, gpu), _blocks(loser, gpu)
                for block in sorted(one.keys() & other.keys()):
                    if one[block] != other[block]:
                        yield Conflict(winner.name, loser.name, block, gpu)


def _blocks(policy: Policy, gpu: GpuIdentity) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in policy.layers:
        if layer.selector.fits(gpu):
            found.update(layer.blocks)
    return found


def _invalid(name: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(INVALID, f"{KIND} {name or '(without name)'}: {what}", remedy=remedy, policy=name)


def _policy(name: str, metadata: Mapping[str, Any], spec: PolicySpec) -> Policy:
    requirements = _requirements(spec.nodeSelector)
    layers = [_layer(name, group) for group in spec.gpus]
    return Policy(
        name=name,
        generation=int(metadata.get("generation") or 0),
        created=str(metadata.get("creationTimestamp") or "9999"),
        weight=spec.weight,
        specificity=len(requirements),
        requirements=requirements,
        layers=tuple(sorted(layers, key=lambda layer: layer.selector.rank)),
    )


def _requirements(selector: NodeSelector) -> tuple[Requirement, ...]:
    found: list[Requirement] = [
        (key, "In", (value,)) for key, value in sorted((selector.matchLabels or {}).items())
    ]
    found += [(each.key, each.operator, tuple(each.values or ())) for each in selector.matchExpressions or ()]
    return tuple(found)


def _fits(requirements: Iterable[Requirement], labels: Mapping[str, str]) -> bool:
    return all(_holds(labels, *each) for each in requirements)


def _holds(labels: Mapping[str, str], key: str, operator: str, values: tuple[str, ...]) -> bool:
    """Whether a requirement holds. Source: metav1.LabelSelector; NotIn holds where the label is absent."""
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def _layer(name: str, group: GpuGroup) -> SettingsLayer:
    match = group.match
    selector = GpuSelector(
        uuid=match.uuid or "",
        product=match.product or "",
        pci_address=None if match.pciAddress is None else PciAddress.parse(match.pciAddress),
    )
    return SettingsLayer(selector, dict(_group_blocks(group)), f"{KIND} {name}")


def _group_blocks(group: GpuGroup) -> Iterable[tuple[str, Any]]:
    if group.sharing is not None:
        yield (
            "sharing",
            SharingSettings(group.sharing.strategy, group.sharing.shares or 0, group.sharing.enforcement),
        )
    if group.mig is not None:
        yield "mig", MigSettings(group.mig.mode, tuple(sorted((group.mig.layout or {}).items())))
    if group.reserved is not None:
        yield "reserved", ReservedSettings(group.reserved.value, group.reserved.effect)
    if group.attributes is not None:
        yield (
            "attributes",
            {
                key: value.model_dump(by_alias=True, exclude_none=True)
                for key, value in sorted(group.attributes.items())
            },
        )
    if group.health is not None:
        xids = {rule.xid: rule.effect for rule in group.health.xids or ()}
        yield "health", HealthSettings(xids, group.health.temperatureCelsius)
    if group.timeSlice is not None:
        yield "time_slice", group.timeSlice
    if group.driverCapabilities is not None:
        yield "driver_capabilities", tuple(group.driverCapabilities)
    if group.telemetryIntervalSeconds is not None:
        yield "telemetry_interval_seconds", float(group.telemetryIntervalSeconds)
