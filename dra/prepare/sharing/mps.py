"""MPS: a control daemon for the devices that are shared, its limits, and what containers need to reach it.

The daemon is the keeper's (`dra.mps`); here it is an effect of the claim. Whoever wants one calls `MpsPlanner.plan`:
the strategy MPS of a configuration, and shares with an enforced limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dra.cdi.model import Mount
from dra.errors import ConfigError, DraError
from dra.prepare.effects import Effect
from dra.prepare.sharing.compute_mode import ComputeModes, plan_compute_mode
from dra.prepare.sharing.limits import pinned_memory_mib
from dra.prepare.sharing.model import (
    ConfigGroup,
    DeviceEdits,
    SharedDevice,
    SharingContext,
    SharingPlan,
    Tell,
    tell_nobody,
)
from dra.prepare.sharing.mps_model import (
    CONTAINER_PIPE,
    CONTAINER_SHM,
    MOUNT_OPTIONS,
    DaemonSpec,
    daemon_folders,
    serves_several_users,
)

KIND = "mps-daemon"


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """What the keeper knows of a daemon."""

    spec: DaemonSpec
    ready: bool
    pid: int = 0
    restarts: int = 0


class MpsKeeper(Protocol):
    """The keeper. All calls raise DraError: DRA-MPS-KEEPER-… where it does not answer, DRA-MPS-DAEMON-…."""

    def ensure(self, spec: DaemonSpec) -> None:
        """Have a daemon run that is ready and has these limits. Fine if it does."""
        ...

    def status(self, daemon_id: str) -> DaemonStatus | None:
        """Give what is known of a daemon; None if it is not known."""
        ...

    def stop(self, daemon_id: str) -> None:
        """End a daemon and remove its files. Fine if there is none; also where the keeper is gone with its daemons."""
        ...


@dataclass(frozen=True, slots=True)
class MpsLimits:
    """What the daemon imposes on each client by default.

    Args:
        active_thread_percentage: None: all multiprocessors.
        pinned_memory_mib: gives the limits by UUID for the UUIDs of the devices, in the devices' order; called when
            all of them exist. Raises ConfigError.
        multi_user: clients of several users at once.
    """

    active_thread_percentage: int | None = None
    pinned_memory_mib: Callable[[Sequence[str]], Mapping[str, int]] = lambda _uuids: {}
    multi_user: bool = False


class MpsDaemon:
    """That a control daemon runs for a claim's sake.

    `spec` is called when it is first needed, after the effects before it: a MIG device may be one that they make. A
    daemon of several claims has the same `daemon_id` for all of them, and ends with the last.
    """

    kind: ClassVar[str] = KIND
    # A reboot ends the daemon and leaves its folder.
    ends_with_boot: ClassVar[bool] = False

    def __init__(
        self, keeper: MpsKeeper, daemon_id: str, *, spec: Callable[[], DaemonSpec] | None = None
    ) -> None:
        self._keeper, self._id = keeper, daemon_id
        self._make_spec = spec

    @classmethod
    def revive(cls, args: Mapping[str, Any], *, keeper: MpsKeeper) -> MpsDaemon:
        """Make the effect that ends a daemon."""
        return cls(keeper, str(args["id"]))

    @property
    def shared_resource(self) -> str | None:
        """The daemon."""
        return self._id

    def args(self) -> Mapping[str, Any]:
        """Give its id."""
        return {"id": self._id}

    def apply(self) -> None:
        """Have it run. Raises DraError."""
        self._keeper.ensure(self._spec())

    def verify(self) -> bool:
        """Whether it runs, is ready and has the limits that it should have now. Raises DraError."""
        found = self._keeper.status(self._id)
        return found is not None and found.ready and found.spec == self._spec()

    def undo(self) -> None:
        """End it. Raises DraError."""
        self._keeper.stop(self._id)

    def _spec(self) -> DaemonSpec:
        if self._make_spec is None:
            raise ConfigError("DRA-BUG", f"nothing says what MPS daemon {self._id} should be")
        return self._make_spec()


class MpsPlanner:
    """Plans control daemons.

    Args:
        keeper: who runs them.
        modes: compute modes of the hardware.
        state_dir: the driver's directory.
        host_path: gives the host's spelling of a path below it.
        tell: gives who hears news about a claim.
    """

    def __init__(
        self,
        keeper: MpsKeeper,
        modes: ComputeModes,
        *,
        state_dir: Path,
        host_path: Callable[[Path], str] = str,
        tell: Callable[[SharingContext], Tell] = lambda _context: tell_nobody,
    ) -> None:
        self._keeper, self._modes = keeper, modes
        self._state_dir, self._host_path = state_dir, host_path
        self._tell = tell

    def __call__(self, group: ConfigGroup, context: SharingContext) -> SharingPlan:
        """Plan the strategy MPS of one configuration: a daemon for the claim, with the limits it names.

        Raises:
            ConfigError: DRA-CONFIG-MULTI-USER, DRA-CONFIG-DEVICE, DRA-CONFIG-FIELD.
            DeviceError: DRA-SHARING-CONFLICT.
        """
        block = getattr(getattr(group.config.parameters, "sharing", None), "mpsConfig", None)
        if block is None:
            return self.plan(group.devices, context)
        check_multi_user(group.devices, asked=block.multiUser)
        default, per_device = block.defaultPinnedDeviceMemoryLimit, block.defaultPerDevicePinnedMemoryLimit
        limits = MpsLimits(
            # 0 is no share: see the warning of `dra.api.config`.
            active_thread_percentage=block.defaultActiveThreadPercentage or None,
            pinned_memory_mib=lambda uuids: pinned_memory_mib(uuids, default, per_device),
            multi_user=block.multiUser,
        )
        return self.plan(group.devices, context, limits=limits)

    def plan(
        self,
        devices: Sequence[SharedDevice],
        context: SharingContext,
        *,
        limits: MpsLimits | None = None,
        daemon_id: str = "",
        exclusive: bool | None = None,
        env: Sequence[str] = (),
    ) -> SharingPlan:
        """Plan one daemon for some devices of a claim, and what their containers need.

        Args:
            devices: whole GPUs or MIG devices.
            context: whose claim it is.
            limits: the daemon's defaults for each client; None: none.
            daemon_id: of a daemon that several claims have in common (`card_daemon_id`); all of them must want the
                same of it. Empty: the claim's own.
            exclusive: whether whole GPUs get the compute mode EXCLUSIVE_PROCESS, so that nobody gets past the daemon;
                there can be only one daemon then. None: unless a device is given out in shares.
            env: more for the environment of the containers, as a client's own limits.

        Raises:
            ConfigError: as `limits` does, where all devices exist already.
            DeviceError: DRA-SHARING-CONFLICT.
        """
        wanted = limits or MpsLimits()
        name = daemon_id or claim_daemon_id(context.claim.uid, devices)
        if exclusive is None:
            exclusive = all(device.result.share_id is None for device in devices)
        tell = self._tell(context)
        effects: list[Effect] = []
        if exclusive:
            gpus = {device.gpu.uuid: device.gpu for device in devices if not device.is_mig}
            effects += [
                plan_compute_mode(self._modes, gpu, "EXCLUSIVE_PROCESS", context, tell=tell)
                for gpu in gpus.values()
            ]
        claim = "" if daemon_id else str(context.claim)

        def spec() -> DaemonSpec:
            uuids = tuple(dict.fromkeys(device.uuid() for device in devices))
            return DaemonSpec(
                name,
                tuple(sorted(uuids)),
                wanted.active_thread_percentage,
                dict(wanted.pinned_memory_mib(uuids)),
                wanted.multi_user,
                claim,
            )

        check_now(devices, spec)
        effects.append(MpsDaemon(self._keeper, name, spec=spec))
        edits = self._edits(name, env)
        return SharingPlan(tuple(effects), {device.key: edits for device in devices})

    def _edits(self, daemon_id: str, env: Sequence[str]) -> DeviceEdits:
        folders = daemon_folders(self._state_dir, daemon_id)
        return DeviceEdits(
            env=(f"CUDA_MPS_PIPE_DIRECTORY={CONTAINER_PIPE}", *env),
            mounts=(
                Mount(self._host_path(folders.shm), CONTAINER_SHM, MOUNT_OPTIONS),
                Mount(self._host_path(folders.pipe), CONTAINER_PIPE, MOUNT_OPTIONS),
            ),
        )


def check_now(devices: Sequence[SharedDevice], spec: Callable[[], DaemonSpec]) -> None:
    """Find what is wrong with the limits before anything is touched, if all devices exist. Raises ConfigError."""
    try:
        for device in devices:
            device.uuid()
    except DraError:
        return  # a MIG device that is made by an effect
    spec()


def check_multi_user(devices: Sequence[SharedDevice], *, asked: bool) -> None:
    """Refuse clients of several users on GPUs that cannot keep them apart.

    Raises:
        ConfigError: DRA-CONFIG-MULTI-USER.
    """
    if not asked:
        return
    for device in devices:
        if not device.is_mig and not serves_several_users(device.gpu.compute_capability):
            capability = device.gpu.compute_capability
            shown = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
            raise ConfigError(
                "DRA-CONFIG-MULTI-USER",
                f"sharing.mpsConfig.multiUser: device {device.result.device} has compute capability {shown}, MPS "
                "serves several users from 7.0 on",
                remedy="Leave multiUser out, or select GPUs with cudaComputeCapability 7.0 or more.",
                field="sharing.mpsConfig.multiUser",
                device=device.result.device,
            )


def claim_daemon_id(claim_uid: str, devices: Sequence[SharedDevice]) -> str:
    """Give the id of a claim's own daemon: `<claim UID>-<5 digits>`.

    For whole GPUs it is the one that NVIDIA's driver gives.
    """
    names = sorted({_stable_name(device) for device in devices})
    return f"{claim_uid}-{hashlib.sha256(','.join(names).encode()).hexdigest()[:5]}"


def card_daemon_id(gpu_uuid: str) -> str:
    """Give the id of a daemon that all claims of a GPU (or of a MIG device, by its name) have in common."""
    return f"card-{hashlib.sha256(gpu_uuid.encode()).hexdigest()[:12]}"


def _stable_name(device: SharedDevice) -> str:
    # A MIG device that is made has no UUID yet, and another one each time; one device may be held in several shares.
    share = f"/{device.result.share_id}" if device.result.share_id else ""
    return (f"{device.gpu.uuid}/{device.result.device}" if device.is_mig else device.gpu.uuid) + share
