"""Shares that hold: the amount that a claim was given becomes a limit of MPS, by the strongest means there is.

`per-process`: a control daemon of the claim's own, whose defaults bind each client process, whatever it sets. `cooperative`:
one daemon for all claims of a card, and limits in the environment of each container, which a process may unset; all of
them then have one `/dev/shm` in common. `none`: the card is shared in turns, and nobody is held to anything.

A limit binds each process, not a container as a whole. Which of them holds is said in an Event on the claim, in the
environment of its containers and in the device's attribute `gpudra.dev/enforcement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dra.api.gpu_settings import NodeSettings
from dra.errors import ConfigError, DeviceError
from dra.prepare.effects import Effect
from dra.prepare.shares import Share, share_of
from dra.prepare.sharing.compute_mode import ComputeModes, plan_compute_mode
from dra.prepare.sharing.model import (
    ConfigGroup,
    DeviceEdits,
    SharedDevice,
    SharingContext,
    SharingPlan,
    Tell,
    merge_plans,
    tell_nobody,
)
from dra.prepare.sharing.mps import (
    KIND,
    MpsLimits,
    MpsPlanner,
    card_daemon_id,
)
from dra.slices.sharing import MIB, Enforcement, enforcement_of, mps_clients

# What containers see of their share, with MPS and without.
ENV_MEMORY, ENV_PERCENT, ENV_ENFORCEMENT = (
    "GPUDRA_SHARE_MEMORY_MIB",
    "GPUDRA_SHARE_PERCENT",
    "GPUDRA_SHARE_ENFORCEMENT",
)
# What an MPS client reads. Source: MPS documentation, environment variables.
_CLIENT_MEMORY, _CLIENT_THREADS = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share of a claim, what it comes to, and by what it is held."""

    device: SharedDevice
    share: Share
    enforcement: Enforcement

    @property
    def memory_mib(self) -> int | None:
        """Its memory, None for as much as there is."""
        return None if self.share.memory_bytes is None else self.share.memory_bytes // MIB

    @property
    def words(self) -> str:
        """Its amounts, for people."""
        parts = [] if self.memory_mib is None else [f"{self.memory_mib} MiB of memory"]
        parts += [] if self.share.percent is None else [f"{self.share.percent} % of the multiprocessors"]
        return " and ".join(parts) or "no amount"


class SharePlanner(Protocol):
    """Plans all shares of one claim."""

    def __call__(
        self,
        devices: Sequence[SharedDevice],
        context: SharingContext,
        settings: NodeSettings,
        *,
        holder: bool = False,
    ) -> SharingPlan:
        """Give the plan. `holder`: the claim was prepared already; what holds it stays what it is."""
        ...


class ShareEnforcer:
    """Plans the shares of claims.

    Args:
        mps: plans the daemons; None where there can be none.
        modes: compute modes of the hardware.
        available: whether a keeper of daemons answers at the moment; asked for each claim.
        tell: gives who hears news about a claim.
    """

    def __init__(
        self,
        mps: MpsPlanner | None = None,
        modes: ComputeModes | None = None,
        *,
        available: Callable[[], bool] = lambda: False,
        tell: Callable[[SharingContext], Tell] = lambda _context: tell_nobody,
    ) -> None:
        self._mps, self._modes, self._available, self._tell = mps, modes, available, tell

    def __call__(
        self,
        devices: Sequence[SharedDevice],
        context: SharingContext,
        settings: NodeSettings,
        *,
        holder: bool = False,
    ) -> SharingPlan:
        """Plan the shares among the devices of one claim.

        A claim that was prepared keeps its daemon though the keeper does not answer at the moment, and gets none though
        there is one by now: its containers run.

        Raises:
            DeviceError: DRA-SHARE-ENFORCEMENT: it is required and cannot be had; DRA-SHARE-CLIENTS.
        """
        found = [
            (device, share)
            for device in devices
            if (share := share_of(device.result, device.gpu, settings)) is not None
        ]
        own = _own_daemons(context) if holder and found else frozenset()
        if holder:
            held = [HeldShare(device, share, _kept(device, own)) for device, share in found]
        else:
            mps = self._has_mps(share for _, share in found)
            held = [HeldShare(device, share, _means(device, share, mps=mps)) for device, share in found]
            self._say(held, context)
            self._warn_of_many(held, context)
        return merge_plans(self._group(group, context, holder=holder) for group in _groups(held))

    def _has_mps(self, shares: Iterable[Share]) -> bool:
        # Nobody asks the keeper where nothing is to be held.
        wanted = any(share.sharing.enforcement != "none" and share.limited for share in shares)
        return wanted and self._mps is not None and self._available()

    def _group(self, held: Sequence[HeldShare], context: SharingContext, *, holder: bool) -> SharingPlan:
        """Plan shares that have one daemon, or none, in common."""
        enforcement = held[0].enforcement
        env = _environment(held)
        if enforcement == "none" or self._mps is None or self._modes is None:
            return SharingPlan(edits={each.device.key: DeviceEdits(env=env) for each in held})
        tell = self._tell(context)
        # Several control daemons, or a daemon and its rivals, can use a card in this mode only.
        gpus = {each.device.gpu.uuid: each.device.gpu for each in held if not each.device.is_mig}
        modes: list[Effect] = [
            plan_compute_mode(self._modes, gpu, "DEFAULT", context, tell=tell) for gpu in gpus.values()
        ]
        if enforcement == "cooperative":
            if not holder:
                _check_clients(held[0].device, context)
            plan = self._on_the_cards_daemon(held[0], context, env)
        else:
            plan = self._on_its_own_daemon(held, context, env)
        return SharingPlan((*modes, *plan.effects), plan.edits, plan.warnings)

    def _on_its_own_daemon(
        self, held: Sequence[HeldShare], context: SharingContext, env: tuple[str, ...]
    ) -> SharingPlan:
        assert self._mps is not None
        percents = {each.share.percent for each in held}
        devices = [each.device for each in held]

        def limits(_uuids: Sequence[str]) -> Mapping[str, int]:
            return {each.device.uuid(): each.memory_mib for each in held if each.memory_mib is not None}

        wanted = MpsLimits(percents.pop() if len(percents) == 1 else None, limits, multi_user=True)
        return self._mps.plan(devices, context, limits=wanted, exclusive=False, env=env)

    def _on_the_cards_daemon(
        self, held: HeldShare, context: SharingContext, env: tuple[str, ...]
    ) -> SharingPlan:
        assert self._mps is not None
        device, limits = held.device, MpsLimits(multi_user=True)
        return self._mps.plan(
            [device], context, limits=limits, daemon_id=_card_daemon(device), exclusive=False, env=env
        )

    def _say(self, held: Sequence[HeldShare], context: SharingContext) -> None:
        for each in held:
            if each.share.sharing.enforcement == "none" or not each.share.limited:
                continue
            name = f"device {each.device.result.device}: {each.words}"
            if each.enforcement == "per-process":
                text = (
                    f"{name}: an MPS control daemon of this claim's own holds each process to it; the limit is each "
                    "process's, not the container's as a whole"
                )
                self._tell(context)("ShareEnforced", text)
            elif each.enforcement == "cooperative":
                text = (
                    f"{name}: each process keeps to it by its environment and may leave it; all claims of the card share "
                    "one MPS control daemon and one /dev/shm, and one of them can crash the others"
                )
                self._tell(context)("ShareCooperative", text)
            else:
                text = f"{name}: nothing holds a process to it: {_why_not(each)}"
                self._tell(context)("ShareNotEnforced", text)

    def _warn_of_many(self, held: Sequence[HeldShare], context: SharingContext) -> None:
        """Say where a device gets more servers than one server has room for clients.

        NVIDIA's limit is each server's; nothing says how many servers a device bears beside each other.
        """
        for each in held:
            if each.enforcement != "per-process":
                continue
            name = each.device.result.device
            others = {other.ref.uid for other in context.others(KIND) if name in other.devices}
            most = mps_clients(each.device.gpu, name, context.cuda_version)
            if len(others) >= most:
                self._tell(context)(
                    "ShareManyDaemons",
                    f"device {name}: {len(others) + 1} claims have an MPS control daemon of their own, and one server has "
                    f"room for {most} clients; NVIDIA names no limit for several servers. If CUDA programs say that MPS "
                    "has no resources left (cudaErrorMpsMaxClientsReached), cut the card into fewer shares",
                )


def check_strategy(group: ConfigGroup, settings: NodeSettings) -> None:
    """Refuse MPS of a configuration on parts of a card, which have daemons by themselves. NVIDIA's driver refuses it too.

    Raises:
        ConfigError: DRA-SHARE-MPS.
    """
    shares = [
        device.result.device
        for device in group.devices
        if (share := share_of(device.result, device.gpu, settings)) is not None and not share.whole
    ]
    if group.config.strategy == "MPS" and shares:
        raise ConfigError(
            "DRA-SHARE-MPS",
            f"{group.config.kind} asks for strategy MPS on {', '.join(shares)}, of which the claim has a share only",
            remedy="Remove the sharing block: a share is held to its amount by MPS by itself. Or allocate the whole GPU.",
            device=shares[0],
        )


def _check_clients(device: SharedDevice, context: SharingContext) -> None:
    """Refuse a claim for which the card's daemon has no room. Raises DeviceError: DRA-SHARE-CLIENTS."""
    name = _card_daemon(device)
    others = {each.ref.uid for each in context.others(KIND) if each.entry.args.get("id") == name}
    most = mps_clients(device.gpu, device.result.device, context.cuda_version)
    if len(others) >= most:
        raise DeviceError(
            "DRA-SHARE-CLIENTS",
            f"device {device.result.device} has {len(others)} claims on its MPS control daemon, whose server has room "
            f"for {most} clients at once",
            remedy="It is prepared once one of them ends; cut the card into fewer shares, or give each claim a daemon "
            "of its own (per-process).",
            retryable=True,
            device=device.result.device,
        )


def _card_daemon(device: SharedDevice) -> str:
    return card_daemon_id(f"{device.gpu.uuid}/{device.result.device}" if device.is_mig else device.gpu.uuid)


def _own_daemons(context: SharingContext) -> frozenset[str]:
    own = (each for each in context.of(KIND) if each.ref.uid == context.claim.uid)
    return frozenset(str(each.entry.args.get("id")) for each in own)


def _kept(device: SharedDevice, own: frozenset[str]) -> Enforcement:
    """Say by what a share of a prepared claim is held."""
    if not own:
        return "none"
    return "cooperative" if _card_daemon(device) in own else "per-process"


def _means(device: SharedDevice, share: Share, *, mps: bool) -> Enforcement:
    """Say by what a share is held. Raises DeviceError: DRA-SHARE-ENFORCEMENT."""
    if not share.limited:
        return "none"
    found = enforcement_of(device.gpu, share.sharing, mps=mps)
    if share.sharing.enforcement == "required" and (found == "none" or not mps):
        why = "no MPS keeper answers on this node" if found != "none" else _TOO_OLD
        raise DeviceError(
            "DRA-SHARE-ENFORCEMENT",
            f"device {device.result.device} is shared with limits that must hold, and {why}",
            remedy="Deploy the MPS keeper (deploy/manifests), or see why its pod on this node does not run; the call is "
            "retried by itself. Or share the GPU without /required.",
            retryable=True,
            device=device.result.device,
        )
    return found


_TOO_OLD = "MPS has no limits on GPUs before compute capability 7.0"


def _why_not(held: HeldShare) -> str:
    if enforcement_of(held.device.gpu, held.share.sharing, mps=True) == "none":
        return _TOO_OLD
    return "no MPS keeper answers on this node"


def _groups(held: Sequence[HeldShare]) -> list[list[HeldShare]]:
    """Give the shares that have one daemon in common.

    A container reaches one daemon only. So all of a claim are together, unless one daemon cannot say it: two shares of
    one device, different parts of the multiprocessors, different means. Then those of each request are together, which
    is what a container names.
    """
    if len({each.enforcement for each in held}) == 1 and held[0].enforcement == "none":
        return [[each] for each in held]
    if _goes_together(held):
        return [list(held)]
    by_request: dict[str, list[HeldShare]] = {}
    for each in held:
        by_request.setdefault(each.device.result.request_name, []).append(each)
    groups: list[list[HeldShare]] = []
    for group in by_request.values():
        groups += [group] if _goes_together(group) else [[each] for each in group]
    return groups


def _goes_together(held: Sequence[HeldShare]) -> bool:
    if len(held) > 1 and any(each.enforcement == "cooperative" for each in held):
        return False
    alike = {(each.enforcement, each.share.percent) for each in held}
    devices = {(each.device.gpu.uuid, each.device.result.device) for each in held}
    return len(alike) == 1 and len(devices) == len(held)


def _environment(held: Sequence[HeldShare]) -> tuple[str, ...]:
    """Give what the containers see. Of several devices nobody knows which a container names: then only what all have."""
    found: list[str] = []
    memory = {each.memory_mib for each in held}
    percent = {each.share.percent for each in held}
    enforcement = held[0].enforcement
    if len(memory) == 1 and (mib := memory.pop()) is not None:
        found.append(f"{ENV_MEMORY}={mib}")
        if enforcement != "none" and len(held) == 1:
            found.append(f"{_CLIENT_MEMORY}=0={mib}M")
    if len(percent) == 1 and (part := percent.pop()) is not None:
        found.append(f"{ENV_PERCENT}={part}")
        if enforcement != "none":
            found.append(f"{_CLIENT_THREADS}={part}")
    return (*found, f"{ENV_ENFORCEMENT}={enforcement}")
